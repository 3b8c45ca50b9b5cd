"""init, uninstall and check: what is found in the host's configuration, one line each, and the two files of ours.

init decides everything before it writes anything, and writes only what differs.
"""

from __future__ import annotations

import fnmatch
import functools
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from . import config_file, output, override
from .classify.user_signatures import load_signatures
from .config_file import Config, ProgramConfig
from .errors import UserError
from .incident import Change
from .journal import make_state_dir, open_journal
from .policy.launch_command import parse_launch
from .supervisord_conf import ProgramSection, SupervisordConf, find_main_file, http_server, is_true, program, read_conf


@dataclass(frozen=True)
class Finding:
    """`level`: ok, note, warning (works, but), error (must be put right)."""

    level: str
    text: str


@dataclass(frozen=True)
class Result:
    """What was found, the exact next command, and what that command will do."""

    findings: tuple[Finding, ...]
    next_command: str
    next_effect: str


def init(
    *,
    program: str,
    conf_dir: Path,
    supervisord_conf: Path | None,
    state_dir: Path | None,
    settings: Mapping[str, str],
) -> Result:
    """Raises UserError, with nothing written, where it can't work."""
    conf_dir = conf_dir.absolute()
    if not conf_dir.is_dir():
        raise UserError(f"{conf_dir} is not a directory", hint="name the directory that supervisord includes")
    main_file = (supervisord_conf or find_main_file()).absolute()
    suffix = _suffix(read_conf(main_file), conf_dir)
    path = conf_dir / f"{config_file.STEM}{suffix}"
    existing = config_file.load_config(path) if path.exists() else None
    section = _user_section(main_file, conf_dir, existing, program)
    override_path = _override_path(main_file, section, conf_dir, suffix, existing)
    state = (state_dir or (existing.state_dir if existing else config_file.DEFAULT_STATE_DIR)).absolute()
    edit = functools.partial(
        config_file.edited,
        override.read_text(path),
        path,
        program=program,
        override_name=override_path.name,
        state_dir=state,
        supervisord_conf=main_file,
        settings=settings,
    )
    text = edit()
    shadow = config_file.parse_config(path, text).program(program).settings.mode == "shadow"
    if output.captured_channels(section, shadow=shadow):
        text = edit(output_listener=True)
    findings = list(_findings(read_conf(main_file, skip=(override_path,)), section, state, shadow=shadow))
    make_state_dir(state)
    changed = _write_all(path, text, override_path, None if shadow else section, state)
    findings += _written(changed, path, override_path, shadow=shadow)
    return Result(tuple(findings), _ctl(main_file, "update"), _next_effect(section, changed, shadow=shadow))


def _suffix(conf: SupervisordConf, conf_dir: Path) -> str:
    """`.conf`, or what the include glob of this directory wants (`.ini`)."""
    for suffix in (".conf", ".ini", ".cfg"):
        if any(fnmatch.fnmatch(str(conf_dir / f"{config_file.STEM}{suffix}"), os.path.normpath(g)) for g in conf.globs):
            return suffix
    globs = ", ".join(conf.globs) or "none"
    raise UserError(
        f"{conf.main_file} does not include files of {conf_dir} (its [include] files are: {globs})",
        hint="name a directory that it includes with --conf-dir, or add [include] files = " + str(conf_dir / "*.conf"),
    )


def _user_section(main_file: Path, conf_dir: Path, existing: Config | None, name: str) -> ProgramSection:
    """The program as the user has it; refused where supervisor-vllm can't look after it."""
    skip = tuple(item.override_path for item in existing.programs) if existing else ()
    conf = read_conf(main_file, skip=skip)
    section = program(conf, name)
    if not parse_launch(section.command).is_vllm:
        raise UserError(
            f"[program:{name}] does not run a vLLM server that can be seen in its command ({_short(section.command)})",
            hint="the command must hold `vllm serve …` itself, not a script around it",
        )
    if len(section.full_names) > 1:
        raise UserError(
            f"[program:{name}] has numprocs={len(section.full_names)}: one override can't hold two sets of arguments",
            hint="write one [program:…] for each server",
        )
    if http_server(conf) is None:
        raise UserError(
            f"{main_file} has no http server, so nothing could restart {name}",
            hint="add the sections [unix_http_server] with file=/var/run/supervisor.sock and [rpcinterface:supervisor] "
            "with supervisor.rpcinterface_factory=supervisor.rpcinterface:make_main_rpcinterface",
        )
    return section


