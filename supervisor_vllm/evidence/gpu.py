"""GPUs through NVML (nvidia-ml-py), in a process of its own: `python -m supervisor_vllm.evidence.gpu` prints JSON.

So the listener never loads the driver's library, and a driver that hangs or crashes takes a child with it that can be
spared. Where there is no NVIDIA driver the child asks amdsmi, if that is installed.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ..incident import GpuHolder, GpuMemory, from_json, to_json
from .holders import located
from .roots import ROOTS, Roots
from .visible import visible_amd_gpus, visible_gpus

Vendor = Literal["nvidia", "amd"]

#: Which processes hold memory: CUDA's own, those that draw, and (since Volta) the clients of an MPS server.
_PROCESS_LISTS = (
    "nvmlDeviceGetComputeRunningProcesses",
    "nvmlDeviceGetGraphicsRunningProcesses",
    "nvmlDeviceGetMPSComputeRunningProcesses",
)


@dataclass(frozen=True)
class GpuReading:
    """`problem`: what couldn't be read and why (no driver, no permission); None when all could."""

    gpus: tuple[GpuMemory, ...] = ()
    problem: str | None = None
    vendor: Vendor = "nvidia"


def read_gpus_in_child(timeout_sec: float = 10.0, roots: Roots = ROOTS) -> GpuReading:
    # in `/`: `python -m` looks for modules in its working directory first, and ours may be anybody's
    command = [sys.executable, "-m", "supervisor_vllm.evidence.gpu"]
    pipe = subprocess.PIPE
    try:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, errors="replace", cwd="/"
        )
    except OSError as why:  # no memory for one more process, just when memory is the matter
        return GpuReading(problem=f"the driver could not be asked: {why.strerror}")
    try:
        output, errors = child.communicate(timeout=timeout_sec)
    except subprocess.TimeoutExpired:
        _give_up(child)
        return GpuReading(problem=f"the driver did not answer within {timeout_sec:g} s")
    if child.returncode < 0:
        return GpuReading(problem=f"the driver's library ended its reader with signal {-child.returncode}")
    try:
        reading = from_json(GpuReading, json.loads(output))
    except ValueError:
        said = errors.strip().rpartition("\n")[2] or f"exit status {child.returncode}"
        return GpuReading(problem=f"the driver could not be asked: {said[:200]}")
    return GpuReading(located(reading.gpus, roots), reading.problem, reading.vendor)


def _give_up(child: subprocess.Popen[str]) -> None:
    """SIGKILL, and no endless wait for what follows: who sleeps in the driver dies only once that returns."""
    child.kill()
    for pipe in (child.stdout, child.stderr):
        if pipe:
            pipe.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(timeout=1.0)


def seen_by_program(reading: GpuReading, environment: Mapping[str, str]) -> GpuReading:
    """The reading with only the devices that a program with this environment sees, in its order."""
    names: tuple[str, ...]
    if reading.vendor == "amd":
        names = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
        gpus = visible_amd_gpus(reading.gpus, environment)
    else:
        names = ("CUDA_VISIBLE_DEVICES",)
        gpus = visible_gpus(reading.gpus, environment.get("CUDA_VISIBLE_DEVICES"))
    if gpus or not reading.gpus:
        return GpuReading(gpus, reading.problem, reading.vendor)
    said = " ".join(f"{name}={environment[name]}" for name in names if name in environment)
    problem = f"{said} names none of the {len(reading.gpus)} devices of this machine"
    return GpuReading((), problem, reading.vendor)


def read_gpus() -> GpuReading:
    """All devices with the processes that hold their memory. Only in the child: it loads the drivers' libraries."""
    nvidia = _read_nvidia()
    if nvidia.gpus:
        return nvidia
    from .amd import read_amd_gpus

    gpus, problem = read_amd_gpus()
    if gpus:
        return GpuReading(gpus, problem, "amd")
    return GpuReading(problem="; ".join(filter(None, (nvidia.problem, problem))) or "there is no GPU here")


