"""What real_deaths.py does to a model before the start, and to vLLM after it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from deaths_run import LOADING, MEMORY, MIB, UP, Run, end, make_cgroup, prepare, start

Deed = Callable[[Run], None]

ENGINE = "VLLM::EngineCor"  # the kernel keeps 15 bytes of a name
WORKER = "VLLM::Worker"


# -- spoiling the model ------------------------------------------------------------------------------------------------


def config(**changes: object) -> Deed:
    def spoil(run: Run) -> None:
        path = run.model / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return spoil


def remove(*names: str) -> Deed:
    def spoil(run: Run) -> None:
        for path in [path for name in names for path in run.model.glob(name)]:
            path.unlink()

    return spoil


def cut(name: str, size: int) -> Deed:
    return lambda run: os.truncate(run.model / name, size)


def forbid(name: str) -> Deed:
    return lambda run: (run.model / name).chmod(0)


def index_without_shard(run: Run) -> None:
    (run.model / "model.safetensors").rename(run.model / "model-00001-of-00002.safetensors")
    weight_map = {
        "lm_head.weight": "model-00002-of-00002.safetensors",
        "model.norm.weight": "model-00001-of-00002.safetensors",
    }
    index = {"metadata": {"total_size": 2_800_000}, "weight_map": weight_map}
    (run.model / "model.safetensors.index.json").write_text(json.dumps(index))


def pointer(run: Run) -> None:
    text = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'4d' * 32}\nsize 2804000\n"
    (run.model / "model.safetensors").write_text(text)


def big_weights(run: Run) -> None:
    """1.1 GB in 20 layers: a sparse file of zeros, which vLLM reads like any other."""
    sizes = {"hidden_size": 1024, "intermediate_size": 8192, "num_attention_heads": 16, "num_key_value_heads": 4}
    config(num_hidden_layers=20, layer_types=["full_attention"] * 20, **sizes)(run)
    write_zeros(run.model / "model.safetensors", qwen2_shapes(20, 1024, 8192, 256, 427))


def qwen2_shapes(layers: int, hidden: int, inner: int, kv: int, vocabulary: int) -> dict[str, list[int]]:
    shapes = {"model.embed_tokens.weight": [vocabulary, hidden], "lm_head.weight": [vocabulary, hidden]}
    shapes["model.norm.weight"] = [hidden]
    for layer in range(layers):
        at = f"model.layers.{layer}."
        for name, rows in (("q", hidden), ("k", kv), ("v", kv)):
            shapes[f"{at}self_attn.{name}_proj.weight"] = [rows, hidden]
            shapes[f"{at}self_attn.{name}_proj.bias"] = [rows]
        shapes[f"{at}self_attn.o_proj.weight"] = [hidden, hidden]
        shapes[f"{at}mlp.gate_proj.weight"] = shapes[f"{at}mlp.up_proj.weight"] = [inner, hidden]
        shapes[f"{at}mlp.down_proj.weight"] = [hidden, inner]
        shapes[f"{at}input_layernorm.weight"] = shapes[f"{at}post_attention_layernorm.weight"] = [hidden]
    return shapes


def write_zeros(path: Path, shapes: dict[str, list[int]]) -> None:
    """A safetensors file in bfloat16: 8 bytes of the header's length, the header, the numbers."""
    header, offset = {}, 0
    for name, shape in shapes.items():
        size = 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + offset)


def take_port(run: Run) -> None:
    listener = socket.socket()
    listener.bind(("127.0.0.1", run.port))
    listener.listen()
    run.ends.append(listener.close)


# -- striking ----------------------------------------------------------------------------------------------------------


def kill(who: str, number: int, moment: str) -> Deed:
    def strike(run: Run) -> None:
        reach(run, moment)
        os.kill(run.named(who), number)

    return strike


def reach(run: Run, moment: str) -> None:
    run.wait_for(moment)
    if moment == UP:
        run.ask()


