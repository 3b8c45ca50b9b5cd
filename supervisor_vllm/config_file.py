"""The file that `init` writes to conf.d: the listeners' sections and the settings of each program.

supervisord reads the listeners' sections and ignores the others (measured: an odd `%` in them does no harm).
It is edited with ConfigUpdater, so that comments and hand edits stay.
"""

from __future__ import annotations

import configparser
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import UserError
from .settings import DEFAULT_CONF_DIR, SIGNATURES_DIR, TABLE, Settings, parse_settings

LISTENER = "eventlistener:supervisor-vllm"
#: Only where the output of a program is no file. Not the listener's own section: there a flood of output takes the
#: whole buffer, and supervisord drops the oldest event, that of a death among them (measured).
OUTPUT_LISTENER = "eventlistener:supervisor-vllm-output"
COMMON = "supervisor-vllm"
PROGRAM_PREFIX = "supervisor-vllm:"
STEM = "supervisor-vllm"
OUTPUT_LISTENER_LOG = "output-listener.log"
DEFAULT_STATE_DIR = Path("/var/lib/supervisor-vllm")


@dataclass(frozen=True)
class ProgramConfig:
    program: str
    override_path: Path
    settings: Settings


@dataclass(frozen=True)
class Config:
    """What the file says."""

    path: Path
    state_dir: Path
    supervisord_conf: Path
    programs: tuple[ProgramConfig, ...] = ()
    has_output_listener: bool = False

    @property
    def conf_dir(self) -> Path:
        return self.path.parent

    @property
    def signatures_dir(self) -> Path:
        """Where the user's own signatures are; it need not exist."""
        return self.conf_dir / SIGNATURES_DIR

    def program(self, name: str) -> ProgramConfig:
        for item in self.programs:
            if item.program == name:
                return item
        known = ", ".join(item.program for item in self.programs) or "none"
        raise UserError(f"supervisor-vllm doesn't look after a program {name!r}", hint=f"it looks after: {known}")


def find_config(config: str | None, conf_dir: str | None) -> Path:
    """--config FILE, else the file that init wrote in --conf-dir, else in /etc/supervisor/conf.d."""
    if config:
        return Path(config)
    directory = Path(conf_dir) if conf_dir else DEFAULT_CONF_DIR
    found = sorted(path for path in directory.glob(f"{STEM}.*") if path.is_file() and _is_ours(path))
    if not found:
        raise UserError(
            f"there is no {STEM}.conf in {directory}",
            hint="run supervisor-vllm init first, or name the directory with --conf-dir",
        )
    return found[0]


def _is_ours(path: Path) -> bool:
    try:
        return f"[{COMMON}]" in path.read_text(encoding="utf-8")
    except (OSError, UnicodeError):
        return False


def load_config(path: Path) -> Config:
    """Raises UserError with file, section and name for anything that is wrong."""
    try:
        return parse_config(path, path.read_text(encoding="utf-8"))
    except OSError as why:
        raise UserError(f"{path} can't be read: {why.strerror}") from None
    except UnicodeError as why:
        raise UserError(f"{path}: {why}") from None


def parse_config(path: Path, text: str) -> Config:
    """What the text of that file would mean."""
    parser = _parse(path, text)
    if not parser.has_section(COMMON):
        raise UserError(f"{path} has no section [{COMMON}]", hint="run supervisor-vllm init again")
    common = parser[COMMON]
    for key in ("state_dir", "supervisord_conf"):
        if not common.get(key):
            raise UserError(f"{path} [{COMMON}]: {key} is missing", hint="run supervisor-vllm init again")
    programs = tuple(
        _program_config(path, section, parser[section])
        for section in parser.sections()
        if section.startswith(PROGRAM_PREFIX)
    )
    return Config(
        path,
        Path(common["state_dir"]),
        Path(common["supervisord_conf"]),
        programs,
        parser.has_section(OUTPUT_LISTENER),
    )


def _parse(path: Path, text: str) -> configparser.RawConfigParser:
    # As supervisord's own parser reads it (supervisor 4.3.0 options.py, UnhosedConfigParser).
    parser = configparser.RawConfigParser(inline_comment_prefixes=(";", "#"), strict=False)
    try:
        parser.read_string(text, source=str(path))
    except configparser.Error as why:
        raise UserError(f"{path}: {' '.join(str(why).split())}") from None
    return parser


def _program_config(path: Path, section: str, values: Mapping[str, str]) -> ProgramConfig:
    override = values.get("override")
    if not override:
        raise UserError(f"{path} [{section}]: override is missing", hint="run supervisor-vllm init again")
    settings = {key: value for key, value in values.items() if key != "override"}
    return ProgramConfig(
        section.removeprefix(PROGRAM_PREFIX),
        path.parent / override,
        parse_settings(settings, where=f"{path} [{section}]"),
    )


