"""The command line: one function a verb. Exit status: 0 done, 1 the answer is no, 2 wrong use (one line on stderr).

Imports stand inside the verbs: the listener is one of them, and stays small.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from . import __version__
from .errors import UserError


class _Parser(argparse.ArgumentParser):
    """Wrong use ends in one line, like every other mistake of a user."""

    def error(self, message: str) -> NoReturn:
        raise UserError(message, hint=f"see {self.prog} --help")


def main(argv: Sequence[str] | None = None) -> int:
    try:
        arguments = _parser().parse_args(argv)
        code: int = arguments.verb(arguments)
        sys.stdout.flush()
        return code
    except UserError as why:
        print(f"supervisor-vllm: {why}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader (head, less) has gone; the interpreter's own flush at exit must not complain again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="supervisor-vllm", description="Keeps vLLM alive under supervisord.")
    parser.add_argument("--version", action="version", version=f"supervisor-vllm {__version__}")
    verbs = parser.add_subparsers(metavar="VERB", required=True, parser_class=_Parser)

    init = verbs.add_parser("init", help="put the listener and the override into conf.d")
    init.set_defaults(verb=_init)
    init.add_argument("--program", required=True, help="the program's name in supervisord")
    init.add_argument("--conf-dir", required=True, type=Path, help="the directory that supervisord includes")
    init.add_argument("--supervisord-conf", type=Path, help="supervisord's main file (found by itself otherwise)")
    init.add_argument("--state-dir", type=Path, help="where the journal lives (default /var/lib/supervisor-vllm)")
    init.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting, see the README")

    listen = verbs.add_parser("listen", help="what supervisord runs: the event listener")
    listen.set_defaults(verb=_listen)
    listen.add_argument("--config", required=True, type=Path)

    explain = verbs.add_parser("explain", help="say what killed vLLM, from a log, and what would be changed")
    explain.set_defaults(verb=_explain)
    explain.add_argument("log", metavar="LOG", nargs="?", help="the log file (also .gz), or - for a pipe")
    explain.add_argument("--dir", metavar="DIR", help="every log in this folder, as a table")
    explain.add_argument("--life", type=int, metavar="N", help="of several lives in one file: 1 the first, -1 the last")
    explain.add_argument("--command", default="", help="the launch command, as it stands in the program section")
    end = explain.add_mutually_exclusive_group()
    end.add_argument("--exit-status", type=int)
    end.add_argument("--signal", type=_signal_name, help="the signal that ended it: SIGKILL, KILL or 9")
    explain.add_argument("--pid", type=int, action="append", default=[], help="a pid of the dead tree (repeatable)")
    explain.add_argument("--cgroup", help="its memory cgroup, as the kernel log names it")
    explain.add_argument("--kernel-log", metavar="FILE", help="the kernel's log (dmesg, journalctl -k, kern.log)")
    explain.add_argument("--gpu-total", type=int, metavar="BYTES")
    explain.add_argument("--gpu-free", type=int, metavar="BYTES")
    explain.add_argument("--vllm-version")
    explain.add_argument("--oom", action="store_true", help="ask whether memory ran out: exit status 1 if it didn't")
    explain.add_argument("--lang", choices=("en", "zh"), help="of the sentences (default: from LANG)")
    explain.add_argument("--signatures", metavar="DIR", help="signatures of your own (default: as the listener's)")
    explain.add_argument("--json", action="store_true")

    signatures = verbs.add_parser("signatures", help="list the wordings that decide, your own included")
    signatures.set_defaults(verb=_signatures)
    signatures.add_argument("--signatures", metavar="DIR", help="the folder of your own *.toml")
    signatures.add_argument("--markdown", action="store_true", help="as the table of the documentation")
    signatures.add_argument("--json", action="store_true")

    for name, verb, help_ in (
        ("status", _status, "state, last verdict, what was changed, launches left"),
        ("history", _history, "every incident with its plan and outcome"),
    ):
        shown = verbs.add_parser(name, help=help_)
        shown.set_defaults(verb=verb)
        shown.add_argument("program", nargs="?")
        shown.add_argument("--json", action="store_true")
        _add_config_options(shown)

    plan = verbs.add_parser("plan", help="before any death: does it fit, which memory goes where")
    plan.set_defaults(verb=_plan)
    plan.add_argument("--command", required=True, metavar="CMD", help="the launch command: vllm serve …")
    plan.add_argument("--gpu-total", type=int, metavar="BYTES", help="of one device (measured otherwise)")
    plan.add_argument("--gpu-free", type=int, metavar="BYTES", help="of one device before the start")
    plan.add_argument("--model-config", metavar="FILE", help="config.json, or a model's directory (found otherwise)")
    plan.add_argument("--vllm-version", metavar="V")
    plan.add_argument("--cpu-backend", action="store_true", help="vLLM's CPU build: the device is the memory node")
    plan.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting, see the README")
    plan.add_argument("--json", action="store_true")

    for name, verb, help_ in (
        ("undo", _undo, "drop the learned changes"),
        ("uninstall", _uninstall, "take out what init added"),
    ):
        changing = verbs.add_parser(name, help=help_)
        changing.set_defaults(verb=verb)
        changing.add_argument("program")
        _add_config_options(changing)

    export = verbs.add_parser("export", help="what was learned, as a file for other hosts")
    export.set_defaults(verb=_export)
    _add_config_options(export)
    import_ = verbs.add_parser("import", help="what another host learned, as a hint")
    import_.set_defaults(verb=_import)
    import_.add_argument("file", metavar="FILE", help="what export wrote; - for a pipe")
    _add_config_options(import_)

    check = verbs.add_parser("check", help="look over the installation")
    check.set_defaults(verb=_check)
    check.add_argument("program", nargs="?")
    check.add_argument("--json", action="store_true")
    _add_config_options(check)
    return parser


def _signal_name(text: str) -> str:
    name = text.upper() if text.upper().startswith("SIG") else f"SIG{text.upper()}"
    try:
        return signal.Signals(int(text)).name if text.isdigit() else signal.Signals[name].name
    except (KeyError, ValueError):
        raise argparse.ArgumentTypeError(f"there is no signal {text!r}") from None


def _add_config_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", metavar="FILE", help="the file that init wrote")
    parser.add_argument("--conf-dir", metavar="DIR", help="the directory that init wrote it to")


# -- the verbs ---------------------------------------------------------------------------------------------------------


def _init(arguments: argparse.Namespace) -> int:
    from . import installation

    result = installation.init(
        program=arguments.program,
        conf_dir=arguments.conf_dir,
        supervisord_conf=arguments.supervisord_conf,
        state_dir=arguments.state_dir,
        settings=_set_options(arguments.set),
    )
    return _print_result(result)


def _print_result(result: Any) -> int:
    """An installation.Result: what was found and done, and the exact next command."""
    from .report import print_findings

    print_findings([(finding.level, finding.text) for finding in result.findings])
    if result.next_command:
        print(f"next: {result.next_command}\n      ({result.next_effect})")
    return 0


def _set_options(options: list[str]) -> dict[str, str]:
    settings = {}
    for option in options:
        name, equals, value = option.partition("=")
        if not equals:
            raise UserError(f"--set {option}: there is no '='", hint="write --set NAME=VALUE")
        settings[name.strip()] = value.strip()
    return settings


def _listen(arguments: argparse.Namespace) -> int:
    from .listener import listen

    listen(arguments.config)
    return 0


def _explain(arguments: argparse.Namespace) -> int:
    if bool(arguments.log) == bool(arguments.dir):
        raise UserError("explain needs one LOG, or --dir DIR", hint="write - for a pipe")
    language = arguments.lang or _language()
    if arguments.dir:
        return _explain_folder(arguments, language)
    explanation = _explanation(arguments, arguments.log, language if arguments.lang or not arguments.json else "en")
    if arguments.json:
        _print_json(explanation)
    else:
        from .report import print_explanation

        print_explanation(explanation, language)
    return 1 if arguments.oom and not explanation["oom"] else 0


def _explanation(arguments: argparse.Namespace, log: str, language: str) -> dict[str, Any]:
    from .classify import classify
    from .classify.numbers import with_device_numbers
    from .evidence.device import on_cpu_backend
    from .evidence.model_config import launched_shape
    from .explain import incident_from_log
    from .explanation import explain_json
    from .policy.launch_command import parse_launch
    from .policy.plan import plan_next
    from .settings import Settings

    incident = incident_from_log(
        log,
        command=arguments.command,
        exit_status=arguments.exit_status,
        signal=arguments.signal,
        pids=tuple(arguments.pid),
        cgroup=arguments.cgroup,
        kernel_log=arguments.kernel_log,
        gpu_total=arguments.gpu_total,
        gpu_free=arguments.gpu_free,
        vllm_version=arguments.vllm_version,
        life=arguments.life,
    )
    verdict = with_device_numbers(classify(incident, _own_signatures(arguments.signatures)), incident)
    plan = plan_next(
        verdict,
        arguments.command,
        Settings(),
        vllm_version=incident.vllm_version,
        shape=launched_shape(parse_launch(arguments.command), os.environ, os.getcwd()),
        cpu_backend=on_cpu_backend(incident.log),
    )
    return explain_json(verdict, plan, incident, language)


def _plan(arguments: argparse.Namespace) -> int:
    from .forecast import forecast, forecast_json
    from .settings import parse_settings

    if arguments.gpu_free is not None and arguments.gpu_total is None:
        raise UserError("--gpu-free without --gpu-total", hint="say what the device has in all, too")
    if arguments.gpu_total is not None and not 0 < (arguments.gpu_free or 1) <= arguments.gpu_total:
        raise UserError("--gpu-total and --gpu-free don't go together", hint="give bytes: 0 < free <= total")
    found = forecast(
        arguments.command,
        parse_settings(_set_options(arguments.set)),
        gpu_total=arguments.gpu_total,
        gpu_free=arguments.gpu_free,
        model_config=arguments.model_config,
        vllm_version=arguments.vllm_version,
        cpu_backend=arguments.cpu_backend,
    )
    data = forecast_json(found)
    if arguments.json:
        _print_json(data)
    else:
        from .report import print_forecast

        print_forecast(data)
    return 0 if found.fits else 1


def _explain_folder(arguments: argparse.Namespace, language: str) -> int:
    from .explain import logs_in

    rows: list[dict[str, Any]] = []
    for log in logs_in(arguments.dir):
        shown = os.path.relpath(log, arguments.dir)
        try:
            rows.append({"file": shown, **_explanation(arguments, log, language)})
        except UserError as why:  # one that can't be read keeps nobody from the others
            print(f"supervisor-vllm: {why}", file=sys.stderr)
    if arguments.json:
        _print_json({"explanations": rows})
    else:
        from .report import print_explanations

        print_explanations(rows)
    return 1 if arguments.oom and not any(row["oom"] for row in rows) else 0


def _language() -> str:
    """As gettext decides it; C and POSIX are English."""
    names = (os.environ.get(name) for name in ("LC_ALL", "LC_MESSAGES", "LANG"))
    return "zh" if next((name for name in names if name), "").startswith("zh") else "en"


def _own_signatures(folder: str | None) -> tuple[Any, ...]:
    """The built-in ones without a folder. A mistake in the folder is the user's: here it ends the run."""
    from .classify.signatures import SIGNATURES
    from .settings import DEFAULT_CONF_DIR, SIGNATURES_DIR

    path = Path(folder) if folder else DEFAULT_CONF_DIR / SIGNATURES_DIR
    if not path.is_dir():
        if folder:
            raise UserError(f"{folder} is no directory", hint="give --signatures the folder that holds your *.toml")
        return SIGNATURES
    from .classify.user_signatures import load_signatures

    loaded = load_signatures(path)
    if loaded.problems:
        raise loaded.problems[0]
    return loaded.signatures


