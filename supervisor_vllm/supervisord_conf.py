"""The host's supervisord configuration, read as supervisord reads it, with the file that each option comes from.

supervisor 4.3.0 options.py (read_config): `[include] files` is a list of globs relative to the main file; each glob is
sorted by itself, the globs keep their order; sections of the same name merge key by key, the later file wins; included
files can't include. Values stay raw here: `%(…)s` is not expanded (but `%(here)s` as supervisord does it at once).
"""

from __future__ import annotations

import configparser
import glob
import os
import platform
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from supervisor.datatypes import FALSY_STRINGS, TRUTHY_STRINGS
from supervisor.options import UnhosedConfigParser, expand

from .errors import UserError

#: supervisor 4.3.0 options.py, default_configfile, without the ones relative to a working directory.
_MAIN_FILES = (
    Path("/etc/supervisord.conf"),
    Path("/etc/supervisor/supervisord.conf"),
)


@dataclass(frozen=True)
class Option:
    """A raw value, and the file that it stands in."""

    value: str
    file: Path


@dataclass(frozen=True)
class SupervisordConf:
    """`globs` are absolute; `files` the main file and the included ones, in the order in which they are read."""

    main_file: Path
    globs: tuple[str, ...]
    files: tuple[Path, ...]
    sections: Mapping[str, Mapping[str, Option]]


@dataclass(frozen=True)
class ProgramSection:
    """One [program:NAME] as the user's files have it. `full_names` are group:process."""

    name: str
    command: str
    file: Path
    options: Mapping[str, str]
    group_name: str
    full_names: tuple[str, ...]
    neighbours: tuple[str, ...] = ()


@dataclass(frozen=True)
class ServerAccess:
    url: str
    username: str | None = None
    password: str | None = None
    #: the password is a {SHA} hash: good to check one, no good to log in with
    password_is_hash: bool = False


def find_main_file() -> Path:
    """The -c of a supervisord that runs, else the usual places. Raises UserError."""
    for arguments in _running_supervisords():
        for flag in ("-c", "--configuration"):
            if flag in arguments[:-1]:
                return Path(arguments[arguments.index(flag) + 1])
    for path in _MAIN_FILES:
        if path.exists():
            return path
    raise UserError("supervisord's main file was not found", hint="name it with --supervisord-conf FILE")


def _running_supervisords() -> Iterator[list[str]]:
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            arguments = entry.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if any(argument.endswith(("/supervisord", "supervisor.supervisord")) for argument in arguments[:4]):
            yield arguments


def read_conf(main_file: Path, *, skip: Collection[Path] = ()) -> SupervisordConf:
    """Everything that supervisord would read, without the files in `skip` (an override: then it is the user's view).

    Raises UserError, with file and line, where supervisord couldn't read it either.
    """
    main_file = main_file.absolute()
    sections: dict[str, dict[str, Option]] = {}
    _read_into(sections, main_file)
    globs = _include_globs(main_file, sections)
    skipped = {path.absolute() for path in skip}
    files = [main_file]
    for pattern in globs:
        for name in sorted(glob.glob(pattern)):
            path = Path(name)
            if path.absolute() not in skipped:
                _read_into(sections, path)
                files.append(path)
    return SupervisordConf(main_file, globs, tuple(files), sections)


def _read_into(sections: dict[str, dict[str, Option]], file: Path) -> None:
    parser = UnhosedConfigParser()
    try:
        with file.open(encoding="utf-8") as lines:
            parser.read_file(lines)
    except OSError as why:
        raise UserError(f"{file} can't be read: {why.strerror}") from None
    except (configparser.Error, UnicodeError) as why:
        raise UserError(f"{file}: {' '.join(str(why).split())}") from None
    parser.expand_here(str(file.parent))
    for section in parser.sections():
        for key, value in parser.items(section, raw=True):
            sections.setdefault(section, {})[key] = Option(value, file)


def _include_globs(main_file: Path, sections: Mapping[str, Mapping[str, Option]]) -> tuple[str, ...]:
    files = sections.get("include", {}).get("files")
    if files is None:
        return ()
    text = expanded(files.value, here=main_file.parent)
    return tuple(os.path.join(main_file.parent, pattern) for pattern in text.split())


