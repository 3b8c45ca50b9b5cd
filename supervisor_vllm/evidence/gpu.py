"""GPUs through NVML (nvidia-ml-py), in a process of its own: `python -m supervisor_vllm.evidence.gpu` prints JSON.

So the listener never loads the driver's library, and a driver that hangs hangs a child that can be killed.
"""

from __future__ import annotations

import contextlib
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
    gpus: list[GpuMemory] = []
    problems: list[str] = []
    try:
        for index in range(nvml.nvmlDeviceGetCount()):
            try:
                gpus += _read_device(nvml, index, problems)
            except nvml.NVMLError as why:
                problems.append(f"GPU {index}: {why}")
    except nvml.NVMLError as why:  # the driver goes while it's asked
        problems.append(str(why))
    finally:
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlShutdown()
    return GpuReading(tuple(gpus), "; ".join(problems) or None)


def _read_device(nvml: Any, index: int, problems: list[str]) -> list[GpuMemory]:
    """The GPU, or in MIG mode its MIG devices: vLLM's memory is that of its instance, not the GPU's."""
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    if not _in_mig_mode(nvml, handle):
        return [_memory_of(nvml, handle, index, problems)]
    devices = []
    for instance in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            mig = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, instance)
        except nvml.NVMLError:  # not each place is taken
            continue
        devices.append(_memory_of(nvml, mig, index, problems))
    if not devices:
        problems.append(f"GPU {index} is in MIG mode and has no MIG device: nothing can run on it")
    return devices


def _in_mig_mode(nvml: Any, handle: Any) -> bool:
    try:
        return bool(nvml.nvmlDeviceGetMigMode(handle)[0])
    except nvml.NVMLError:  # a GPU or a driver that doesn't have it
        return False


def _memory_of(nvml: Any, handle: Any, index: int, problems: list[str]) -> GpuMemory:
    unified = False
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        total, free = memory.total, memory.free
    except nvml.NVMLError_NotSupported:  # GB10, Jetson: the device has no memory of its own
        total, free = _host_memory()
        unified = True
    return GpuMemory(
        index=index,
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
        name=_text(nvml.nvmlDeviceGetName(handle)),
        total_bytes=total,
        free_bytes=free,
        holders=_holders(nvml, handle, index, problems),
        unified=unified,
    )


def _host_memory() -> tuple[int, int]:
    import psutil

    memory = psutil.virtual_memory()
    return memory.total, memory.available


def _holders(nvml: Any, handle: Any, index: int, problems: list[str]) -> tuple[GpuHolder, ...]:
    """Compute processes. In a container NVML may hide them, or say their pids outside, and sizes may be missing."""
    try:
        found = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except nvml.NVMLError as why:
        problems.append(f"GPU {index}: who holds its memory can't be read ({why})")
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
    ends the list, and a device that is named twice leaves none, as in CUDA. Words are indices, UUIDs (GPU-…, MIG-…) or
    beginnings of one. Indices are NVML's (CUDA_DEVICE_ORDER=PCI_BUS_ID; on hosts with one kind of GPU the default order
    is the same); an index of a GPU in MIG mode is its first MIG device."""
    if cuda_visible_devices is None:
        return gpus
    visible: list[GpuMemory] = []
    for word in (part.strip() for part in cuda_visible_devices.split(",")):
        matches = [gpu for gpu in gpus if word and (str(gpu.index) == word or gpu.uuid.startswith(word))]
        if not matches or (not word.isdigit() and len(matches) > 1):
            break
        visible.append(matches[0])
    return tuple(visible) if len(set(visible)) == len(visible) else ()


def main() -> int:
    print(json.dumps(to_json(read_gpus())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
