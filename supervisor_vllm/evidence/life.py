"""One life of the program: what must be noted *while it lives*, because most of it is gone once it's dead.

`begin` notes the baseline, `observe` keeps the list of processes, `gather` makes the Incident of the death.
A Life is immutable and goes into the journal, so that a listener that starts in the middle of one knows it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from ..incident import CgroupMemory, GpuMemory, HostMemory, Incident, ProcessRef
from . import cgroup, host, processes
from .kernel_log import read_kernel_log
from .roots import Roots
from .vllm_log import LogPosition, last_life, mark_begin, mark_end, read_life, vllm_version


@dataclass(frozen=True)
class Life:
    """`boot_seconds`: on the kernel log's clock, when the life began. `log_marks`: where its log begins.
    `devices`: the device memory before vLLM took any."""

    leader: ProcessRef
    tree: tuple[ProcessRef, ...]
    log_marks: tuple[LogPosition, ...]
    boot_seconds: float
    cgroup: CgroupMemory | None = None
    host: HostMemory | None = None
    devices: tuple[GpuMemory, ...] = ()
    launch_id: int | None = None
    healthy: bool = False


def begin(leader: ProcessRef, log_marks: tuple[LogPosition, ...], roots: Roots, *, launch_id: int | None) -> Life:
    path = cgroup.memory_cgroup_of(leader.pid, roots)
    return Life(
        leader=leader,
        tree=processes.process_tree(leader) or (leader,),
        log_marks=log_marks,
        boot_seconds=processes.boot_seconds_of(leader),
        cgroup=cgroup.read_cgroup(path, roots) if path else None,
        host=host.read_host(roots),
        launch_id=launch_id,
    )


def observe(life: Life) -> Life:
    """The life with the processes that it has now added; those that are gone are kept: the kernel may name them."""
    known = {(ref.pid, ref.start_time) for ref in life.tree}
    new = tuple(ref for ref in processes.process_tree(life.leader) if (ref.pid, ref.start_time) not in known)
    return dataclasses.replace(life, tree=life.tree + new) if new else life


def orphans(life: Life) -> tuple[ProcessRef, ...]:
    """The processes of the dead life that live on."""
    return tuple(ref for ref in observe(life).tree if processes.alive(ref))


def mark_logs(paths: tuple[str, ...], earlier: tuple[LogPosition, ...]) -> tuple[LogPosition, ...]:
    """Where the next life's log begins: the end of each file now; a file not known before counts from its start."""
    known = {mark.path for mark in earlier}
    return tuple(mark_end(path) if path in known else mark_begin(path) for path in paths)


def marks_of(paths: tuple[str, ...], marks: tuple[LogPosition, ...]) -> tuple[LogPosition, ...]:
    """The marks of these files; one that has none counts from its start."""
    known = {mark.path: mark for mark in marks}
    return tuple(known.get(path) or mark_begin(path) for path in paths)


def gather(
    life: Life,
    roots: Roots,
    *,
    program: str,
    time: str,
    command: str,
    exit_status: int | None,
    signal: str | None,
    stop_requested: bool,
) -> Incident:
    """Everything that can be seen of the death now, apart from the GPU (slow to ask, asked only when it matters)."""
    life = observe(life)
    log = last_life(list(read_life(life.log_marks)))
    return Incident(
        program=program,
        time=time,
        command=command,
        pid=life.leader.pid,
        tree=life.tree,
        exit_status=exit_status,
        signal=signal,
        stop_requested=stop_requested,
        log=log,
        kernel_log=read_kernel_log(roots, life.boot_seconds) or (),
        cgroup_before=life.cgroup,
        cgroup_after=cgroup.read_cgroup(life.cgroup.path, roots) if life.cgroup else None,
        host_before=life.host,
        host_after=host.read_host(roots),
        gpus_before=life.devices,
        orphans=orphans(life),
        vllm_version=vllm_version(log),
        was_healthy=life.healthy,
    )
