"""The memory that vLLM calls the device's: the GPUs as NVML shows them, or a memory node on its CPU backend."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from ..incident import GpuHolder, GpuMemory, LogLine, ProcessRef
from .gpu import GpuReading, read_gpus_in_child, seen_by_program
from .roots import ROOTS, Roots

#: Words that only the CPU backend logs (vLLM 0.20 to 0.33, v1/worker/cpu_worker.py, cpu_model_runner.py).
_CPU_BACKEND_WORDS = ("cpu_worker.py", "cpu_model_runner.py", "CPU KV cache size", "Available memory on node ")

_NODES = Path("/sys/devices/system/node")


def on_cpu_backend(log: tuple[LogLine, ...]) -> bool:
    return any(word in line.text for line in log for word in _CPU_BACKEND_WORDS)


def read_devices(
    *, cpu_backend: bool, environment: Mapping[str, str], timeout_sec: float = 10.0, roots: Roots = ROOTS
) -> GpuReading:
    """The devices of a program with this environment, in its order; none, and why, where nothing can be measured. A
    memory node has no holders: everybody uses it."""
    if cpu_backend:
        return GpuReading(read_memory_nodes())
    return seen_by_program(read_gpus_in_child(timeout_sec, roots), environment)


def read_memory_nodes(nodes: Path = _NODES) -> tuple[GpuMemory, ...]:
    """Each node's total and available bytes, counted as vLLM counts them (0.32 utils/cpu_resource_utils.py):
    free + active and inactive page cache + reclaimable slab."""
    found = []
    for meminfo in sorted(nodes.glob("node[0-9]*/meminfo")):
        node = meminfo.parent.name
        values = _meminfo(meminfo)
        available = sum(values.get(key, 0) for key in ("MemFree", "Active(file)", "Inactive(file)", "SReclaimable"))
        if values.get("MemTotal"):
            found.append(GpuMemory(int(node[4:]), node, f"CPU memory {node}", values["MemTotal"], available))
    return tuple(found)


def _meminfo(path: Path) -> dict[str, int]:
    """Lines such as `Node 0 MemTotal:  8218828 kB` → bytes."""
    values = {}
    for line in path.read_text().splitlines():
        _, _, key, number, *unit = line.split()
        values[key.rstrip(":")] = int(number) * (1024 if unit else 1)
    return values


def name_holders(
    gpus: tuple[GpuMemory, ...], *, own: tuple[ProcessRef, ...], orphans: tuple[ProcessRef, ...]
) -> tuple[GpuMemory, ...]:
    """Say of each holder whose it is: own (of the life), orphan (of a dead one), or a neighbour's. A pid of another
    namespace says nothing of ours."""
    own_pids, orphan_pids = {ref.pid for ref in own}, {ref.pid for ref in orphans}

    def owned(holder: GpuHolder) -> GpuHolder:
        if holder.elsewhere:
            return dataclasses.replace(holder, owner="neighbour")
        if holder.pid in orphan_pids:
            return dataclasses.replace(holder, owner="orphan")
        return dataclasses.replace(holder, owner="own" if holder.pid in own_pids else "neighbour")

    return tuple(dataclasses.replace(device, holders=tuple(map(owned, device.holders))) for device in gpus)