def _signatures(arguments: argparse.Namespace) -> int:
    signatures = _own_signatures(arguments.signatures)
    if arguments.json:
        _print_json({"signatures": [_signature_json(signature) for signature in signatures]})
        return 0
    from . import report

    if arguments.markdown:
        print(report.signatures_markdown(signatures))
    else:
        report.print_signatures(signatures)
    return 0


def _signature_json(signature: Any) -> dict[str, Any]:
    from .incident import to_json

    return {**to_json(signature), "numbers": list(signature.numbers)}


def _status(arguments: argparse.Namespace) -> int:
    from .lock import is_running
    from .status import status_json

    config, journal = _open(arguments)
    shown = status_json(journal, config, (arguments.program,) if arguments.program else ())
    if arguments.json:
        _print_json(shown)
    else:
        from .report import print_status

        print_status(shown)
    if not is_running(config.state_dir):
        print("supervisor-vllm: the listener is not running; this is what it knew last", file=sys.stderr)
    return 0 if all(program["state"] == "HEALTHY" for program in shown["programs"]) else 1


def _history(arguments: argparse.Namespace) -> int:
    from .status import history_json

    config, journal = _open(arguments)
    if arguments.program:
        config.program(arguments.program)
    shown = history_json(journal, arguments.program)
    if arguments.json:
        _print_json(shown)
    else:
        from .report import print_history

        print_history(shown)
    return 0


