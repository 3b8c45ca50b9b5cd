"""The output listener: writes the output that supervisord hands out as events to files in the state directory.

A process of its own, with a buffer of its own in supervisord: a flood of output may cost output there, never the event
of a death; and it answers at once, whatever the other listener computes. Run by supervisord as
`python -m supervisor_vllm.output_listener --config FILE`.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from . import output
from .config_file import Config, load_config
from .context import say
from .errors import UserError
from .journal import make_state_dir
from .lock import take_lock
from .output_file import OutputFile
from .protocol import SupervisordEvent, read_events, take_stdin, take_stdout
from .supervisord_conf import program, read_conf

_LOG_HEAD = re.compile(
    r"processname:(?P<process>.*?) groupname:(?P<group>.*?) pid:(?P<pid>\d+) channel:(?P<channel>stdout|stderr)\n"
)
_STATE_HEAD = re.compile(r"processname:(?P<process>.*?) groupname:(?P<group>.*?) from_state:")
_UNDECODABLE = "Undecodable: "


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 2: a mistake in the settings, one line on stderr."""
    parser = argparse.ArgumentParser(prog="supervisor_vllm.output_listener")
    parser.add_argument("--config", required=True, type=Path)
    try:
        listen(parser.parse_args(arguments).config)
    except UserError as why:
        print(f"supervisor-vllm: {why}", file=sys.stderr)
        return 2
    return 0


def listen(config_path: Path) -> None:
    """Runs until supervisord closes the pipe. Raises UserError before the first READY where the settings are wrong."""
    protocol_in, protocol_out = take_stdin(), take_stdout()
    config = load_config(config_path)
    make_state_dir(config.state_dir)
    directory = output.output_directory(config.state_dir)
    make_state_dir(directory)
    lock = take_lock(directory)
    for old in directory.glob("*.serial"):  # supervisord counts from 0 again after its own restart
        old.unlink(missing_ok=True)
    outputs = Outputs(config)
    outputs.follow_files()
    for event in read_events(protocol_in, protocol_out):
        outputs.take(event)
    os.close(lock)


def raw_bytes(text: str) -> bytes:
    """What the program really wrote. supervisord cuts the output anywhere, and hands out a piece that isn't UTF-8 by
    itself as "Undecodable: b'…'" (supervisor 4.2.5 and 4.3.0 events.py)."""
    if text.startswith((_UNDECODABLE + "b'", _UNDECODABLE + 'b"')):
        with suppress(ValueError, SyntaxError, MemoryError, RecursionError):
            data = ast.literal_eval(text.removeprefix(_UNDECODABLE))
            if isinstance(data, bytes) and not _is_utf8(data):  # else a program has written these words itself
                return data
    return text.encode("utf-8", errors="surrogateescape")


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


@dataclass
class Outputs:
    """The files of each program, by supervisord's name of its process (group, process)."""

    config: Config
    files: dict[tuple[str, str], dict[str, OutputFile]] = field(default_factory=dict)
    programs: dict[tuple[str, str], str] = field(default_factory=dict)

    def take(self, event: SupervisordEvent) -> None:
        if event.name.startswith("PROCESS_LOG"):
            self._append(event.payload)
        elif event.name.startswith("PROCESS_STATE_"):
            self._note_state(event)
        elif event.name.startswith("TICK"):
            for files in self.files.values():
                for file in files.values():
                    file.look_after()

    def _append(self, payload: str) -> None:
        head = _LOG_HEAD.match(payload)
        files = self.files.get((head["group"], head["process"])) if head else None
        if head and files and (file := files.get(head["channel"])):
            file.append(int(head["pid"]), raw_bytes(payload[head.end() :]))

    def _note_state(self, event: SupervisordEvent) -> None:
        """Events come in order: all that the program wrote before this one is in its files."""
        head = _STATE_HEAD.match(event.payload)
        if not head:
            return
        name = (head["group"], head["process"])
        if event.name == "PROCESS_STATE_STARTING":
            self.follow_files()  # what the user has edited counts from a start on
            for file in self.files.get(name, {}).values():
                file.begin_life()
        elif name in self.programs:
            self._write_serial(self.programs[name], event.serial)

    def _write_serial(self, program_name: str, serial: int) -> None:
        path = output.serial_path(self.config.state_dir, program_name)
        temporary = path.with_name(path.name + ".tmp")
        try:
            temporary.write_text(str(serial), encoding="ascii")
            os.replace(temporary, path)
        except OSError as why:
            say("output", f"{path} can't be written ({why.strerror})")

    def follow_files(self) -> None:
        """The programs and channels as the configuration files have them now. Wrong files: as before."""
        try:
            config = load_config(self.config.path)
            overrides = tuple(item.override_path for item in config.programs)
            conf = read_conf(config.supervisord_conf, skip=overrides)
        except UserError as why:
            say("output", f"the programs stay as they were: {why}")
            return
        files: dict[tuple[str, str], dict[str, OutputFile]] = {}
        programs: dict[tuple[str, str], str] = {}
        for item in config.programs:
            try:
                section = program(conf, item.program)
            except UserError as why:
                say(item.program, str(why))
                continue
            group, _, process = section.full_names[0].partition(":")
            name = (group, process)
            programs[name] = item.program
            channels = output.captured_channels(section, shadow=item.settings.mode == "shadow")
            files[name] = {channel: self._file(name, item.program, channel) for channel in channels}
        self._close_all_but(files)
        self.files, self.programs = files, programs

    def _file(self, name: tuple[str, str], program_name: str, channel: str) -> OutputFile:
        known = self.files.get(name, {}).get(channel)
        path = output.output_path(self.config.state_dir, program_name, channel)
        if known is not None and known.path == path:
            return known
        return OutputFile(path, lambda sentence: say(program_name, sentence))

    def _close_all_but(self, kept: dict[tuple[str, str], dict[str, OutputFile]]) -> None:
        still = {id(file) for files in kept.values() for file in files.values()}
        for files in self.files.values():
            for file in files.values():
                if id(file) not in still:
                    file.close()


if __name__ == "__main__":
    sys.exit(main())