def expanded(text: str, **more: object) -> str:
    """supervisord's expansions, as far as we know them: an unknown one leaves the text as it is."""
    values: dict[str, object] = {f"ENV_{key}": value for key, value in os.environ.items()}
    values |= {"host_node_name": platform.node(), **more}
    try:
        return str(expand(text, values, "value"))
    except ValueError:
        return text


def program(conf: SupervisordConf, name: str) -> ProgramSection:
    """Raises UserError where there is none, or none that can be started."""
    section = conf.sections.get(f"program:{name}")
    if section is None or "command" not in section:
        programs = sorted(key.partition(":")[2] for key in conf.sections if key.startswith("program:"))
        raise UserError(
            f"there is no [program:{name}] with a command in {conf.main_file} and what it includes",
            hint=f"the programs there are {', '.join(programs)}" if programs else "there is no program at all",
        )
    options = {key: option.value for key, option in section.items()}
    group = _group_of(conf, name)
    names = _process_names(conf, name, group, options)
    return ProgramSection(
        name=name,
        command=section["command"].value,
        file=section["command"].file,
        options=options,
        group_name=group,
        full_names=tuple(f"{group}:{process}" for process in names),
        neighbours=_neighbours(conf, name, group),
    )


def _group_of(conf: SupervisordConf, name: str) -> str:
    for section, options in conf.sections.items():
        if section.startswith("group:") and name in _program_list(options):
            return section.partition(":")[2]
    return name


def _program_list(options: Mapping[str, Option]) -> list[str]:
    text = options["programs"].value if "programs" in options else ""
    return [word.strip() for word in text.split(",") if word.strip()]


def _process_names(conf: SupervisordConf, name: str, group: str, options: Mapping[str, str]) -> list[str]:
    """supervisor 4.3.0 options.py, processes_from_section: process_name, expanded for each of numprocs."""
    pattern = options.get("process_name", "%(program_name)s")
    count, first = _whole_number(options.get("numprocs"), 1), _whole_number(options.get("numprocs_start"), 0)
    known: dict[str, object] = {"program_name": name, "group_name": group, "numprocs": count}
    numbers = range(first, first + count)
    return [expanded(pattern, process_num=number, **known) for number in numbers]


def _whole_number(text: str | None, default: int) -> int:
    return int(text) if text and text.strip().isdigit() else default


def _neighbours(conf: SupervisordConf, name: str, group: str) -> tuple[str, ...]:
    """The other processes of the group, as group:process."""
    if group == name:
        return ()
    found: list[str] = []
    for other in _program_list(conf.sections.get(f"group:{group}", {})):
        section = conf.sections.get(f"program:{other}", {})
        if other != name:
            options = {key: option.value for key, option in section.items()}
            found += [f"{group}:{process}" for process in _process_names(conf, other, group, options)]
    return tuple(found)


def http_server(conf: SupervisordConf) -> ServerAccess | None:
    """How to reach supervisord. The password is [supervisorctl]'s where it is given there (the server's own may be a
    hash), else the server's."""
    for name in ("unix_http_server", "inet_http_server"):
        section = conf.sections.get(name)
        url = _server_url(conf, name, section) if section else None
        if url is None or section is None:
            continue
        client = conf.sections.get("supervisorctl", {})
        source = client if "password" in client else section
        username, password = (_value(conf, source, key) for key in ("username", "password"))
        return ServerAccess(url, username, password, bool(password and password.startswith("{SHA}")))
    return None


def _server_url(conf: SupervisordConf, name: str, section: Mapping[str, Option]) -> str | None:
    if name == "unix_http_server":
        path = _value(conf, section, "file")
        return f"unix://{path}" if path else None
    port = _value(conf, section, "port")
    if not port:
        return None
    host, _, number = port.rpartition(":")
    return f"http://{'127.0.0.1' if host in ('', '*') else host}:{number}"


def _value(conf: SupervisordConf, section: Mapping[str, Option], key: str) -> str | None:
    return expanded(section[key].value, here=conf.main_file.parent) if key in section else None


def is_true(value: str) -> bool:
    """Of an option that supervisord reads as a boolean; False for what isn't one, too."""
    return value.lower() in TRUTHY_STRINGS


def is_false(value: str) -> bool:
    return value.lower() in FALSY_STRINGS
