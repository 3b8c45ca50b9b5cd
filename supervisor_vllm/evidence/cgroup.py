"""Memory cgroups, version 1 and 2: limits, use, and how often the kernel killed in them."""

from __future__ import annotations

from pathlib import Path

from ..incident import CgroupMemory
from .roots import Roots

#: cgroup v1 writes "no limit" as the largest page-aligned number.
_V1_UNLIMITED_BYTES = 2**60


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
    """None: there is no such cgroup (gone with its last process, or hidden by a cgroup namespace)."""
    directory = _directory(path, roots)
    if directory is None:
        return None
    if (directory / "memory.limit_in_bytes").exists():
        return _read_v1(path, directory)
    return _read_v2(path, directory)


def _directory(path: str, roots: Roots) -> Path | None:
    relative = path.lstrip("/")
    if ".." in Path(relative).parts:
        relative = ""  # outside our cgroup namespace: our own root is all that can be seen
    for base in (roots.cgroup / "memory", roots.cgroup / "unified", roots.cgroup):
        directory = base / relative
        if any((directory / name).exists() for name in ("memory.limit_in_bytes", "memory.events", "memory.stat")):
            return directory
    return None


def _read_v1(path: str, directory: Path) -> CgroupMemory:
    stat = _keyed(directory / "memory.stat")
    limit = stat.get("hierarchical_memory_limit", _number(directory / "memory.limit_in_bytes"))
    return CgroupMemory(
        path,
        oom_kill_count=_keyed(directory / "memory.oom_control").get("oom_kill"),
        limit_bytes=None if limit is None or limit >= _V1_UNLIMITED_BYTES else limit,
        usage_bytes=_number(directory / "memory.usage_in_bytes"),
        fail_count=_number(directory / "memory.failcnt"),
        held_bytes=_sum(stat, "total_rss", "total_shmem"),
    )


def _read_v2(path: str, directory: Path) -> CgroupMemory:
    events = _keyed(directory / "memory.events")
    return CgroupMemory(
        path,
        oom_kill_count=events.get("oom_kill"),
        limit_bytes=_lowest_limit(directory),
        usage_bytes=_number(directory / "memory.current"),
        fail_count=events.get("max"),
        held_bytes=_sum(_keyed(directory / "memory.stat"), "anon", "shmem"),
    )


def _lowest_limit(directory: Path) -> int | None:
    """Of a cgroup of version 2 and those above it. "max" is no number: no limit."""
    limits = []
    while (directory / "memory.max").exists():
        limits.append(_number(directory / "memory.max"))
        directory = directory.parent
    return min((limit for limit in limits if limit is not None), default=None)


def _sum(stat: dict[str, int], *names: str) -> int | None:
    return sum(stat.get(name, 0) for name in names) if names[0] in stat else None


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
