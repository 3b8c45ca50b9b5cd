"""Too-large settings on real vLLM (its CPU build): each is to serve on the second launch, and `plan` is to say before
what vLLM then logs.

    python tests/bench/real_plans.py VLLM_PYTHON          about 8 min; writes the table into docs/accuracy.md
"""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from supervisor_vllm.classify import classify
from supervisor_vllm.classify.numbers import with_device_numbers
from supervisor_vllm.evidence.device import name_holders, on_cpu_backend, read_memory_nodes
from supervisor_vllm.evidence.log_records import parse_records
from supervisor_vllm.evidence.model_config import launched_shape
from supervisor_vllm.evidence.startup_facts import measurements, startup_facts
from supervisor_vllm.evidence.vllm_log import read_file
from supervisor_vllm.explain import incident_from_log
from supervisor_vllm.forecast import forecast
from supervisor_vllm.policy.launch_command import parse_launch
from supervisor_vllm.policy.levers import Attempt
from supervisor_vllm.policy.plan import plan_next
from supervisor_vllm.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(Path(__file__).parent))

from document import write_made  # noqa: E402

DOCUMENT = ROOT / "docs" / "accuracy.md"
_MARK = "<!-- made by tests/bench/real_plans.py -->\n"
GIB = 2**30
START_LIMIT_SEC = 240.0

#: name → flags of a launch that can't work here. The model's cache takes 16 KiB a token (float32).
WAYS = {
    "utilisation 0.98 of the node": "--gpu-memory-utilization 0.98 --max-model-len 4096",
    "a length of 524288 tokens in a cache for fewer": "--gpu-memory-utilization 0.2 --max-model-len 524288",
    "utilisation 0.03": "--gpu-memory-utilization 0.03 --max-model-len 4096",
    "a KV cache of 64 GiB": f"--kv-cache-memory-bytes {64 * GIB} --max-model-len 4096",
    "both: utilisation 0.98 and a length of 1048576 tokens": "--gpu-memory-utilization 0.98 --max-model-len 1048576",
}


@dataclass(frozen=True)
class Launch:
    serves: bool
    exit_status: int | None
    log: Path


def make_model(vllm_python: str, directory: Path) -> None:
    """The tests' tiny model, with a large cache and a long reach."""
    different = {"num_hidden_layers": 8, "num_key_value_heads": 4, "max_position_embeddings": 2**20}
    maker = [vllm_python, str(ROOT / "tests/real_vllm.py"), str(directory), json.dumps(different)]
    subprocess.run(maker, check=True, capture_output=True)


def launch(vllm_python: str, command: str, log: Path) -> Launch:
    words = shlex.split(command)
    assert words[:2] == ["vllm", "serve"]
    with log.open("wb") as file:
        process = subprocess.Popen(
            [vllm_python, "-m", "vllm.entrypoints.openai.api_server", "--model", *words[2:]],
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=log.parent,
            start_new_session=True,
            env={**os.environ, "VLLM_LOGGING_COLOR": "0"},
        )
    try:
        serves = _serves(process, log)
        return Launch(serves, process.poll(), log)
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(process.pid, number)
                process.wait(timeout=20)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue


def _serves(process: subprocess.Popen[bytes], log: Path) -> bool:
    deadline = time.monotonic() + START_LIMIT_SEC
    while process.poll() is None and time.monotonic() < deadline:
        if b"Application startup complete" in log.read_bytes():
            return True
        time.sleep(0.5)
    return False


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def next_command(command: str, dead: Launch, attempts: tuple[Attempt, ...]) -> tuple[str, str, Attempt]:
    """(kind, next command, what was changed), as the listener does it: a neighbour was waited for in vain."""
    incident = incident_from_log(str(dead.log), command=command, exit_status=dead.exit_status)
    nodes = name_holders(read_memory_nodes(), own=(), orphans=())
    incident = dataclasses.replace(incident, gpus=nodes)
    verdict = with_device_numbers(classify(incident), incident)
    launch_ = parse_launch(command)
    made = plan_next(
        verdict,
        command,
        Settings(),
        attempts=attempts,
        waited=True,
        vllm_version=incident.vllm_version,
        shape=launched_shape(launch_, os.environ),
        cpu_backend=on_cpu_backend(incident.log),
    )
    print(f"    {verdict.kind}: {made.action}: {made.reason}")
    return verdict.kind, made.command, Attempt(verdict.kind, made.changes)


def main() -> None:
    vllm_python = sys.argv[1]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        make_model(vllm_python, model)
        for name, flags in WAYS.items():
            command = f"vllm serve {model} --dtype float32 --host 127.0.0.1 --port {free_port()} {flags}"
            launches, attempts, kinds = 1, (), []
            print(name, flush=True)
            done = launch(vllm_python, command, Path(folder) / "vllm.log")
            while not done.serves and launches < 4:
                kind, command, attempt = next_command(command, done, attempts)
                kinds.append(kind)
                attempts = (*attempts, attempt)
                launches += 1
                done = launch(vllm_python, command, Path(folder) / "vllm.log")
            rows.append((name, kinds, launches, done.serves, *_forecast(command, done)))
            print("   ", rows[-1], flush=True)
    _write(rows)


def _forecast(command: str, done: Launch) -> tuple[int, int]:
    """(KV tokens that `plan` says, those that vLLM logged)."""
    lines = read_file(str(done.log))
    logged = startup_facts(lines).kv_tokens or 0
    if "--kv-cache-memory-bytes" in command:
        return 0, logged
    # a virtual machine's memory may grow and shrink: what it had then
    total = measurements(parse_records(lines)).get("total_bytes")
    said = forecast(command, Settings(), gpu_total=total, vllm_version="0.32.0", cpu_backend=True)
    return said.kv_tokens, logged


def _write(rows: list[tuple]) -> None:
    lines = ["| too large | died as | launches in all | KV tokens: forecast, logged | error |", "|---|---|---|---|---|"]
    for name, kinds, launches, serves, said, logged in rows:
        error = f"{abs(said - logged) / logged:.1%}" if said and logged else "(size given)"
        outcome = f"{launches}" if serves else f"{launches}, none serves"
        lines.append(f"| {name} | {', '.join(kinds)} | {outcome} | {said or '-'}, {logged} | {error} |")
    table = "\n".join(lines) + "\n"
    print(table)
    write_made(DOCUMENT, _MARK, table, section=_SECTION)


_SECTION = """\
## How often one restart is enough, on real vLLM

vLLM 0.32's CPU build with a tiny model whose cache is large. Each start is too large on purpose; what is said of its
death is the next command, as the listener would run it. Beside it, what `plan` said of the KV cache before that launch.
Run it again with `python tests/bench/real_plans.py VLLM_PYTHON`.

"""


if __name__ == "__main__":
    main()
