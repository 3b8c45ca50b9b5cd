"""A program's output where supervisord keeps no file of it (stdout_logfile=/dev/stdout, NONE, syslog).

supervisord can hand it out as events (`stdout_events_enabled`, PROCESS_LOG); the output listener writes them to files
of its own in the state directory, which then count as the program's log. The user's own output stays where it goes.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Mapping
from pathlib import Path

from .context import Context, say
from .journal import make_state_dir
from .lock import is_running
from .supervisord_conf import ProgramSection, is_false, is_true

#: Within the state directory.
DIRECTORY_NAME = "output"
#: As supervisord's own option names begin, and the suffix of the file that holds the channel.
CHANNELS = {"stdout": "out", "stderr": "err"}
#: The longest wait for the end of a dead program's output. It comes within milliseconds, or its events were lost.
SETTLE_LIMIT_SEC = 5.0

#: supervisor 4.3.0 datatypes.py, logfile_name: what isn't a path
_NOT_A_FILE = ("none", "off", "syslog", "")
_SETTLE_STEP_SEC = 0.01
_UNSEEN_PAUSE_SEC = 0.3


def captured_channels(section: ProgramSection, *, shadow: bool) -> tuple[str, ...]:
    """The channels of a program (the user's section) that only events can tell of.

    Not those that the user has switched off himself (`stdout_events_enabled=false`). In shadow mode there is no
    override that would switch them on, so only those that the user has switched on.
    """
    options = section.options
    found = []
    for channel in CHANNELS:
        if channel == "stderr" and is_true(options.get("redirect_stderr", "")):
            continue
        asked = options.get(f"{channel}_events_enabled", "")
        wanted = is_true(asked) if shadow else not is_false(asked)
        if wanted and not is_log_file(options.get(f"{channel}_logfile", "AUTO")):
            found.append(channel)
    return tuple(found)


def is_log_file(value: str) -> bool:
    """Can what is written there be read back? `value` as in stdout_logfile, or the path that supervisord says."""
    if value.lower() in _NOT_A_FILE:
        return False
    if value.startswith(("/dev/", "/proc/")):  # of *supervisord's* process: no other can follow it
        return value.startswith("/dev/shm/")
    try:
        return stat.S_ISREG(os.stat(value).st_mode)
    except OSError:
        return True  # not there yet


def output_directory(state_dir: Path) -> Path:
    return state_dir / DIRECTORY_NAME


def output_path(state_dir: Path, program: str, channel: str) -> Path:
    return output_directory(state_dir) / f"{program}.{CHANNELS[channel]}"


def serial_path(state_dir: Path, program: str) -> Path:
    """Holds the serial of the program's last state event: what it wrote before that is in its files."""
    return output_directory(state_dir) / f"{program}.serial"


def captured_paths(context: Context) -> Mapping[str, str]:
    """The files of the channels that are captured, by channel. Empty where the output listener isn't configured."""
    if not context.config.has_output_listener:
        return {}
    channels = captured_channels(context.section, shadow=context.settings.mode == "shadow")
    return {channel: str(output_path(context.config.state_dir, context.name, channel)) for channel in channels}


def create_files(context: Context) -> None:
    """Before the first life: a file that is there can be marked as the place where the program's output begins."""
    paths = captured_paths(context)
    if paths:
        make_state_dir(output_directory(context.config.state_dir))
    for path in paths.values():
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))


def settle(context: Context, *, unseen: bool = False) -> None:
    """Wait until all that a program wrote before its end is in its files: the event of the end comes to the listener by
    another way than the output, and must not come before it.

    `unseen`: the listener came after the end, whose event it hasn't; the output listener, which starts beside it, has.
    """
    serial, context.end_serial = context.end_serial, None
    if unseen and serial is None:
        serial = 0
    if serial is None or not captured_paths(context):
        return
    deadline = time.monotonic() + SETTLE_LIMIT_SEC
    while _written_serial(context) < serial:
        if time.monotonic() >= deadline:
            # one that isn't there yet may be starting together with supervisord: it had the same time
            runs = is_running(output_directory(context.config.state_dir))
            why = (
                f"didn't come within {SETTLE_LIMIT_SEC:g} s"
                if runs
                else "is not known: the output listener doesn't run"
            )
            say(context.name, f"the end of the program's output {why}")
            return
        time.sleep(_SETTLE_STEP_SEC)
    if unseen:  # the serial may be that of an earlier event; what follows it comes within milliseconds
        time.sleep(_UNSEEN_PAUSE_SEC)


def _written_serial(context: Context) -> int:
    try:
        return int(serial_path(context.config.state_dir, context.name).read_text(encoding="ascii"))
    except (OSError, ValueError):
        return -1
