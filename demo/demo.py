"""The scenes of `make demo`: real vLLM (its CPU build), a real supervisord, supervisor-vllm as a user installs it.

    (a) vLLM's default --gpu-memory-utilization fails its own memory check → lowered to what fits, healthy
    (b) the kernel's OOM killer ends the worker while it serves, the server exits 0 → seen, proven, restarted, healthy
    (c) SIGKILL of the API server: its orphans hold the memory → ended, restarted, healthy

Everything is started below one supervisord in a directory of its own, and is gone at the end, whatever happens.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

REPOSITORY = Path(__file__).resolve().parent.parent
#: One load of vLLM's CPU build takes about 40 s on 2 cores; a machine under load may need much more.
LOAD_LIMIT_SEC = 420.0
CONSOLE = Console(highlight=False, soft_wrap=True)


class SceneError(Exception):
    """A scene did not end as promised."""


@dataclass
class Stage:
    """Where it all runs. `pids`: everything that was seen below our supervisord, to be ended at the end."""

    directory: Path
    model: Path
    vllm_python: Path
    port: int
    supervisord: subprocess.Popen[bytes] | None = None
    seen: dict[int, float] = field(default_factory=dict)

    @property
    def conf_dir(self) -> Path:
        return self.directory / "conf.d"

    @property
    def main_file(self) -> Path:
        return self.directory / "supervisord.conf"


# -- setting the stage -------------------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def write_host(stage: Stage) -> None:
    """A host as a user has it: supervisord's main file and one program in conf.d."""
    stage.conf_dir.mkdir(parents=True)
    stage.main_file.write_text(
        f"""\
[supervisord]
nodaemon=true
logfile={stage.directory}/supervisord.log
pidfile={stage.directory}/supervisord.pid
childlogdir={stage.directory}

[unix_http_server]
file={stage.directory}/supervisor.sock

[rpcinterface:supervisor]
supervisor.rpcinterface_factory=supervisor.rpcinterface:make_main_rpcinterface

[supervisorctl]
serverurl=unix://{stage.directory}/supervisor.sock

[include]
files=conf.d/*.conf
"""
    )
    (stage.conf_dir / "vllm.conf").write_text(
        f"""\
[program:vllm]
command={stage.vllm_python} -m vllm.entrypoints.openai.api_server --model {stage.model}
    --host 127.0.0.1 --port {stage.port} --max-model-len 2048 --max-num-seqs 16 --enforce-eager
environment=HF_HUB_OFFLINE="1",VLLM_NO_USAGE_STATS="1"
redirect_stderr=true
stdout_logfile={stage.directory}/vllm.log
stopwaitsecs=20
"""
    )


def make_model(vllm_python: Path, directory: Path) -> None:
    maker = REPOSITORY / "tests" / "real_vllm.py"
    run([str(vllm_python), str(maker), str(directory)], limit_sec=300)


def run(command: list[str], *, limit_sec: float = 60.0, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit_sec, cwd=REPOSITORY, check=False)
    if check and done.returncode:
        raise SceneError(
            f"{' '.join(command)} ended with {done.returncode}: {done.stderr.strip() or done.stdout.strip()}"
        )
    return done


def supervisor_vllm(stage: Stage, verb: str, *arguments: str, check: bool = True) -> str:
    command = [sys.executable, "-m", "supervisor_vllm", verb, *arguments, "--conf-dir", str(stage.conf_dir)]
    return run(command, check=check).stdout


def supervisorctl(stage: Stage, *arguments: str) -> str:
    return run(
        [sys.executable, "-m", "supervisor.supervisorctl", "-c", str(stage.main_file), *arguments], check=False
    ).stdout


