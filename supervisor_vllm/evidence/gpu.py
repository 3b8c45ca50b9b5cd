"""GPUs through NVML (nvidia-ml-py), in a process of its own: `python -m supervisor_vllm.evidence.gpu` prints JSON.

So the listener never loads the driver's library, and a driver that hangs hangs a child that can be killed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from ..incident import GpuHolder, GpuMemory, from_json, to_json


@dataclass(frozen=True)
class GpuReading:
    """`problem`: why nothing could be read (no driver, no permission); None when it could."""

    gpus: tuple[GpuMemory, ...] = ()
    problem: str | None = None


def read_gpus_in_child(timeout_sec: float = 10.0) -> GpuReading:
    try:
        # in `/`: `python -m` looks for modules in its working directory first, and ours may be anybody's
        command = [sys.executable, "-m", "supervisor_vllm.evidence.gpu"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_sec, cwd="/", check=False)
        return from_json(GpuReading, json.loads(done.stdout))
    except subprocess.TimeoutExpired:
        return GpuReading(problem=f"the driver did not answer within {timeout_sec:g} s")
    except ValueError:
        return GpuReading(problem="NVML could not be asked")


def read_gpus() -> GpuReading:
    """All devices with the processes that hold their memory. Only in the child: it loads NVML."""
    import pynvml as nvml

    try:
        nvml.nvmlInit()
    except nvml.NVMLError as why:
        return GpuReading(problem=str(why))
    gpus, problems = [], []
    try:
        for index in range(nvml.nvmlDeviceGetCount()):
            try:
                gpus.append(_read_device(nvml, index))
            except nvml.NVMLError as why:
                problems.append(f"GPU {index}: {why}")
    finally:
        nvml.nvmlShutdown()
    return GpuReading(tuple(gpus), "; ".join(problems) or None)


def _read_device(nvml: Any, index: int) -> GpuMemory:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    return GpuMemory(
        index=index,
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
        name=_text(nvml.nvmlDeviceGetName(handle)),
        total_bytes=memory.total,
        free_bytes=memory.free,
        holders=_holders(nvml, handle),
    )


def _holders(nvml: Any, handle: Any) -> tuple[GpuHolder, ...]:
    """Compute processes. In a container NVML may hide them, or say their pids outside, and sizes may be missing."""
    try:
        found = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except nvml.NVMLError:
        return ()
    return tuple(GpuHolder(entry.pid, entry.usedGpuMemory, _process_name(entry.pid)) for entry in found)


def _process_name(pid: int) -> str:
    import psutil

    try:
        return psutil.Process(pid).name()
    except psutil.Error:
        return ""


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def visible_gpus(gpus: tuple[GpuMemory, ...], cuda_visible_devices: str | None) -> tuple[GpuMemory, ...]:
    """The devices that a program with this CUDA_VISIBLE_DEVICES sees, in its order; the first word that names none
    ends the list, as in CUDA. Indices are NVML's (CUDA_DEVICE_ORDER=PCI_BUS_ID; on hosts with one kind of GPU the
    default order is the same)."""
    if cuda_visible_devices is None:
        return gpus
    visible: list[GpuMemory] = []
    for word in (part.strip() for part in cuda_visible_devices.split(",")):
        match = next((gpu for gpu in gpus if word and (str(gpu.index) == word or gpu.uuid.startswith(word))), None)
        if match is None:
            break
        visible.append(match)
    return tuple(visible)


def main() -> int:
    print(json.dumps(to_json(read_gpus())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