def _read_nvidia() -> GpuReading:
    import pynvml as nvml

    try:
        nvml.nvmlInit()
    except nvml.NVMLError as why:
        return GpuReading(problem=f"NVML: {why}")
    except Exception as why:  # a library that isn't NVIDIA's, or is half there
        return GpuReading(problem=f"NVML can't be loaded ({why or type(why).__name__})")
    gpus: list[GpuMemory] = []
    problems: list[str] = []
    try:
        for index in range(nvml.nvmlDeviceGetCount()):
            try:
                gpus += _read_device(nvml, index, problems)
            except nvml.NVMLError as why:
                problems.append(f"GPU {index}: {why}")
    except nvml.NVMLError as why:  # the driver goes while it's asked
        problems.append(f"NVML: {why}")
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
    for place in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            mig = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, place)
        except nvml.NVMLError:  # not each place is taken
            continue
        devices.append(_memory_of(nvml, mig, index, problems, parent=handle))
    if not devices:
        problems.append(f"GPU {index} is in MIG mode and has no MIG device: nothing can run on it")
    return devices


def _in_mig_mode(nvml: Any, handle: Any) -> bool:
    try:
        return bool(nvml.nvmlDeviceGetMigMode(handle)[0])
    except nvml.NVMLError:  # a GPU or a driver that doesn't have it
        return False


def _memory_of(nvml: Any, handle: Any, index: int, problems: list[str], *, parent: Any = None) -> GpuMemory:
    """`parent`: the GPU's own handle where `handle` is one of its MIG devices."""
    unified = False
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        total, free = memory.total, memory.free
    except nvml.NVMLError_NotSupported:  # GB10, Jetson: the device has no memory of its own
        total, free = _host_memory()
        unified = True
    holders, unknown = _holders(nvml, handle)
    if unknown:
        problems.append(f"GPU {index}: who holds its memory can't be read ({unknown})")
    is_mig = parent is not None
    return GpuMemory(
        index=index,
        uuid=_said(nvml, "nvmlDeviceGetUUID", handle) or "",
        name=_said(nvml, "nvmlDeviceGetName", handle) or "",
        total_bytes=total,
        free_bytes=free,
        holders=holders,
        unified=unified,
        parent_uuid=(_said(nvml, "nvmlDeviceGetUUID", parent) or "") if is_mig else "",
        gpu_instance=_said(nvml, "nvmlDeviceGetGpuInstanceId", handle) if is_mig else None,
        compute_instance=_said(nvml, "nvmlDeviceGetComputeInstanceId", handle) if is_mig else None,
        holders_known=unknown is None,
        driver=_said(nvml, "nvmlSystemGetDriverVersion") or "",
    )


def _said(nvml: Any, call: str, *handle: Any) -> Any:
    """What one call says (of a device); None where this GPU, driver or binding doesn't have it."""
    try:
        value = getattr(nvml, call)(*handle)
    except (nvml.NVMLError, AttributeError):
        return None
    return value.decode() if isinstance(value, bytes) else value


def _host_memory() -> tuple[int, int]:
    import psutil

    memory = psutil.virtual_memory()
    return memory.total, memory.available


def _holders(nvml: Any, handle: Any) -> tuple[tuple[GpuHolder, ...], str | None]:
    """Who holds memory, and why that isn't known. The list of CUDA processes decides; the others only add to it."""
    sizes: dict[int, int | None] = {}
    for call in _PROCESS_LISTS:
        try:
            found = getattr(nvml, call)(handle)
        except (nvml.NVMLError, AttributeError) as why:
            if call == _PROCESS_LISTS[0]:
                return (), str(why)
            continue
        for entry in found:  # in a container the driver may know no size: None, or 0 (drivers 535 to 560)
            sizes[entry.pid] = sizes.get(entry.pid) or entry.usedGpuMemory or None
    return tuple(GpuHolder(pid, size) for pid, size in sizes.items()), None


def main() -> int:
    """The answer alone goes to stdout: amdsmi prints there when it doesn't find its library."""
    answer = os.dup(1)
    os.dup2(2, 1)
    reading = json.dumps(to_json(read_gpus())) + "\n"
    with open(answer, "w") as out:
        out.write(reading)
    return 0


if __name__ == "__main__":
    sys.exit(main())
