"""The event listener: supervisord's protocol in, one recovery a program.

The thread that reads the protocol answers each event at once and does nothing else (see `protocol`). It is crash-only:
the journal holds every step, a SIGKILL or supervisord's SIGTERM needs no farewell.
"""

from __future__ import annotations

import os
import re
import threading
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from . import output
from .classify.pattern import Signature
from .classify.signatures import SIGNATURES
from .classify.user_signatures import load_signatures
from .config_file import Config, load_config
from .context import Context, say
from .control import Supervisord, connect
from .errors import UserError
from .inbox import STOP, TICK, Event, Inbox
from .journal import make_state_dir, open_journal
from .lock import take_lock
from .protocol import SupervisordEvent, read_events, take_stdin, take_stdout
from .recovery import look_after
from .supervisord_conf import http_server, program, read_conf

#: The pause before a recovery that met an unforeseen error (full disk, supervisord gone) is taken up again.
RETRY_SEC = 5.0

_PROCESS_STATE = re.compile(
    r"processname:(?P<process>.*?) groupname:(?P<group>.*?) from_state:(?P<from_state>\w+)"
    r"(?: expected:(?P<expected>\d+))?(?: tries:\d+)?(?: pid:(?P<pid>\d+))?\s*$"
)
_GROUP = re.compile(r"groupname:(?P<group>.*?)\s*$")


def listen(config_path: Path) -> None:
    """Runs until supervisord closes the pipe. Raises UserError before the first READY where the settings are wrong."""
    protocol_in, protocol_out = take_stdin(), take_stdout()
    config = load_config(config_path)
    make_state_dir(config.state_dir)
    lock = take_lock(config.state_dir)
    watchers = Watchers(config, _connection(config))
    watchers.update(config)
    say("listener", f"looks after {', '.join(watchers.inboxes) or 'no program'}")
    for event in read_events(protocol_in, protocol_out):
        watchers.hand_out(event)
    os.close(lock)


def _connection(config: Config) -> Supervisord:
    """supervisord's own word for its address, and the password from the configuration: the environment has none."""
    access = http_server(read_conf(config.supervisord_conf))
    url = os.environ.get("SUPERVISOR_SERVER_URL") or (access.url if access else None)
    if url is None:
        raise UserError(
            "supervisord has no http server, so nothing can be restarted",
            hint="add [unix_http_server] with file=/var/run/supervisor.sock to its main file",
        )
    return connect(url, access.username if access else None, access.password if access else None)


@dataclass
class Watchers:
    """A thread and an inbox for each program of the configuration."""

    config: Config
    server: Supervisord
    inboxes: dict[str, Inbox] = field(default_factory=dict)
    contexts: dict[str, Context] = field(default_factory=dict)
    config_mtime_ns: int = 0
    signatures: tuple[Signature, ...] = SIGNATURES

    def update(self, config: Config) -> None:
        """Start what is new, stop what is gone, give the others their new settings."""
        self.config = config
        self.config_mtime_ns = _mtime_ns(config.path)
        own = load_signatures(config.signatures_dir)
        for problem in own.problems:
            say("listener", f"not used: {problem}")
        self.signatures = own.signatures
        wanted = {item.program: item for item in config.programs}
        for name in list(self.inboxes):
            if name not in wanted:
                self.inboxes.pop(name).put(Event(STOP))
                self.contexts.pop(name, None)
        for name, item in wanted.items():
            if name in self.contexts:
                self.contexts[name].program = item
                self.contexts[name].signatures = self.signatures
            elif name not in self.inboxes:
                self.inboxes[name] = Inbox()
                self._prepare(name)  # before the first event can come: they are handed out by its names
                threading.Thread(target=self._run, args=(name, self.inboxes[name]), name=name, daemon=True).start()

    def _prepare(self, name: str) -> None:
        try:
            self.contexts[name] = _context(self.config, name, self.server, self.inboxes[name], self.signatures)
        except UserError as why:
            say(name, str(why))

    def _run(self, name: str, inbox: Inbox) -> None:
        """One program's thread. What was not foreseen (full disk, supervisord gone) is said and taken up again."""
        while True:
            try:
                if name in self.contexts:
                    look_after(self.contexts[name])
                    return
            except UserError as why:
                say(name, str(why))
            except Exception:
                say(name, f"unforeseen, taken up again in {RETRY_SEC:g} s: {traceback.format_exc()}")
            if _stopped_while_waiting(inbox) or self.inboxes.get(name) is not inbox:
                return
            self._prepare(name)

    def hand_out(self, event: SupervisordEvent) -> None:
        name, payload = event.name, event.payload
        if name.startswith("TICK"):
            self._follow_config()
            for inbox in self.inboxes.values():
                inbox.put(Event(TICK))
            return
        match = _PROCESS_STATE.match(payload) if name.startswith("PROCESS_STATE_") else None
        if match:
            told = _state_event(name, match.groupdict())
            for program_name in self._programs_of(match["group"], match["process"]):
                if told.name in ("EXITED", "FATAL", "STOPPED"):
                    self.contexts[program_name].end_serial = event.serial
                self.inboxes[program_name].put(told)
        elif name == "PROCESS_GROUP_REMOVED" and (match := _GROUP.match(payload)):
            for program_name in self._programs_of(match["group"], None):
                self.inboxes[program_name].put(Event("GROUP_REMOVED"))

    def _programs_of(self, group: str, process: str | None) -> list[str]:
        return [
            name
            for name, context in list(self.contexts.items())
            if name in self.inboxes
            and context.section.group_name == group
            and (process is None or f"{group}:{process}" in context.section.full_names)
        ]

    def _follow_config(self) -> None:
        """Settings edited by hand count from the next tick; wrong ones are named once and the old ones stay."""
        mtime_ns = _mtime_ns(self.config.path)
        if mtime_ns == self.config_mtime_ns:
            return
        self.config_mtime_ns = mtime_ns
        try:
            self.update(load_config(self.config.path))
        except UserError as why:
            say("listener", f"the settings stay as they were: {why}")


def _context(
    config: Config, name: str, server: Supervisord, inbox: Inbox, signatures: tuple[Signature, ...]
) -> Context:
    item = config.program(name)
    section = program(read_conf(config.supervisord_conf, skip=(item.override_path,)), name)
    journal = open_journal(config.state_dir)
    context = Context(config, item, section, journal, server, inbox, signatures=signatures)
    output.create_files(context)
    return context


def _stopped_while_waiting(inbox: Inbox) -> bool:
    event = inbox.take(RETRY_SEC)
    return event is not None and event.name == STOP


def _state_event(name: str, fields: Mapping[str, str | None]) -> Event:
    pid, expected = fields["pid"], fields["expected"]
    return Event(
        name.removeprefix("PROCESS_STATE_"),
        pid=int(pid) if pid and pid != "0" else None,
        from_state=fields["from_state"],
        expected=None if expected is None else expected == "1",
    )


def _mtime_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
