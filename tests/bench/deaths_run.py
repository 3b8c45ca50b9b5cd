"""One start of real vLLM that is to die: starting, watching, striking, ending. Used by real_deaths.py."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

MEMORY = Path("/sys/fs/cgroup/memory")
PIDS = Path("/sys/fs/cgroup/pids")
MIB = 2**20
LIMIT_SEC = 240.0
LOOK_SEC = 0.1

# Lines of vLLM 0.32's log that say how far it is.
ARGUMENTS = "non-default args: "
LOADING = "Starting to load model"
UP = "Application startup complete"

# Runs inside vLLM's processes: from the nth call of one method on, an action comes before each call. The module is
# patched as soon as it has been imported, so no call is missed.
_SITE = """
import importlib.util, json, os, sys

class Breaker:
    def __init__(self, module, owner, method, nth, action):
        self.module, self.owner, self.method, self.nth, self.action = module, owner, method, nth, action

    def find_spec(self, name, path=None, target=None):
        if name != self.module:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module
        def exec_module(module):
            execute(module)
            self.patch(getattr(module, self.owner))
        spec.loader.exec_module = exec_module
        return spec

    def patch(self, owner):
        original, calls = getattr(owner, self.method), [0]
        def broken(*arguments, **named):
            calls[0] += 1
            if calls[0] >= self.nth:
                exec(self.action, {"self": arguments[0]})
            return original(*arguments, **named)
        setattr(owner, self.method, broken)

if "BREAK" in os.environ:
    sys.meta_path.insert(0, Breaker(**json.loads(os.environ["BREAK"])))
"""


def breaking(place: str, action: str, nth: int = 1) -> tuple[tuple[str, str], ...]:
    """The environment in which `action` runs before the nth and each later call of module:Class.method."""
    module, _, name = place.partition(":")
    owner, method = name.split(".")
    spec = {"module": module, "owner": owner, "method": method, "nth": nth, "action": action}
    return (("BREAK", json.dumps(spec)),)


@dataclass
class Run:
    """`folder` is this run's own; `model` is a copy that it may spoil. `seen`: pid → start time in clock ticks."""

    folder: Path
    model: Path
    port: int
    log: Path
    cgroup: Path | None = None
    process: subprocess.Popen[bytes] | None = None
    seen: dict[int, int] = field(default_factory=dict)
    ends: list[Callable[[], object]] = field(default_factory=list)

    @property
    def leader(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def dead(self) -> bool:
        return self.process is None or self.process.poll() is not None

    def text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def look(self) -> None:
        """Remembers the processes of the group. After a SIGKILL of the leader the others live on in it."""
        for entry in os.listdir("/proc"):
            if entry.isdigit() and int(entry) not in self.seen:
                with contextlib.suppress(OSError):
                    if os.getpgid(int(entry)) == self.leader:
                        self.seen[int(entry)] = start_ticks(int(entry))

    def wait_for(self, words: str, limit_sec: float = LIMIT_SEC) -> None:
        self.wait_until(lambda: re.search(words, self.text()) is not None, words, limit_sec)

    def wait_until(self, reached: Callable[[], bool], what: str, limit_sec: float = LIMIT_SEC) -> None:
        deadline = time.monotonic() + limit_sec
        while time.monotonic() < deadline:
            self.look()
            if reached():
                return
            if self.dead:
                raise RuntimeError(f"it died before {what!r}")
            time.sleep(LOOK_SEC)
        raise TimeoutError(what)

    def named(self, comm: str) -> int:
        """The process of that name; "leader" is the API server."""
        if comm == "leader":
            return self.leader
        self.look()
        for pid in self.seen:
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/comm").read_text().startswith(comm):
                    return pid
        raise RuntimeError(f"no {comm} among {sorted(self.seen)}")

    def ask(self, prompt: str = "hello", max_tokens: int = 8) -> None:
        """One completion, answered or not."""
        body = {"model": str(self.model), "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with contextlib.suppress(OSError):
            urllib.request.urlopen(request, timeout=60).read()


def start_ticks(pid: int) -> int:
    """Field 22 of /proc/PID/stat; the command's name before it may hold anything."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def prepare(name: str, tiny: Path, base: Path) -> Run:
    folder = base / name
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(tiny, folder / "model")
    (folder / "sitecustomize.py").write_text(_SITE)
    return Run(folder, folder / "model", free_port(), folder / "vllm.log")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def make_cgroup(run: Run, controller: Path, limit_file: str, limit: int) -> Path:
    group = controller / f"vllm-deaths-{run.folder.name}-{os.getpid()}"
    group.mkdir()
    run.ends.append(lambda: remove_cgroup(group))
    (group / limit_file).write_text(str(limit))
    return group


def remove_cgroup(group: Path) -> None:
    """The kernel lets it go only once its last process is really out."""
    for _ in range(200):
        try:
            group.rmdir()
            return
        except OSError:
            time.sleep(0.05)
    print(f"{group} is still there", file=sys.stderr)


def start(run: Run, command: list[str], environment: dict[str, str], shell: str, groups: list[Path]) -> None:
    """As a leader of a group of its own in `/`. `shell`: what comes first, in a mount namespace of its own."""
    lines = [f"echo $$ > {group}/cgroup.procs" for group in groups] + ([shell] if shell else [])
    if lines:
        command = ["sh", "-ec", "; ".join([*lines, 'exec "$@"']), "sh", *command]
    if "mount" in shell:
        command = ["unshare", "-m", *command]
    with run.log.open("wb") as log:
        run.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd="/",
            env={**os.environ, "VLLM_NO_USAGE_STATS": "1", "PYTHONPATH": str(run.folder), **environment},
            start_new_session=True,
        )


def wait(run: Run) -> int:
    """The exit status, or minus the signal. Orphans have a moment to say something."""
    assert run.process is not None
    deadline = time.monotonic() + LIMIT_SEC
    while not run.dead:
        if time.monotonic() > deadline:
            raise TimeoutError("it lives on")
        run.look()
        time.sleep(LOOK_SEC)
    run.look()
    time.sleep(2.0)  # nothing tells when an orphan has said its last word
    return int(run.process.returncode)


def end(run: Run) -> None:
    """Ends what this run started, by pid and start time, and takes down what it put up."""
    if run.process is not None:
        run.look()
        for pid, ticks in run.seen.items():
            with contextlib.suppress(OSError):
                if start_ticks(pid) == ticks:
                    os.kill(pid, signal.SIGKILL)
        run.process.wait(timeout=60)
    for undo in reversed(run.ends):
        undo()


class KernelLog:
    """What the kernel says from now on."""

    def __init__(self) -> None:
        self._descriptor = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
        os.lseek(self._descriptor, 0, os.SEEK_END)

    def lines(self) -> list[str]:
        """As dmesg shows them. A record is "priority,number,microseconds,flags;text" (dev-kmsg)."""
        found = []
        while (record := self._record()) is not None:
            head, _, body = record.partition(";")
            found.append(f"[{int(head.split(',')[2]) / 1e6:12.6f}] {body.splitlines()[0]}")
        os.close(self._descriptor)
        return found

    def _record(self) -> str | None:
        while True:
            try:
                return os.read(self._descriptor, 2**14).decode(errors="replace")
            except BlockingIOError:
                return None
            except BrokenPipeError:  # records that were overwritten before they were read
                continue
