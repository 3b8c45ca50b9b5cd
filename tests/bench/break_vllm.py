"""Real vLLM (CPU build), broken on purpose: each way's whole log and its truth go to tests/corpus/broken/.

    python tests/bench/break_vllm.py [--only NAME]...

Needs root (memory cgroups of version 1, a private mount namespace). The truth is what was done, never what our own
classification says. About 30 s a way on two cores.
"""

from __future__ import annotations

import argparse
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

HERE = Path(__file__).resolve().parent
OUT = HERE.parent / "corpus" / "broken"
MEMORY = Path("/sys/fs/cgroup/memory")
MIB = 2**20
#: Of a log; the middle of longer ones (the same warning over and over) is left out.
LOG_BYTES = 150_000
LIMIT_SEC = 120.0

# Runs inside vLLM's processes: breaks one method when it is called for the nth time.
_SITE = """
import os, sys, threading, time
def _watch(spec):
    module, name, count, action = spec.split("|")
    owner, method = name.split(".")
    for _ in range(6000):
        cls = getattr(sys.modules.get(module), owner, None)
        if cls is not None:
            break
        time.sleep(0.01)
    else:
        return
    original, calls = getattr(cls, method), [0]
    def broken(self, *args, **kwargs):
        calls[0] += 1
        if calls[0] == int(count):
            exec(action)
        return original(self, *args, **kwargs)
    setattr(cls, method, broken)
if os.environ.get("BREAK"):
    threading.Thread(target=_watch, args=(os.environ["BREAK"],), daemon=True).start()
"""


@dataclass
class Run:
    """One start of vLLM. `folder` is its own, `model` a copy that it may spoil."""

    folder: Path
    model: Path
    port: int
    log: Path
    process: subprocess.Popen[bytes] | None = None
    pids: list[int] = field(default_factory=list)
    cgroup: Path | None = None

    def text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def wait_for(self, words: str) -> None:
        deadline = time.monotonic() + LIMIT_SEC
        while time.monotonic() < deadline:
            if re.search(words, self.text()):
                return
            if self.process is None or self.process.poll() is not None:
                raise RuntimeError(f"it died before {words!r}")
            self.see()
            time.sleep(0.02)
        raise TimeoutError(words)

    def see(self) -> None:
        """Remember the processes of the group, by their pids."""
        if self.process is None:
            return
        for entry in os.listdir("/proc"):
            try:
                if entry.isdigit() and os.getpgid(int(entry)) == self.process.pid and int(entry) not in self.pids:
                    self.pids.append(int(entry))
            except OSError:
                continue

    def named(self, comm: str) -> int:
        self.see()
        for pid in self.pids:
            try:
                if Path(f"/proc/{pid}/comm").read_text().strip().startswith(comm):
                    return pid
            except OSError:
                continue
        raise RuntimeError(f"no {comm} among {self.pids}")

    def ask(self, prompt: str = "hello", timeout_sec: float = 60) -> None:
        body = json.dumps({"model": str(self.model), "prompt": prompt, "max_tokens": 8}).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions", body, {"Content-Type": "application/json"}
        )
        with contextlib.suppress(OSError):  # that it breaks is what it's for
            urllib.request.urlopen(request, timeout=timeout_sec).read()


@dataclass(frozen=True)
class Way:
    """`kinds`: what is right, the best first (two where nothing is left that tells them apart). `spoil` runs before the start, `strike` after it."""

    name: str
    how: str
    kinds: tuple[str, ...]
    oom: bool = False
    phase: str | None = None
    arguments: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    utilization: str | None = "0.2"
    model: str | None = None
    shell: str | None = None
    memory_bytes: int | None = None
    spoil: Callable[[Run], None] | None = None
    strike: Callable[[Run], None] | None = None


UP = "Application startup complete"
LOADING = "Starting to load model"
KV = r"KV cache size"


def _config(**changes: object) -> Callable[[Run], None]:
    def spoil(run: Run) -> None:
        path = run.model / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return spoil


def _remove(*names: str) -> Callable[[Run], None]:
    def spoil(run: Run) -> None:
        for name in names:
            for path in run.model.glob(name):
                path.unlink()

    return spoil


def _truncate(size: int) -> Callable[[Run], None]:
    return lambda run: os.truncate(run.model / "model.safetensors", size)


def _index_without_shard(run: Run) -> None:
    (run.model / "model.safetensors").rename(run.model / "model-00001-of-00002.safetensors")
    index = {
        "metadata": {"total_size": 1},
        "weight_map": {
            "lm_head.weight": "model-00002-of-00002.safetensors",
            "model.norm.weight": "model-00001-of-00002.safetensors",
        },
    }
    (run.model / "model.safetensors.index.json").write_text(json.dumps(index))