def _undo(arguments: argparse.Namespace) -> int:
    from . import installation
    from .config_file import find_config, load_config

    config = load_config(find_config(arguments.config, arguments.conf_dir))
    return _print_result(installation.undo(config, arguments.program))


def _uninstall(arguments: argparse.Namespace) -> int:
    from . import installation
    from .config_file import find_config, load_config

    config = load_config(find_config(arguments.config, arguments.conf_dir))
    return _print_result(installation.uninstall(config, arguments.program))


def _export(arguments: argparse.Namespace) -> int:
    from .config_file import find_config, load_config
    from .fleet import exported
    from .journal import open_journal

    config = load_config(find_config(arguments.config, arguments.conf_dir))
    _print_json(exported(open_journal(config.state_dir, read_only=True)))
    return 0


def _import(arguments: argparse.Namespace) -> int:
    from .config_file import find_config, load_config
    from .fleet import import_text
    from .journal import open_journal

    config = load_config(find_config(arguments.config, arguments.conf_dir))
    try:
        text = sys.stdin.read() if arguments.file == "-" else Path(arguments.file).read_text(encoding="utf-8")
    except (OSError, UnicodeError) as why:
        raise UserError(f"{arguments.file} can't be read ({why})", hint="give the file that export wrote") from None
    count = import_text(open_journal(config.state_dir), text, arguments.file)
    print(f"{count} imported; each counts when the same model is first launched here on the same vLLM")
    return 0


def _check(arguments: argparse.Namespace) -> int:
    from . import installation, report
    from .config_file import find_config, load_config

    config = load_config(find_config(arguments.config, arguments.conf_dir))
    findings = installation.check(config, arguments.program)
    if arguments.json:
        _print_json({"findings": [{"level": finding.level, "text": finding.text} for finding in findings]})
    else:
        report.print_findings([(finding.level, finding.text) for finding in findings])
    return 1 if any(finding.level == "error" for finding in findings) else 0


def _open(arguments: argparse.Namespace) -> tuple[Any, Any]:
    from .config_file import find_config, load_config
    from .journal import open_journal

    config = load_config(find_config(arguments.config, arguments.conf_dir))
    return config, open_journal(config.state_dir, read_only=True)


def _print_json(value: Any) -> None:
    print(json.dumps(value, ensure_ascii=False, indent=2))