def _override_path(
    main_file: Path, section: ProgramSection, conf_dir: Path, suffix: str, existing: Config | None
) -> Path:
    """A name that is read after the user's file: proven with the true include order, not guessed."""
    if existing:
        for item in existing.programs:
            if item.program == section.name and _wins(main_file, section, item.override_path):
                return item.override_path
    for prefix in ("zz-", "zzzz-", "zzzzzzzz-", "~zz-"):
        path = conf_dir / f"{prefix}{config_file.STEM}-{section.name}{suffix}"
        if _wins(main_file, section, path):
            return path
    raise UserError(
        f"{section.file} is read after every file that could stand in {conf_dir}, so an override there can't win",
        hint="name the directory whose files supervisord reads last with --conf-dir",
    )


def _wins(main_file: Path, section: ProgramSection, path: Path) -> bool:
    """Would this file be read after every file that holds something of the program? The order is supervisord's: glob
    after glob, each one sorted."""
    conf = read_conf(main_file, skip=(path,))
    holders = {option.file for option in conf.sections[f"program:{section.name}"].values()}
    order: list[Path] = [main_file]
    for pattern in conf.globs:
        names = [file for file in conf.files[1:] if fnmatch.fnmatch(str(file), pattern)]
        if fnmatch.fnmatch(str(path), os.path.normpath(pattern)):
            names.append(path)
        order += sorted(names, key=str)
    if path not in order:
        return False
    last = len(order) - 1 - order[::-1].index(path)
    return all(last > len(order) - 1 - order[::-1].index(holder) for holder in holders if holder in order)


def _write_all(
    path: Path, text: str, override_path: Path, section: ProgramSection | None, state_dir: Path
) -> tuple[Path, ...]:
    """The files that were really written; all of them or none."""
    changed: list[Path] = []
    before = override.read_text(path)
    if text != before:
        override.write_file(path, text, like=section.file if section else None)
        changed.append(path)
    try:
        wanted = _override_text(section, state_dir) if section else None
        if wanted is not None and wanted != override.read_text(override_path):
            override.write_file(override_path, wanted, like=section.file if section else None)
            changed.append(override_path)
    except BaseException:
        if path in changed and before is None:
            override.remove_file(path)
        elif path in changed and before is not None:
            override.write_file(path, before)
        raise
    return tuple(changed)


def _override_text(section: ProgramSection, state_dir: Path) -> str:
    changes = tuple(row.change for row in open_journal(state_dir, read_only=True).learned(section.name))
    return override.render_override(section, override.still_valid(section.command, changes))


def _written(changed: tuple[Path, ...], path: Path, override_path: Path, *, shadow: bool) -> Iterator[Finding]:
    for file in (path,) if shadow else (path, override_path):
        yield Finding("ok", f"wrote {file}" if file in changed else f"{file} is as it should be: not touched")
    if shadow:
        yield Finding(
            "note", "mode=shadow: no override, restarts stay supervisord's; deaths are decided and recorded only"
        )


def _next_effect(section: ProgramSection, changed: tuple[Path, ...], *, shadow: bool) -> str:
    if not changed:
        return "nothing has changed since the last init: nothing happens"
    if shadow:
        return "starts the listener; running programs stay as they are"
    return f"starts the listener and restarts {section.name} once (its restarts become supervisor-vllm's)"


def _ctl(main_file: Path, *words: str) -> str:
    """The supervisorctl command; -c only where it wouldn't find the file by itself."""
    usual = main_file in (Path("/etc/supervisord.conf"), Path("/etc/supervisor/supervisord.conf"))
    return " ".join(["supervisorctl", *([] if usual else ["-c", str(main_file)]), *words])


# -- what is found -----------------------------------------------------------------------------------------------------