def _garbage(run: Run) -> None:
    (run.model / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n")


def _take_port(run: Run) -> None:
    listener = socket.socket()
    listener.bind(("127.0.0.1", run.port))
    listener.listen()
    _KEPT.append(listener)


_KEPT: list[object] = []


def _kill(who: str, number: int, moment: str) -> Callable[[Run], None]:
    """who: leader, or the beginning of a process's name."""

    def strike(run: Run) -> None:
        assert run.process is not None
        run.wait_for(moment)
        os.kill(run.process.pid if who == "leader" else run.named(who), number)

    return strike


def _shrink(moment: str, who: str, prompt: str = "hello " * 300) -> Callable[[Run], None]:
    """The memory limit comes when that is reached: one process goes into the cgroup, and then needs memory."""

    def strike(run: Run) -> None:
        run.wait_for(moment)
        assert run.cgroup is not None
        (run.cgroup / "cgroup.procs").write_text(str(run.named(who)))
        if moment == UP:
            run.ask(prompt)

    return strike


WAYS = (
    Way("flag_unknown", "a flag that doesn't exist", ("bad_arguments",), arguments=("--no-such-flag",)),
    Way("flag_value", "a word where a number belongs", ("bad_arguments",), arguments=("--max-num-seqs", "many")),
    Way(
        "length_derived",
        "longer than the model's own length",
        ("bad_arguments",),
        arguments=("--max-model-len", "99999"),
    ),
    Way("dtype_word", "a dtype that doesn't exist", ("bad_arguments",), arguments=("--dtype", "float7")),
    Way("utilization_over_one", "a utilisation of 1.2", ("bad_arguments",), utilization="1.2"),
    Way(
        "tensor_parallel_odd",
        "three ranks for four heads",
        ("bad_arguments",),
        arguments=("--tensor-parallel-size", "3"),
    ),
    Way(
        "quantization_unknown",
        "a quantisation that doesn't exist",
        ("bad_arguments",),
        arguments=("--quantization", "none7"),
    ),
    Way("model_missing", "the directory isn't there", ("bad_model",), model="/srv/models/none"),
    Way(
        "model_offline",
        "a name of the Hub, offline",
        ("bad_model",),
        model="no-such-org/no-such-model",
        environment=(("HF_HUB_OFFLINE", "1"),),
    ),
    Way("config_missing", "no config.json", ("bad_model",), spoil=_remove("config.json")),
    Way(
        "config_broken",
        "half a config.json",
        ("bad_model",),
        spoil=lambda run: os.truncate(run.model / "config.json", 60),
    ),
    Way(
        "architecture_unknown",
        "an architecture that nobody knows",
        ("bad_model",),
        spoil=_config(architectures=["NoSuchForCausalLM"], model_type="nosuch"),
    ),
    Way(
        "shape_mismatch",
        "another hidden size than the weights'",
        ("bad_model",),
        phase="weights",
        spoil=_config(hidden_size=512, num_attention_heads=8),
    ),
    Way("weights_missing", "no weights at all", ("bad_model",), spoil=_remove("*.safetensors")),
    Way(
        "weights_truncated",
        "the last quarter of the file is gone",
        ("bad_model",),
        phase="weights",
        spoil=_truncate(2_000_000),
    ),
    Way("weights_empty", "a file of no length", ("bad_model",), phase="weights", spoil=_truncate(0)),
    Way("weights_pointer", "a Git LFS pointer instead of weights", ("bad_model",), phase="weights", spoil=_garbage),
    Way(
        "shard_missing",
        "the index names a shard that isn't there",
        ("bad_model",),
        phase="weights",
        spoil=_index_without_shard,
    ),
    Way("port_taken", "another program listens on the port", ("port_in_use",), spoil=_take_port),
    Way(
        "utilization_high",
        "nearly all of the node's memory is wanted",
        ("gpu_neighbour",),
        oom=True,
        phase="startup",
        utilization="0.99",
    ),
    Way(
        "kv_small",
        "a KV cache of less than one request",
        ("gpu_kv_small",),
        oom=True,
        phase="kv_cache",
        arguments=("--kv-cache-memory-bytes", "1M"),
    ),
    Way(
        "kv_none",
        "a budget below what the process itself needs",
        ("gpu_kv_none",),
        oom=True,
        phase="kv_cache",
        utilization="0.01",
    ),
    Way(
        "address_space",
        "ulimit -v below what the load needs",
        ("host_alloc",),
        oom=True,
        shell="ulimit -v 2500000; exec",
    ),
    Way(
        "shm_small",
        "a /dev/shm of 1 MiB",
        ("shm_full",),
        oom=True,
        shell="mount -t tmpfs -o size=1m tmpfs /dev/shm; exec",
    ),
    Way(
        "memcg_import", "a memory limit of 200 MiB from the start", ("host_oom_kill",), oom=True, memory_bytes=200 * MIB
    ),
    Way(
        "memcg_start", "a memory limit of 900 MiB from the start", ("host_oom_kill",), oom=True, memory_bytes=900 * MIB
    ),
    Way(
        "memcg_kv", "a memory limit that the KV cache goes over", ("host_oom_kill",), oom=True, memory_bytes=2600 * MIB
    ),
    Way(
        "memcg_serving_worker",
        "the worker meets a limit while serving",
        ("host_oom_kill",),
        oom=True,
        memory_bytes=1 * MIB,
        strike=_shrink(UP, "VLLM::Worker"),
    ),
    Way(
        "memcg_serving_engine",
        "EngineCore meets a limit while serving",
        ("host_oom_kill",),
        oom=True,
        memory_bytes=1 * MIB,
        strike=_shrink(UP, "VLLM::EngineCor"),
    ),
    Way("kill_leader_serving", "SIGKILL to the API server while serving", ("killed",), strike=_kill("leader", 9, UP)),
    Way(
        "kill_engine_serving",
        "SIGKILL to EngineCore while serving",
        ("killed",),
        strike=_kill("VLLM::EngineCor", 9, UP),
    ),
    Way("kill_worker_serving", "SIGKILL to the worker while serving", ("killed",), strike=_kill("VLLM::Worker", 9, UP)),
    Way(
        "kill_leader_loading",
        "SIGKILL to the API server while loading",
        ("killed",),
        strike=_kill("leader", 9, LOADING),
    ),
    Way(
        "kill_engine_loading",
        "SIGKILL to EngineCore while loading",
        ("killed",),
        strike=_kill("VLLM::EngineCor", 9, LOADING),
    ),
    Way(
        "kill_worker_loading",
        "SIGKILL to the worker while loading",
        ("killed",),
        strike=_kill("VLLM::Worker", 9, LOADING),
    ),
    Way(
        "segv_worker_serving",
        "SIGSEGV to the worker while serving",
        ("engine_crash", "killed"),
        strike=_kill("VLLM::Worker", 11, UP),
    ),
    Way(
        "abrt_engine_serving",
        "SIGABRT to EngineCore while serving",
        ("engine_crash", "killed"),
        strike=_kill("VLLM::EngineCor", 6, UP),
    ),
    Way(
        "segv_leader_serving",
        "SIGSEGV to the API server while serving",
        ("engine_crash",),
        strike=_kill("leader", 11, UP),
    ),
    Way("term_leader_serving", "SIGTERM to the API server while serving", ("stopped",), strike=_kill("leader", 15, UP)),
    Way(
        "term_leader_loading",
        "SIGTERM to the API server while loading",
        ("stopped",),
        strike=_kill("leader", 15, LOADING),
    ),
    Way("int_leader_serving", "SIGINT to the API server while serving", ("stopped",), strike=_kill("leader", 2, UP)),
    Way(
        "exit_loading",
        "the worker ends itself in the middle of loading",
        ("engine_crash", "killed", "unknown"),
        environment=(("BREAK", "vllm.v1.worker.cpu_model_runner|CPUModelRunner.load_model|1|os._exit(3)"),),
    ),
    Way(
        "raise_loading",
        "an exception in load_model",
        ("engine_crash",),
        environment=(
            (
                "BREAK",
                "vllm.v1.worker.cpu_model_runner|CPUModelRunner.load_model|1|raise RuntimeError('the plugin broke')",
            ),
        ),
    ),
    Way(
        "disk_full",
        "a cache directory that is full",
        ("engine_crash",),
        shell="mount -t tmpfs -o size=16k tmpfs /srv; exec",
        environment=(
            ("VLLM_CACHE_ROOT", "/srv"),
            (
                "BREAK",
                "vllm.v1.worker.cpu_model_runner|CPUModelRunner.load_model|1|open('/srv/x', 'wb').write(b'x' * 10**6)",
            ),
        ),
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", default=str(HERE.parent.parent / ".venv-vllm" / "bin" / "python"))
    parser.add_argument("--only", action="append", default=[], metavar="NAME")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/break-vllm"))
    options = parser.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    tiny = options.folder / "tiny"
    if not tiny.exists():
        subprocess.run([options.vllm_python, str(HERE.parent / "real_vllm.py"), str(tiny)], check=True)
    for way in WAYS:
        if options.only and way.name not in options.only:
            continue
        try:
            case = _run(way, options.vllm_python, tiny, options.folder)
        except (RuntimeError, TimeoutError) as why:
            print(f"{way.name}: {why}", file=sys.stderr, flush=True)
            continue
        _keep(case)
        print(f"{way.name}: exit {case['exit_status']} signal {case['signal']}", flush=True)


def _run(way: Way, python: str, tiny: Path, base: Path) -> dict[str, object]:
    folder = base / way.name
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(tiny, folder / "model")
    run = Run(folder, folder / "model", _free_port(), folder / "vllm.log")
    if way.spoil:
        way.spoil(run)
    (folder / "sitecustomize.py").write_text(_SITE)
    kernel_begin = time.monotonic()
    if way.memory_bytes:
        run.cgroup = MEMORY / f"break-{way.name}-{os.getpid()}"
        run.cgroup.mkdir()
        (run.cgroup / "memory.limit_in_bytes").write_text(str(way.memory_bytes))
    command = _command(way, run, python)
    try:
        _start(way, run, command)
        if way.strike:
            way.strike(run)
        assert run.process is not None
        status = _wait(run)
    finally:
        _end(run)
    return _case(way, run, command, status, kernel_begin)


def _command(way: Way, run: Run, python: str) -> list[str]:
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", way.model or str(run.model)]
    command += ["--host", "127.0.0.1", "--port", str(run.port), "--enforce-eager"]
    if "--max-model-len" not in way.arguments:
        command += ["--max-model-len", "2048"]
    if way.utilization:
        command += ["--gpu-memory-utilization", way.utilization]
    return [*command, *way.arguments]


def _start(way: Way, run: Run, command: list[str]) -> None:
    environment = {**os.environ, **dict(way.environment), "PYTHONPATH": str(run.folder)}
    if way.shell:
        command = ["unshare", "-m", "sh", "-c", f'{way.shell} "$@"', "sh", *command]

    def enter() -> None:
        os.setsid()
        if run.cgroup and not way.strike:
            (run.cgroup / "cgroup.procs").write_text(str(os.getpid()))

    with run.log.open("wb") as log:
        run.process = subprocess.Popen(
            command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd="/", env=environment, preexec_fn=enter
        )


def _wait(run: Run) -> int:
    assert run.process is not None
    deadline = time.monotonic() + LIMIT_SEC
    while run.process.poll() is None and time.monotonic() < deadline:
        run.see()
        time.sleep(0.05)
    if run.process.returncode is None:
        raise TimeoutError("it lives on")
    return run.process.returncode


def _end(run: Run) -> None:
    if run.process is not None:
        run.see()
        for pid in run.pids:
            try:
                if os.getpgid(pid) == run.process.pid:
                    os.kill(pid, signal.SIGKILL)
            except OSError:
                continue
        run.process.wait(timeout=60)
    while _KEPT:
        _KEPT.pop().close()  # type: ignore[attr-defined]
    if run.cgroup:
        for _ in range(200):
            try:
                run.cgroup.rmdir()
                break
            except OSError:
                time.sleep(0.05)


def _case(way: Way, run: Run, command: list[str], status: int, kernel_begin: float) -> dict[str, object]:
    text = run.text().replace(str(run.model), "/srv/models/tiny").replace(str(run.folder), "/srv")
    python = Path(command[0])
    text = text.replace(str(python.parent.parent), "/opt/vllm")
    if len(text) > LOG_BYTES:
        text = text[: LOG_BYTES // 2].rsplit("\n", 1)[0] + "\n" + text[-LOG_BYTES // 2 :].split("\n", 1)[1]
    (OUT / f"{way.name}.log").write_text(text)
    kernel = _kernel_lines(kernel_begin) if way.memory_bytes else []
    path = OUT / f"{way.name}.kernel"
    path.unlink(missing_ok=True)
    if kernel:
        path.write_text("".join(f"{line}\n" for line in kernel))
    shown = " ".join(["vllm", "serve", *command[4:]]).replace(str(run.model), "/srv/models/tiny")
    return {
        "name": way.name,
        "how": way.how,
        "kinds": list(way.kinds),
        "oom": way.oom,
        "phase": way.phase,
        "command": shown,
        "exit_status": status if status >= 0 else None,
        "signal": signal.Signals(-status).name if status < 0 else None,
        "pids": run.pids,
        "vllm": "0.32.0 (CPU build)",
    }


def _kernel_lines(since: float) -> list[str]:
    lines = []
    descriptor = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    try:
        while True:
            try:
                record = os.read(descriptor, 2**14).decode(errors="replace")
            except BlockingIOError:
                break
            except BrokenPipeError:
                continue
            head, _, body = record.partition(";")
            seconds = int(head.split(",")[2]) / 1e6
            if seconds >= since:
                lines.append(f"[{seconds:12.6f}] {body.splitlines()[0]}")
    finally:
        os.close(descriptor)
    return lines


def _keep(case: dict[str, object]) -> None:
    path = OUT / "cases.json"
    cases = json.loads(path.read_text()) if path.exists() else []
    cases = [known for known in cases if known["name"] != case["name"]] + [case]
    order = [way.name for way in WAYS]
    cases.sort(key=lambda known: order.index(known["name"]))
    path.write_text(json.dumps(cases, indent=1, ensure_ascii=False) + "\n")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    main()
