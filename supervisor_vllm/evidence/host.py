"""The host's memory."""

from __future__ import annotations

import os

from ..incident import HostMemory
from .roots import Roots


def read_host(roots: Roots) -> HostMemory:
    """Zeros where /proc can't be read."""
    meminfo = {}
    for line in _lines(roots, "meminfo"):
        key, _, value = line.partition(":")
        meminfo[key] = int(value.split()[0]) * 1024
    vmstat = dict(line.split() for line in _lines(roots, "vmstat"))
    shm = _shm(roots)
    return HostMemory(
        total_bytes=meminfo.get("MemTotal", 0),
        available_bytes=meminfo.get("MemAvailable", meminfo.get("MemFree", 0)),
        oom_kill_count=int(vmstat["oom_kill"]) if "oom_kill" in vmstat else None,
        shm_total_bytes=shm.f_blocks * shm.f_frsize if shm else None,
        shm_free_bytes=shm.f_bavail * shm.f_frsize if shm else None,
    )


def _lines(roots: Roots, name: str) -> list[str]:
    try:
        return (roots.proc / name).read_text().splitlines()
    except OSError:
        return []


def _shm(roots: Roots) -> os.statvfs_result | None:
    try:
        return os.statvfs(roots.shm)
    except OSError:
        return None