def _findings(conf: SupervisordConf, section: ProgramSection, state_dir: Path, *, shadow: bool) -> Iterator[Finding]:
    yield Finding("ok", f"[program:{section.name}] in {section.file}: {_short(section.command)}")
    if section.group_name != section.name:
        yield _group_finding(section)
    process = section.full_names[0].partition(":")[2]
    if process != section.name:
        yield Finding("ok", f"process_name: supervisord knows it as {section.full_names[0]}")
    yield from _http_findings(conf)
    yield from _log_findings(section, state_dir, shadow=shadow)
    if section.options.get("autorestart", "unexpected") != "false":
        yield Finding(
            "note", "autorestart: taken over by the override (supervisord would start the old arguments again)"
        )


def _group_finding(section: ProgramSection) -> Finding:
    if not section.neighbours:
        return Finding("ok", f"group {section.group_name}: {section.name} is alone in it")
    names = ", ".join(section.neighbours)
    return Finding(
        "warning",
        f"group {section.group_name}: changed arguments can only be applied while {names} do not run; "
        f"give {section.name} a group of its own, or expect HELD with that reason",
    )


def _http_findings(conf: SupervisordConf) -> Iterator[Finding]:
    access = http_server(conf)
    if access is None:
        yield Finding("error", f"{conf.main_file} has no http server: the listener can't control anything")
        return
    yield Finding("ok", f"supervisord listens on {access.url}")
    if access.password_is_hash:
        yield Finding(
            "error", "its password is a {SHA} hash: put username and password into [supervisorctl] of the main file"
        )
    elif access.password:
        yield Finding("ok", "it has a password: the listener reads it from supervisord's own configuration")


def _log_findings(section: ProgramSection, state_dir: Path, *, shadow: bool) -> Iterator[Finding]:
    options = section.options
    redirected = is_true(options.get("redirect_stderr", ""))
    captured = output.captured_channels(section, shadow=shadow)
    for channel in ("stdout",) if redirected else ("stdout", "stderr"):
        file = options.get(f"{channel}_logfile", "AUTO")
        if channel in captured:
            kept = output.output_path(state_dir, section.name, channel)
            yield Finding(
                "note",
                f"{channel}_logfile={file}: no log that can be read back; what {section.name} writes is also taken "
                f"from supervisord's events ({channel}_events_enabled), and kept in {kept}",
            )
        elif not output.is_log_file(file):
            yield Finding(
                "warning",
                f"{channel}_logfile={file}: there is no log that can be read back, so most deaths stay `unknown`; "
                f"set {channel}_logfile to a file, or {channel}_events_enabled=true",
            )
        elif file.upper() == "AUTO" and channel == "stdout":
            yield Finding(
                "note", "stdout_logfile=AUTO: supervisord deletes that log at its next start; a named file is better"
            )
    if not redirected:
        yield Finding(
            "note",
            "redirect_stderr is not set: tracebacks go to another file than vLLM's log; redirect_stderr=true is better",
        )


def _short(command: str) -> str:
    from .policy.launch_command import redact

    text = " ".join(redact(command).split())
    return text if len(text) <= 100 else text[:97] + "…"


# -- uninstall, undo and check -----------------------------------------------------------------------------------------


def uninstall(config: Config, name: str) -> Result:
    """Takes out what init added for this program, the whole file with the last one. The user's files stay."""
    item = config.program(name)
    findings = [Finding("ok", f"removed {item.override_path}")] if item.override_path.exists() else []
    override.remove_file(item.override_path)
    before = override.read_text(config.path)
    after = config_file.without_program(before, name) if before is not None else None
    if after is None:
        override.remove_file(config.path)
        findings.append(Finding("ok", f"removed {config.path}"))
    else:
        override.write_file(config.path, after, like=config.path)
        findings.append(Finding("ok", f"took [{config_file.PROGRAM_PREFIX}{name}] out of {config.path}"))
    findings.append(Finding("note", f"the history stays in {config.state_dir}"))
    effect = f"restarts {name} once as your own files have it" + ("" if after else ", and ends the listener")
    return Result(tuple(findings), _ctl(config.supervisord_conf, "update"), effect)