def serve(run: Run) -> None:
    """Completions until it is dead: the fault sits in one of the first steps."""
    run.wait_for(UP)
    for _ in range(6):
        run.ask()


def shrink(who: str) -> Deed:
    """One process grows while it serves, and meets a memory limit. What it held before isn't counted (version 1)."""

    def strike(run: Run) -> None:
        reach(run, UP)
        run.cgroup = make_cgroup(run, MEMORY, "memory.limit_in_bytes", 32 * MIB)
        (run.cgroup / "cgroup.procs").write_text(str(run.named(who)))
        for _ in range(20):
            if not run.dead:
                run.ask()

    return strike


def engine_alone(run: Run) -> None:
    """EngineCore meets a limit while it imports: it is the API server's second child, after the resource tracker."""
    children = Path(f"/proc/{run.leader}/task/{run.leader}/children")
    run.wait_until(lambda: len(children.read_text().split()) > 1, "EngineCore")
    run.cgroup = make_cgroup(run, MEMORY, "memory.limit_in_bytes", 150 * MIB)
    (run.cgroup / "cgroup.procs").write_text(children.read_text().split()[1])


def stranger_then_kill(run: Run) -> None:
    """The kernel kills another process of the worker's name; our worker is killed by hand."""
    reach(run, UP)
    group = make_cgroup(run, MEMORY, "memory.limit_in_bytes", 32 * MIB)
    eater = (
        "import ctypes, os, sys; ctypes.CDLL(None).prctl(15, b'VLLM::Worker', 0, 0, 0); "
        "open(sys.argv[1], 'w').write(str(os.getpid())); bytearray(256 * 2**20)"
    )
    subprocess.run([sys.executable, "-c", eater, str(group / "cgroup.procs")], timeout=60, check=False)
    os.kill(run.named(WORKER), signal.SIGKILL)


def quote_then_kill(run: Run) -> None:
    """A user asks about memory; then the worker is killed."""
    reach(run, UP)
    run.ask("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. What does that mean?\n")
    run.ask("Memory cgroup out of memory: Killed process 4711 (VLLM::Worker)\nNo space left on device: /dev/shm")
    os.kill(run.named(WORKER), signal.SIGKILL)


def node_memory() -> tuple[int, int]:
    """(total, available) in bytes, as vLLM's CPU worker counts them (0.32, utils/cpu_resource_utils.py)."""
    lines = Path("/sys/devices/system/node/node0/meminfo").read_text().splitlines()
    values = {line.split()[2].rstrip(":"): int(line.split()[3]) * 1024 for line in lines}
    available = ("MemFree", "Active(file)", "Inactive(file)", "SReclaimable")
    return values["MemTotal"], sum(values[key] for key in available)


def hold(run: Run, size: int) -> None:
    """A neighbour that holds so much, until the end."""
    code = (
        f"import time; block = bytearray({size}); block[::4096] = b'x' * len(block[::4096]); print(); time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    run.ends.append(process.wait)
    run.ends.append(process.kill)
    assert process.stdout is not None
    process.stdout.readline()


def neighbour_while_loading(run: Run) -> None:
    """Leaves less than what this run was promised at its start, --gpu-memory-utilization 0.7."""
    run.wait_for(LOADING)
    total, available = node_memory()
    hold(run, max(MIB, available - int(0.7 * total) + 1536 * MIB))


def first_of_two(run: Run) -> None:
    """Another vLLM serves already."""
    tiny = run.folder / "model"
    other = prepare(f"{run.folder.name}_first", tiny, run.folder.parent)
    run.ends.append(lambda: end(other))
    command = [os.environ["VLLM_PYTHON"], "-m", "vllm.entrypoints.openai.api_server", "--model", str(other.model)]
    command += ["--host", "127.0.0.1", "--port", str(other.port), "--enforce-eager", "--max-model-len", "2048"]
    start(other, [*command, "--gpu-memory-utilization", "0.25"], {}, "", [])
    other.wait_for(UP)
