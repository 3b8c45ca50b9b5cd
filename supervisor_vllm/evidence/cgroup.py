"""Memory cgroups, version 1 and 2: limits, use, and how often the kernel killed in them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ..incident import CgroupMemory
from .roots import Roots

#: cgroup v1 writes "no limit" as the largest page-aligned number.
_V1_UNLIMITED_BYTES = 2**60


@dataclass(frozen=True)
class CgroupKills:
    """Processes killed for memory in a cgroup: in version 2 in those below it, too."""

    path: str
    count: int


def memory_cgroup_of(pid: int, roots: Roots) -> str | None:
    """The path of the process's memory cgroup below its mount (`/system.slice/x.service`); None: unknown.

    /proc/PID/cgroup has one line a hierarchy: `4:memory:/path` (v1), `0::/path` (v2). On a hybrid host memory is where
    a v1 memory controller is named.
    """
    try:
        lines = (roots.proc / str(pid) / "cgroup").read_text().splitlines()
    except OSError:
        return None
    unified = None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return path
        if not controllers:
            unified = path
    return unified


def read_cgroup(path: str, roots: Roots) -> CgroupMemory | None:
    """None: there is no such cgroup (gone with its last process, or hidden by a cgroup namespace).

    `limit_bytes` is the tightest of its own and of those above it: each of them kills.
    """
    directory = _directory(path, roots)
    if directory is None:
        return None
    read = _read_v1 if (directory / "memory.limit_in_bytes").exists() else _read_v2
    return read(path, directory)


def first_readable(path: str, roots: Roots) -> CgroupMemory | None:
    """The cgroup, or the nearest above it that is still there (and has a counter that counts what is below it).

    A unit's cgroup goes with its last process. In version 2 the counters of those above hold its kills too; in
    version 1 each counts only its own.
    """
    if own := read_cgroup(path, roots):
        return own
    for above in ancestors(path)[1:]:
        counters = read_cgroup(above, roots)
        if counters and counters.oom_kill_count is not None and not _is_v1(above, roots):
            return counters
    return None


def kill_counts(path: str, roots: Roots) -> tuple[CgroupKills, ...]:
    """How often it was killed in this cgroup and in each above it, as far as they say; cheap."""
    counts = []
    for each in ancestors(path):
        directory = _directory(each, roots)
        if directory is not None and (count := _kill_count(directory)) is not None:
            counts.append(CgroupKills(each, count))
    return tuple(counts)


def ancestors(path: str) -> tuple[str, ...]:
    """The cgroup itself and those above it, up to the root."""
    parts = [part for part in path.split("/") if part]
    return tuple("/" + "/".join(parts[:length]) for length in range(len(parts), -1, -1))


def _directory(path: str, roots: Roots) -> Path | None:
    relative = path.lstrip("/")
    if ".." in Path(relative).parts:
        relative = ""  # outside our cgroup namespace: our own root is all that can be seen
    for base in (roots.cgroup / "memory", roots.cgroup / "unified", roots.cgroup):
        directory = base / relative
        if any((directory / name).exists() for name in ("memory.limit_in_bytes", "memory.events", "memory.stat")):
            return directory
    return None


def _is_v1(path: str, roots: Roots) -> bool:
    directory = _directory(path, roots)
    return directory is not None and (directory / "memory.limit_in_bytes").exists()


def _kill_count(directory: Path) -> int | None:
    """The kernel's kills, and those of systemd-oomd, which counts them in an attribute of the directory."""
    keyed = _keyed(directory / "memory.events") or _keyed(directory / "memory.oom_control")
    count = keyed.get("oom_kill")
    by_oomd = _oomd_kills(directory)
    return count if by_oomd is None else (count or 0) + by_oomd


def _oomd_kills(directory: Path) -> int | None:
    """systemd-oomd(8): user.oomd_kill is the number of processes that it has killed here."""
    try:
        return int(os.getxattr(directory, "user.oomd_kill"))
    except (OSError, ValueError):
        return None


def _read_v1(path: str, directory: Path) -> CgroupMemory:
    limit = _keyed(directory / "memory.stat").get("hierarchical_memory_limit")
    limit = _number(directory / "memory.limit_in_bytes") if limit is None else limit
    return CgroupMemory(
        path,
        oom_kill_count=_kill_count(directory),
        limit_bytes=None if limit is None or limit >= _V1_UNLIMITED_BYTES else limit,
        usage_bytes=_number(directory / "memory.usage_in_bytes"),
        fail_count=_number(directory / "memory.failcnt"),
    )


def _read_v2(path: str, directory: Path) -> CgroupMemory:
    events = _keyed(directory / "memory.events")
    depth = len(ancestors(path)) - 1 if ".." not in path else 0
    limits = [_number(level / "memory.max") for level in (directory, *directory.parents[:depth])]  # "max": no limit
    return CgroupMemory(
        path,
        oom_kill_count=_kill_count(directory),
        limit_bytes=min((limit for limit in limits if limit is not None), default=None),
        usage_bytes=_number(directory / "memory.current"),
        fail_count=events.get("max"),
    )


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _keyed(path: Path) -> dict[str, int]:
    """`oom_kill 3` lines."""
    try:
        pairs = (line.split() for line in path.read_text().splitlines())
        return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}
    except OSError:
        return {}
