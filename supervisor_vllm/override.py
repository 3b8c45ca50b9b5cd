"""The override: `[program:NAME]` again, in a file that supervisord reads after the user's.

It is a pure function of the user's base command and the learned changes. It turns supervisord's own restarts off (they
would race the listener with the old arguments), and holds `command=` only while there is something to change.
"""

from __future__ import annotations

import configparser
import hashlib
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

from .errors import UserError
from .incident import Change
from .output import captured_channels
from .policy.launch_command import parse_launch, redact, with_flag
from .supervisord_conf import ProgramSection

_BASE_PREFIX = "; base command ("


def apply_changes(base_command: str, changes: Iterable[Change]) -> str:
    """The raw command with each change in it."""
    command = base_command
    for change in changes:
        command = with_flag(command, change.flag, change.to)
    return command


def still_valid(base_command: str, changes: Iterable[Change]) -> tuple[Change, ...]:
    """Without the changes whose flag the user has set differently since: a hand edit wins."""
    launched = parse_launch(base_command)
    return tuple(change for change in changes if launched.get(change.flag) == change.from_)


def render_override(section: ProgramSection, changes: tuple[Change, ...]) -> str:
    """The file's text."""
    lines = [
        "; Written by supervisor-vllm. Deleting this file (then: supervisorctl update) undoes everything in it.",
        f"; It must go when [program:{section.name}] goes from {section.file}:",
        "; without a command there supervisord doesn't start.",
        *(
            f"; {change.flag}: {change.from_ or 'default'} -> {change.to or 'removed'} ({_one_line(change.why)})"
            for change in changes
        ),
    ]
    if changes:
        lines.append(_base_line(section.command) + _one_line(redact(section.command)))
    lines += [
        f"[program:{section.name}]",
        "; restarts are the listener's: supervisord's own would come with the old arguments",
        "autorestart=false",
        "startretries=0",
        "stopasgroup=true",
        "killasgroup=true",
    ]
    channels = captured_channels(section, shadow=False)
    if channels:
        lines.append("; its log isn't a file: the output listener keeps what it writes")
        lines += [f"{channel}_events_enabled=true" for channel in channels]
    if changes:
        lines.append(f"command={_as_value(apply_changes(section.command, changes))}")
    return "\n".join(lines) + "\n"


def _as_value(command: str) -> str:
    """A value over several lines goes on indented."""
    first, *others = command.splitlines()
    return "\n".join([first, *(f"    {line.strip()}" for line in others if line.strip())])


def _one_line(text: str) -> str:
    return " ".join(text.split())


def has_base(text: str) -> bool:
    """Does the override hold a command, built from one of the user's?"""
    return any(line.startswith(_BASE_PREFIX) for line in text.splitlines())


def is_built_from(text: str, base_command: str) -> bool:
    """From this very command: told by its digest, which no hand edit of the override changes."""
    return any(line.startswith(_base_line(base_command)) for line in text.splitlines())


def _base_line(base_command: str) -> str:
    digest = hashlib.sha256(_one_line(base_command).encode()).hexdigest()[:12]
    return f"{_BASE_PREFIX}{digest}): "


def read_command(text: str) -> str | None:
    """The raw command that the override's text holds, as supervisord reads it; None where it holds none."""
    parser = configparser.RawConfigParser(inline_comment_prefixes=(";", "#"), strict=False)
    try:
        parser.read_string(text)
    except configparser.Error:
        return None
    return next((parser[name]["command"] for name in parser.sections() if "command" in parser[name]), None)


def read_text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeError) as why:
        raise UserError(f"{path} can't be read ({why})") from None


def write_file(path: Path, text: str, *, like: Path | None = None) -> None:
    """All of it or nothing, also over a power cut. Mode and owner are those of `like` (the user's own file).

    The temporary file begins with a dot and ends in .tmp: no include glob reads it.
    """
    if path.is_symlink():
        raise UserError(f"{path} is a link", hint="remove it: supervisor-vllm writes only files of its own")
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            if like is not None:
                status = like.stat()
                os.fchmod(file.fileno(), status.st_mode & 0o777)
                if os.geteuid() == 0:
                    os.fchown(file.fileno(), status.st_uid, status.st_gid)
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
    _fsync_directory(path.parent)


def remove_file(path: Path) -> None:
    path.unlink(missing_ok=True)
    _fsync_directory(path.parent)


def _fsync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
