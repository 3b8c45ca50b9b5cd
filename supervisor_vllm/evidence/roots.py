"""Where the kernel's files are read from: one value handed in, so that a test lays out the kernel's own files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Roots:
    proc: Path = Path("/proc")
    cgroup: Path = Path("/sys/fs/cgroup")
    shm: Path = Path("/dev/shm")
    kmsg: Path = Path("/dev/kmsg")


ROOTS = Roots()