def start_supervisord(stage: Stage) -> None:
    with (stage.directory / "supervisord.out").open("wb") as output:
        stage.supervisord = subprocess.Popen(
            [sys.executable, "-m", "supervisor.supervisord", "-c", str(stage.main_file)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def take_down(stage: Stage) -> None:
    """Ends what was started below our supervisord: by pid and start time, whatever state it is in."""
    remember(stage)
    if stage.supervisord and stage.supervisord.poll() is None:
        stage.supervisord.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            stage.supervisord.wait(30)
        if stage.supervisord.poll() is None:
            stage.supervisord.kill()
            stage.supervisord.wait(10)
    left = [process for pid in stage.seen if (process := same_process(pid, stage.seen[pid]))]
    for process in left:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(left, timeout=15)


def same_process(pid: int, create_time: float) -> psutil.Process | None:
    try:
        process = psutil.Process(pid)
        return process if abs(process.create_time() - create_time) < 0.05 else None
    except psutil.Error:
        return None


def remember(stage: Stage) -> None:
    if stage.supervisord is None or stage.supervisord.poll() is not None:
        return
    with contextlib.suppress(psutil.Error):
        for process in psutil.Process(stage.supervisord.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                stage.seen[process.pid] = process.create_time()


# -- looking on --------------------------------------------------------------------------------------------------------


def status(stage: Stage) -> dict[str, Any]:
    remember(stage)
    text = supervisor_vllm(stage, "status", "vllm", "--json", check=False)
    return dict(json.loads(text)["programs"][0]) if text else {"state": "", "reason": "", "since": ""}


def history(stage: Stage) -> list[dict[str, Any]]:
    return list(json.loads(supervisor_vllm(stage, "history", "--json"))["incidents"])


def wait_for(stage: Stage, reached: Callable[[dict[str, Any]], bool], what: str, limit_sec: float) -> dict[str, Any]:
    """Shows each new state until `reached`; raises SceneError over the limit or when it is held."""
    deadline = time.monotonic() + limit_sec
    shown = ""
    with progress(what) as update:
        while time.monotonic() < deadline:
            now = status(stage)
            text = f"{now['state']}: {now['reason']}"
            if text != shown and now["state"]:
                CONSOLE.print(f"    {now['state']:<10} {now['reason']}", markup=False)
                shown = text
            if reached(now):
                return now
            if now["state"] == "HELD":
                raise SceneError(f"held: {now['reason']}")
            update(f"{what} ({deadline - time.monotonic():.0f} s left)")
            time.sleep(1.0)
    raise SceneError(f"{what}: not within {limit_sec:g} s; last: {shown}")


@contextlib.contextmanager
def progress(what: str) -> Iterator[Callable[[str], None]]:
    """A spinner on a terminal, a plain line elsewhere."""
    if not CONSOLE.is_terminal:
        CONSOLE.print(f"    … {what}", markup=False)
        yield lambda text: None
        return
    with CONSOLE.status(what) as spinner:
        yield lambda text: spinner.update(text)


def healthy_after(stage: Stage, incidents: int, what: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """(status, the last incident) once so many deaths are behind it and it answers."""

    def reached(now: dict[str, Any]) -> bool:
        # the state may have been read before the death was: the incident's own outcome is what counts
        deaths = history(stage)
        return now["state"] == "HEALTHY" and len(deaths) >= incidents and deaths[-1]["outcome"] == "healthy"

    now = wait_for(stage, reached, what, LOAD_LIMIT_SEC)
    return now, history(stage)[-1]


def expect(true: bool, otherwise: str) -> None:
    if not true:
        raise SceneError(otherwise)


def tree(stage: Stage) -> dict[str, psutil.Process]:
    """vLLM's processes by what they are: server, EngineCore, Worker."""
    server = psutil.Process(int(status(stage)["pid"]))
    found = {"server": server}
    for process in server.children(recursive=True):
        name = process.name()
        if name.startswith("VLLM::"):
            found["Worker" if "Worker" in name else "EngineCore"] = process
    expect({"Worker", "EngineCore"} <= set(found), f"vLLM's processes were not found, only {', '.join(found)}")
    return found


def complete(stage: Stage, prompt_tokens: int) -> None:
    """One request, answered or not."""
    body = {"prompt": [100] * prompt_tokens, "max_tokens": 8, "model": str(stage.model)}
    request = urllib.request.Request(
        f"http://127.0.0.1:{stage.port}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with contextlib.suppress(OSError):
        urllib.request.urlopen(request, timeout=30).read()


# -- the scenes --------------------------------------------------------------------------------------------------------


def scene_default_utilization(stage: Stage) -> str:
    title("(a) the default --gpu-memory-utilization on an ordinary machine")
    with ballast(stage):
        start_supervisord(stage)
        now, last = healthy_after(stage, 1, "vLLM starts, fails its memory check, and is started again")
    expect(last["verdict"]["kind"] == "gpu_neighbour", f"found {last['verdict']['kind']}")
    change = now["changes"][0]
    expect(change["flag"] == "--gpu-memory-utilization", f"changed {change['flag']}")
    expect(last["launches"] == 1, f"{last['launches']} launches")
    return f"{change['flag']} default → {change['to']}, healthy on the next launch"


@contextlib.contextmanager
def ballast(stage: Stage) -> Iterator[None]:
    """On a machine so empty that the default would fit, a process holds memory of the node, as a neighbour does."""
    meminfo = Path("/sys/devices/system/node/node0/meminfo")
    total_bytes, free_bytes = psutil.virtual_memory().total, psutil.virtual_memory().available
    if meminfo.exists():
        values = {line.split()[2].rstrip(":"): int(line.split()[3]) * 1024 for line in meminfo.read_text().splitlines()}
        total_bytes = values["MemTotal"]
        free_bytes = sum(values.get(key, 0) for key in ("MemFree", "Active(file)", "Inactive(file)", "SReclaimable"))
    held_bytes = free_bytes - int(total_bytes * 0.9)
    if held_bytes <= 0:
        yield
        return
    CONSOLE.print(f"    this machine is nearly empty: a neighbour holds {held_bytes / 2**30:.1f} GiB of it meanwhile")
    code = f"import time; block = bytearray({held_bytes}); print('held', flush=True); time.sleep(3600)"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        yield
    finally:
        process.kill()
        process.wait()


def scene_kernel_kill(stage: Stage) -> str:
    title("(b) the kernel's OOM killer ends the worker while it serves")
    before = len(history(stage))
    processes = tree(stage)
    with memory_cgroup() as group:
        if group is None or not put_into(group, processes["Worker"].pid):
            group = None
            CONSOLE.print("    no root or no memory cgroup here: played with SIGKILL of the worker instead")
            processes["Worker"].kill()
        else:
            CONSOLE.print("    the worker is in a memory cgroup without room; now a completion that needs some")
            deadline = time.monotonic() + 60
            while processes["Worker"].is_running() and time.monotonic() < deadline:
                if processes["Worker"].status() == psutil.STATUS_ZOMBIE:
                    break
                complete(stage, 1500)
            expect(time.monotonic() < deadline, "the kernel did not kill the worker")
        _, last = healthy_after(stage, before + 1, "the death is seen, explained, and vLLM is started again")
    log = (stage.directory / "supervisord.log").read_text()
    expect("exited: vllm (exit status 0" in log, "the server did not exit 0")
    wanted = "host_oom_kill" if group else "killed"
    expect(last["verdict"]["kind"] == wanted, f"found {last['verdict']['kind']}")
    return f"exit status 0, found {last['verdict']['kind']} ({last['verdict']['confidence']}), healthy again"


@contextlib.contextmanager
def memory_cgroup() -> Iterator[Path | None]:
    """A memory cgroup (version 1 or 2) with room for nothing; None where there can't be one."""
    name = f"supervisor-vllm-demo-{os.getpid()}"
    for base, limits in (
        ("/sys/fs/cgroup/memory", {"memory.limit_in_bytes": "1048576", "memory.swappiness": "0"}),
        ("/sys/fs/cgroup", {"memory.max": "1048576", "memory.swap.max": "0"}),
    ):
        group = Path(base) / name
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            if limit_memory(group, limits):
                yield group
                return
        finally:
            remove_cgroup(group)
    yield None


def limit_memory(group: Path, limits: dict[str, str]) -> bool:
    """False: no memory controller here (on version 2 the parent must have handed it down). Without swap the kernel can
    only kill; a host without swap has no such file."""
    first, second = limits
    try:
        (group / first).write_text(limits[first])
    except OSError:
        return False
    with contextlib.suppress(OSError):
        (group / second).write_text(limits[second])
    return True


def put_into(group: Path, pid: int) -> bool:
    try:
        (group / "cgroup.procs").write_text(str(pid))
    except OSError:
        return False
    return True


def remove_cgroup(group: Path) -> None:
    """Who still lives in it goes back to the parent; the kernel lets it go only once its last process is really out."""
    for _ in range(100):
        with contextlib.suppress(OSError):
            for pid in (group / "cgroup.procs").read_text().split():
                (group.parent / "cgroup.procs").write_text(pid)
        try:
            group.rmdir()
            return
        except OSError:
            time.sleep(0.1)


def scene_orphans(stage: Stage) -> str:
    title("(c) SIGKILL of the API server: its orphans hold the memory")
    before = len(history(stage))
    processes = tree(stage)
    orphans = [processes["EngineCore"], processes["Worker"]]
    held = sum(process.memory_info().rss for process in orphans)
    os.kill(processes["server"].pid, signal.SIGKILL)
    CONSOLE.print(f"    EngineCore and Worker live on and hold {held / 2**30:.1f} GiB")
    _, last = healthy_after(stage, before + 1, "the orphans are ended, and vLLM is started again")
    expect(not any(process.is_running() for process in orphans), "an orphan is still there")
    expect(last["verdict"]["kind"] == "killed", f"found {last['verdict']['kind']}")
    return "both orphans ended, healthy again"


def title(text: str) -> None:
    CONSOLE.print(f"\n[bold]{text}[/bold]")


def play(stage: Stage) -> list[dict[str, str]]:
    CONSOLE.print(f"A tiny Qwen2 model and a host of its own in {stage.directory}")
    make_model(stage.vllm_python, stage.model)
    write_host(stage)
    CONSOLE.print("supervisor-vllm init --program vllm …")
    CONSOLE.print(
        supervisor_vllm(
            stage, "init", "--program", "vllm", "--supervisord-conf", str(stage.main_file),
            "--state-dir", str(stage.directory / "state"), "--set", "restart_sec=1",
            "--set", "memory_release_timeout_sec=5", "--set", "start_limit_burst=5",
        ),
        markup=False,
    )  # fmt: skip
    results = []
    for scene in (scene_default_utilization, scene_kernel_kill, scene_orphans):
        outcome = scene(stage)
        CONSOLE.print(f"    [green]✓[/green] {outcome}")
        results.append({"scene": scene.__name__.removeprefix("scene_"), "outcome": outcome})
    title("supervisor-vllm history")
    CONSOLE.print(supervisor_vllm(stage, "history"), markup=False)
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description="Three deaths of a real vLLM, and its three recoveries.")
    parser.add_argument("--vllm-python", type=Path, required=True, help="an interpreter with vLLM's CPU build")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the outcome of each scene there")
    arguments = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda signum, _: sys.exit(128 + signum))  # so that the end below comes then, too
    directory = Path(tempfile.mkdtemp(prefix="sv-demo-"))  # short: a unix socket's path has 107 bytes at most
    stage = Stage(directory, directory / "model", arguments.vllm_python, free_port())
    try:
        results = play(stage)
        if arguments.json:
            arguments.json.write_text(json.dumps({"scenes": results, "incidents": history(stage)}, ensure_ascii=False))
        return 0
    except (SceneError, subprocess.TimeoutExpired) as why:
        CONSOLE.print(f"[red]✗[/red] {why}")
        tail(stage)
        return 1
    except KeyboardInterrupt:
        return 130
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # a second Ctrl-C doesn't interrupt the cleaning up
        take_down(stage)
        shutil.rmtree(directory, ignore_errors=True)
        CONSOLE.print("nothing is left running")


def tail(stage: Stage) -> None:
    """What a person needs to find out why."""
    for name in ("state/listener.log", "vllm.log"):
        file = stage.directory / name
        if file.exists():
            CONSOLE.print(f"--- the end of {name}")
            CONSOLE.print("\n".join(file.read_text(errors="replace").splitlines()[-30:]), markup=False)


if __name__ == "__main__":
    sys.exit(main())