def undo(config: Config, name: str) -> Result:
    """Drops the learned changes: the override holds no command any more, the user's own counts again."""
    item = config.program(name)
    section = program(read_conf(config.supervisord_conf, skip=(item.override_path,)), name)
    journal = open_journal(config.state_dir)
    changes = tuple(row.change for row in journal.learned(name))
    if not changes and override.read_text(item.override_path) == override.render_override(section, ()):
        return Result((Finding("ok", "nothing was learned: nothing to undo"),), "", "")
    journal.replace_learned(name, (), incident_id=None)
    if override.read_text(item.override_path) is not None:
        override.write_file(item.override_path, override.render_override(section, ()), like=section.file)
    findings = tuple(Finding("ok", f"dropped {_change_words(change)}") for change in changes)
    return Result(
        findings,
        _ctl(config.supervisord_conf, "update", section.group_name),
        f"restarts {name} with your own arguments",
    )


def _change_words(change: Change) -> str:
    return f"{change.flag} {change.to or '(removed)'}: {change.from_ or 'its default'} again"


def check(config: Config, name: str | None) -> tuple[Finding, ...]:
    """The installation as it stands."""
    items = [config.program(name)] if name else list(config.programs)
    findings = [Finding("ok", f"settings: {config.path}")]
    findings += _state_findings(config)
    findings += [
        Finding("error", f"not used: {problem}") for problem in load_signatures(config.signatures_dir).problems
    ]
    for item in items:
        findings += _program_findings(config, item)
    return tuple(findings)


def _program_findings(config: Config, item: ProgramConfig) -> Iterator[Finding]:
    conf = read_conf(config.supervisord_conf, skip=(item.override_path,))
    try:
        section = program(conf, item.program)
    except UserError as why:
        if item.override_path.exists():
            yield Finding(
                "error",
                f"{why}, but {item.override_path} is still there: supervisord will not start; delete that file, or run "
                f"supervisor-vllm uninstall {item.program}",
            )
        else:
            yield Finding("error", str(why))
        return
    shadow = item.settings.mode == "shadow"
    yield from _findings(conf, section, config.state_dir, shadow=shadow)
    yield from _output_findings(config, section, shadow=shadow)
    if not item.override_path.exists():
        level = "ok" if shadow else "warning"
        yield Finding(level, f"{item.override_path} is not there: supervisord's own restarts are in force")
    elif not _wins(config.supervisord_conf, section, item.override_path):
        yield Finding(
            "error", f"{section.file} is read after {item.override_path}: the override has no effect; run init again"
        )
    else:
        yield Finding("ok", f"the override {item.override_path} is read last")


def _output_findings(config: Config, section: ProgramSection, *, shadow: bool) -> Iterator[Finding]:
    """Does what a program needs whose log is no file really stand in the configuration, and run?"""
    from .lock import is_running

    channels = output.captured_channels(section, shadow=shadow)
    if not channels:
        return
    if not config.has_output_listener:
        yield Finding(
            "warning",
            f"{config.path} has no section [{config_file.OUTPUT_LISTENER}]: what {section.name} writes is not kept, "
            "and most deaths stay `unknown`; run init again",
        )
        return
    in_force = program(read_conf(config.supervisord_conf), section.name).options
    for channel in channels:
        if not is_true(in_force.get(f"{channel}_events_enabled", "")):
            yield Finding("warning", f"{channel}_events_enabled is not set by the override; run init again")
    if is_running(output.output_directory(config.state_dir)):
        yield Finding("ok", "the output listener runs")
    else:
        yield Finding("error", f"the output listener does not run; try: {_ctl(config.supervisord_conf, 'status')}")


def _state_findings(config: Config) -> Iterator[Finding]:
    from .lock import is_running

    try:
        mode = config.state_dir.lstat().st_mode & 0o777
        level = "ok" if mode == 0o700 else "warning"
        yield Finding(level, f"state directory {config.state_dir} (mode {mode:04o})")
    except OSError as why:
        yield Finding("error", f"state directory {config.state_dir}: {why.strerror}")
    if is_running(config.state_dir):
        yield Finding("ok", "the listener runs")
    else:
        yield Finding("error", f"the listener does not run; try: {_ctl(config.supervisord_conf, 'status')}")
    done = subprocess.run([sys.executable, "-c", "import supervisor_vllm"], capture_output=True, check=False)
    if done.returncode:
        yield Finding("error", f"{sys.executable} can't import supervisor_vllm: install it there and run init again")