def edited(
    before: str | None,
    path: Path,
    *,
    program: str,
    override_name: str,
    state_dir: Path,
    supervisord_conf: Path,
    settings: Mapping[str, str],
    output_listener: bool = False,
) -> str:
    """The file's text with this program in it. What stands there already stays as it is, other than what is set now.

    `output_listener`: the program's log is no file, and its output must be taken from supervisord's events.
    """
    from configupdater import ConfigUpdater

    for name, value in settings.items():
        # a blank before ; or # would begin a comment for every reader of the file
        if "\n" in value or " ;" in value or " #" in value or value[:1] in (";", "#"):
            raise UserError(f"--set {name}={value}: the text can't be kept in an ini file", hint="leave out ; and #")
    parse_settings(settings)
    updater = ConfigUpdater()
    updater.read_string(before if before is not None else _new_file(path, state_dir, supervisord_conf))
    _set(updater[COMMON], "state_dir", str(state_dir))
    _set(updater[COMMON], "supervisord_conf", str(supervisord_conf))
    _set(updater[LISTENER], "command", listener_command(path))
    _set(updater[LISTENER], "stderr_logfile", _doubled(str(state_dir / "listener.log")))
    if output_listener and not updater.has_section(OUTPUT_LISTENER):
        _add_after(updater[LISTENER], OUTPUT_LISTENER, _new_output_listener(path, state_dir))
    if updater.has_section(OUTPUT_LISTENER):
        _set(updater[OUTPUT_LISTENER], "command", output_listener_command(path))
        _set(updater[OUTPUT_LISTENER], "stderr_logfile", _doubled(str(state_dir / OUTPUT_LISTENER_LOG)))
    section = PROGRAM_PREFIX + program
    if not updater.has_section(section):
        _add_after(updater[updater.sections()[-1]], section, _new_section(section, override_name, settings))
    for name, value in {"override": override_name, **settings}.items():
        _set(updater[section], name, value)
    return str(updater)


def _set(section: Any, name: str, value: str) -> None:
    """An option that stands there is changed, a new one goes to where its commented default is."""
    if name in section:
        if section[name].value != value:
            section[name].value = value
        return
    section[section.options()[-1]].add_after.option(name, value)


def _add_after(place: Any, name: str, text: str) -> None:
    """The text's section `name`, after a blank line."""
    from configupdater import ConfigUpdater

    new = ConfigUpdater()
    new.read_string(text)
    place.add_after.space(1).section(new[name].detach())


def without_program(before: str, program: str) -> str | None:
    """The file's text without this program; None when it was the last one."""
    from configupdater import ConfigUpdater

    updater = ConfigUpdater()
    updater.read_string(before)
    updater.remove_section(PROGRAM_PREFIX + program)
    if not any(name.startswith(PROGRAM_PREFIX) for name in updater.sections()):
        return None
    return str(updater)


def listener_command(path: Path) -> str:
    """This very interpreter: it is the one that has our package."""
    return _doubled(shlex.join([sys.executable, "-m", "supervisor_vllm", "listen", "--config", str(path)]))


def output_listener_command(path: Path) -> str:
    return _doubled(shlex.join([sys.executable, "-m", "supervisor_vllm.output_listener", "--config", str(path)]))


def _doubled(text: str) -> str:
    """supervisord expands %(…)s in values: a literal percent sign is written twice."""
    return text.replace("%", "%%")


def _new_file(path: Path, state_dir: Path, supervisord_conf: Path) -> str:
    return f"""\
; Written by supervisor-vllm init. Edit the settings below as you like: they count from the next tick (5 s) on.
; `supervisor-vllm uninstall PROGRAM` takes this file and the override out again.

[{LISTENER}]
command={listener_command(path)}
; answered at once and worked on elsewhere; the buffer is for the listener's own restart
events=PROCESS_STATE,PROCESS_GROUP,TICK_5
buffer_size=1000
; events come only once it is RUNNING
startsecs=0
; python -m looks for modules in its working directory first
directory=/
autostart=true
; 2 is a mistake in the settings: it stays down, and its log says why
autorestart=unexpected
exitcodes=0,2
; stdout is the event protocol's
stderr_logfile={_doubled(str(state_dir / "listener.log"))}
stderr_logfile_maxbytes=5MB
stderr_logfile_backups=2

[{COMMON}]
state_dir={state_dir}
supervisord_conf={supervisord_conf}
"""


def _new_output_listener(path: Path, state_dir: Path) -> str:
    return f"""\
[{OUTPUT_LISTENER}]
; keeps the output of a program whose log isn't a file; with a buffer of its own, so that no flood pushes a death out
command={output_listener_command(path)}
events=PROCESS_LOG,PROCESS_STATE,TICK_5
; the listener may start beside the flood: seconds pass on a busy host until it reads (measured: 1000 isn't enough)
buffer_size=10000
startsecs=0
directory=/
autostart=true
autorestart=unexpected
exitcodes=0,2
stderr_logfile={_doubled(str(state_dir / OUTPUT_LISTENER_LOG))}
stderr_logfile_maxbytes=1MB
stderr_logfile_backups=1
"""


def _new_section(section: str, override_name: str, settings: Mapping[str, str]) -> str:
    """Every setting with its meaning; those that aren't given as comments with their defaults."""
    lines = [
        "",
        f"[{section}]",
        "; the file beside this one that carries the changed arguments",
        f"override={override_name}",
    ]
    for setting in TABLE:
        given = settings.get(setting.name)
        lines += [
            f"; {setting.help}",
            f"; {setting.name}={setting.default_text}" if given is None else f"{setting.name}={given}",
        ]
    return "\n".join(lines) + "\n"
