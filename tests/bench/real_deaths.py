"""Real vLLM 0.32 (CPU build), broken on purpose: whole logs with a truth known from what was done.

    python tests/bench/real_deaths.py [--vllm-python PYTHON] [--only NAME]... [--jobs 2]

Writes tests/corpus/deaths/: NAME.log (stdout and stderr in one, as with supervisord's redirect_stderr), NAME.kernel
where the kernel killed, and an entry in cases.json. Needs root (memory cgroups of version 1, mount namespaces).
About 25 s a way on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from deaths_run import MEMORY, PIDS, KernelLog, Run, end, make_cgroup, prepare, start, wait
from deaths_ways import WAYS, Way

HERE = Path(__file__).resolve().parent
OUT = HERE.parent / "corpus" / "deaths"
#: Of a log; the middle of longer ones (the same lines over and over) is left out.
LOG_MAX_BYTES = 150_000
VERSION = "0.32.0 (CPU build)"
_WRITING = threading.Lock()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", type=Path, default=HERE.parent.parent / ".venv-vllm" / "bin" / "python")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", choices=[way.name for way in WAYS])
    parser.add_argument("--jobs", type=int, default=1, help="how many at a time (default 1)")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/vllm-deaths"), help="where it runs")
    options = parser.parse_args()
    python = options.vllm_python.absolute()
    os.environ["VLLM_PYTHON"] = str(python)
    OUT.mkdir(parents=True, exist_ok=True)
    tiny = options.folder / "tiny"
    if not tiny.exists():
        subprocess.run([python, HERE.parent / "real_vllm.py", tiny], check=True)
    ways = [way for way in WAYS if not options.only or way.name in options.only]
    with ThreadPoolExecutor(options.jobs) as pool:
        done = list(pool.map(lambda way: attempt(way, python, tiny, options.folder), ways))
    return 0 if all(done) else 1


def attempt(way: Way, python: Path, tiny: Path, base: Path) -> bool:
    try:
        case = break_it(way, python, tiny, base)
    except (RuntimeError, TimeoutError, OSError) as why:
        print(f"{way.name}: {why}", file=sys.stderr, flush=True)
        return False
    keep(case)
    print(f"{way.name}: {case.get('signal') or case['exit_status']}", flush=True)
    return True


def break_it(way: Way, python: Path, tiny: Path, base: Path) -> dict[str, object]:
    run = prepare(way.name, tiny, base)
    kernel = KernelLog()
    command = command_of(way, run, python)
    try:
        if way.spoil:
            way.spoil(run)
        start(run, command, dict(way.environment), way.shell, limits(way, run))
        if way.strike:
            way.strike(run)
        status = wait(run)
    finally:
        end(run)
    write_log(way, run, python)
    killed = write_kernel(way, run, kernel.lines())
    case = case_of(way, run, show(run, python, " ".join(command)), status)
    if killed and run.cgroup:
        case["cgroup"] = "/" + str(run.cgroup.relative_to(MEMORY))
    shutil.rmtree(run.folder)
    return case


def limits(way: Way, run: Run) -> list[Path]:
    groups = []
    if way.memory_bytes:
        run.cgroup = make_cgroup(run, MEMORY, "memory.limit_in_bytes", way.memory_bytes)
        groups.append(run.cgroup)
    if way.tasks:
        groups.append(make_cgroup(run, PIDS, "pids.max", way.tasks))
    return groups


def command_of(way: Way, run: Run, python: Path) -> list[str]:
    """The usual arguments, each unless the way has its own."""
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", way.model or str(run.model)]
    usual = {
        "--host": ["127.0.0.1"],
        "--port": [str(run.port)],
        "--max-model-len": ["2048"],
        "--gpu-memory-utilization": [way.utilization],
        "--enforce-eager": [],
    }
    for flag, value in usual.items():
        if flag not in way.arguments and f"--no-{flag[2:]}" not in way.arguments:
            command += [flag, *value]
    return [*command, *way.arguments]


def case_of(way: Way, run: Run, command: str, status: int) -> dict[str, object]:
    case: dict[str, object] = {"name": way.name, "how": way.how, "command": command}
    if status < 0:
        case["signal"] = signal.Signals(-status).name
    else:
        case["exit_status"] = status
    case |= {"pids": sorted(run.seen), "kind": list(way.kind), "oom": way.oom}
    if way.phase:
        case["phase"] = way.phase
    if way.untold:
        case["untold"] = list(way.untold)
    return {**case, "vllm": VERSION}


def show(run: Run, python: Path, text: str) -> str:
    """The paths of a host as people have it, instead of this one's."""
    base = subprocess.run(
        [python, "-c", "import sys; print(sys.base_prefix)"], capture_output=True, text=True, check=True
    )
    for own, shown in (
        (str(run.model), "/srv/models/tiny"),
        (str(run.folder), "/srv/site"),
        (str(run.folder.parent), "/srv"),
        (str(python.parent.parent), "/opt/vllm"),
        (base.stdout.strip(), "/opt/python"),
    ):
        text = text.replace(own, shown)
    return text


def write_log(way: Way, run: Run, python: Path) -> None:
    text = show(run, python, run.text())
    if len(text) > LOG_MAX_BYTES:
        half = LOG_MAX_BYTES // 2
        text = text[:half].rpartition("\n")[0] + "\n" + text[-half:].partition("\n")[2]
    (OUT / f"{way.name}.log").write_text(text)


def write_kernel(way: Way, run: Run, lines: list[str]) -> bool:
    """Only this run's kills, each with all that the kernel said of it: others die on the same host."""
    path = OUT / f"{way.name}.kernel"
    path.unlink(missing_ok=True)
    kills: list[list[str]] = [[]]
    for line in lines:
        if "invoked oom-killer" in line:
            kills.append([])
        kills[-1].append(line)
    ours = [kill for kill in kills if f"/vllm-deaths-{way.name}-" in "".join(kill)]
    if ours:
        path.write_text("".join(f"{line}\n" for kill in ours for line in kill))
    return bool(ours)


def keep(case: dict[str, object]) -> None:
    path = OUT / "cases.json"
    with _WRITING:
        cases = json.loads(path.read_text()) if path.exists() else []
        order = [way.name for way in WAYS]
        cases = [known for known in cases if known["name"] in order and known["name"] != case["name"]] + [case]
        cases.sort(key=lambda known: order.index(known["name"]))
        path.write_text(json.dumps(cases, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    sys.exit(main())
