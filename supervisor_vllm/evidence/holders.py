"""Which of the processes that a driver names can be looked at from here.

A driver numbers processes as the host does. In a container (a pid namespace of its own) NVIDIA's gives the host's pids
or none at all, newer ones with the open kernel modules the container's own (`_gpuConvertPid`; seen with 560.35); amdgpu
always gives the host's. A pid that exists here as well proves nothing then: it may be anybody's. It is taken for the
very process only where that process has a GPU's device file open.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from ..incident import GpuHolder, GpuMemory
from .processes import in_pid_namespace
from .roots import Roots

#: NVIDIA, on Jetson, under WSL, AMD.
_DEVICE_FILES = ("/dev/nvidia", "/dev/nvhost", "/dev/nvmap", "/dev/dxg", "/dev/kfd", "/dev/dri/")


def located(gpus: tuple[GpuMemory, ...], roots: Roots) -> tuple[GpuMemory, ...]:
    """Each holder with its name, or as `elsewhere`. A container's empty list doesn't say that nobody holds memory."""
    contained = in_pid_namespace(roots)

    def device(gpu: GpuMemory) -> GpuMemory:
        holders = tuple(_located(holder, roots, contained) for holder in gpu.holders)
        known = gpu.holders_known and not (contained and not holders)
        return dataclasses.replace(gpu, holders=holders, holders_known=known)

    return tuple(map(device, gpus))


def _located(holder: GpuHolder, roots: Roots, contained: bool) -> GpuHolder:
    process = roots.proc / str(holder.pid)
    if not holder.pid or not process.exists() or (contained and not _uses_gpu(process)):
        return dataclasses.replace(holder, name="", elsewhere=True)
    return dataclasses.replace(holder, name=_name(process) or holder.name)


def _uses_gpu(process: Path) -> bool:
    """False as well where its files may not be looked at: then nothing proves that it is the one."""
    try:
        return any(_target(file).startswith(_DEVICE_FILES) for file in (process / "fd").iterdir())
    except OSError:
        return False


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:  # closed in this moment
        return ""


def _name(process: Path) -> str:
    """As `ps` shows it; vLLM's processes have a name of their own (VLLM::Worker_TP1)."""
    try:
        return (process / "comm").read_text(errors="replace").strip()
    except OSError:
        return ""
