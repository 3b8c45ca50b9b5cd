"""Processes that can be told apart: a pid is used again, a pid with its start time is not."""

from __future__ import annotations

import os
import time

import psutil

from ..incident import HostUse, ProcessRef
from .roots import Roots


def process_ref(pid: int) -> ProcessRef | None:
    """None: there is no such process (any more)."""
    try:
        process = psutil.Process(pid)
        return ProcessRef(pid, process.create_time(), process.name())
    except psutil.Error:
        return None


def same(one: ProcessRef, other: ProcessRef) -> bool:
    # create_time is boot time + clock ticks: exact to a tick, and psutil rounds it the same way each time
    return one.pid == other.pid and abs(one.start_time - other.start_time) < 0.05


def alive(ref: ProcessRef) -> bool:
    """Runs, and is the very process. A zombie holds no memory and is not alive."""
    try:
        process = psutil.Process(ref.pid)
        return same(ref, ProcessRef(ref.pid, process.create_time())) and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def process_tree(leader: ProcessRef) -> tuple[ProcessRef, ...]:
    """The leader, what descends from it, and the members of its process group, as far as they live.

    supervisord makes each program the leader of a process group. After its death the group lives on in vLLM's
    EngineCore and Workers (parent 1), and the kernel gives no new process the pid of a living group: who is in the
    group and no older than the leader is of this life.
    """
    found: dict[int, ProcessRef] = {}
    living = process_ref(leader.pid)
    if living and same(living, leader):
        found[leader.pid] = living
        found.update((child.pid, ref) for child in _children(leader.pid) if (ref := process_ref(child.pid)))
    for pid in _group_members(leader.pid):
        ref = process_ref(pid)
        if ref and ref.start_time >= leader.start_time - 0.05:
            found.setdefault(pid, ref)
    return tuple(ref for ref in found.values() if alive(ref))  # a zombie holds nothing


def _children(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []


def _group_members(pgid: int) -> list[int]:
    members = []
    for pid in psutil.pids():
        try:
            if os.getpgid(pid) == pgid:
                members.append(pid)
        except OSError:
            continue
    return members


def command_line(ref: ProcessRef) -> tuple[str, ...]:
    """Empty where it is gone or may not be looked at."""
    try:
        return tuple(psutil.Process(ref.pid).cmdline()) if alive(ref) else ()
    except psutil.Error:
        return ()


def host_use(tree: tuple[ProcessRef, ...], roots: Roots) -> HostUse:
    """By /proc/PID/status: quick, whatever they hold (smaps walks through every page, with the process's lock)."""
    held = [_status_bytes(ref.pid, roots) for ref in tree]
    anonymous = sum(fields.get("RssAnon", 0) + fields.get("VmSwap", 0) for fields in held)
    return HostUse(anonymous, max((fields.get("RssShmem", 0) for fields in held), default=0))


def _status_bytes(pid: int, roots: Roots) -> dict[str, int]:
    try:
        lines = (roots.proc / str(pid) / "status").read_text(errors="replace").splitlines()
    except OSError:
        return {}
    sizes = (line.replace(":", "").split() for line in lines if line.endswith(" kB"))
    return {words[0]: int(words[1]) * 1024 for words in sizes}


def open_pidfd(pid: int) -> int | None:
    """A descriptor that becomes readable when the process dies; None on a kernel before 5.3, or when it is gone."""
    try:
        return os.pidfd_open(pid)
    except (OSError, AttributeError):
        return None


def boot_seconds_now() -> float:
    """Now, on the clock of the kernel's log: local_clock, which stands still in sleep as CLOCK_MONOTONIC does."""
    return time.monotonic()


def boot_seconds_of(ref: ProcessRef) -> float:
    """When the process began, on the kernel log's clock."""
    return boot_seconds_now() - max(0.0, time.time() - ref.start_time)


#: include/linux/proc_ns.h, PROC_PID_INIT_INO: the namespace whose numbers the kernel's log and drivers use.
_INITIAL_PID_NAMESPACE = "pid:[4026531836]"


def in_pid_namespace(roots: Roots) -> bool:
    """Are pids numbered otherwise here than by the host (a container)? An unreadable /proc counts as such: then a pid
    proves nothing."""
    try:
        return os.readlink(roots.proc / "self/ns/pid") != _INITIAL_PID_NAMESPACE
    except OSError:
        return True
