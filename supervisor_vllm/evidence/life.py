"""One life of the program: what must be noted *while it lives*, because most of it is gone once it's dead.

`begin` notes the baseline, `observe` keeps the list of processes, `gather` makes the Incident of the death.
A Life is immutable and goes into the journal, so that a listener that starts in the middle of one knows it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from ..incident import KILL_TO_DEATH_SEC, CgroupMemory, GpuMemory, HostMemory, HostUse, Incident, ProcessRef
from . import cgroup, host, processes
from .kernel_log import last_sequence, read_kernel_log
from .roots import Roots
from .vllm_log import LogPosition, last_life, mark_begin, mark_end, read_life, vllm_version


@dataclass(frozen=True)
class KillCount:
    """How often the kernel had killed in the cgroup, since when (the kernel log's clock)."""

    boot_seconds: float
    count: int


@dataclass(frozen=True)
class Life:
    """`boot_seconds`: on the kernel log's clock, when the life began; `kernel_sequence`: the kernel log's newest record
    then. `log_marks`: where its log begins. `devices`: the device memory before vLLM took any. `kill_counts`: each
    rise of the cgroup's counter that was seen. All that supervisord runs may share that cgroup, and a neighbour's kill
    of last week says nothing of today's death. `host_use`: the most that was seen."""

    leader: ProcessRef
    tree: tuple[ProcessRef, ...]
    log_marks: tuple[LogPosition, ...]
    boot_seconds: float
    kernel_sequence: int | None = None
    cgroup: CgroupMemory | None = None
    kill_counts: tuple[KillCount, ...] = ()
    host: HostMemory | None = None
    host_use: HostUse = field(default_factory=HostUse)
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
        kernel_sequence=last_sequence(roots),
        cgroup=cgroup.read_cgroup(path, roots) if path else None,
        host=host.read_host(roots),
        launch_id=launch_id,
    )


def observe(life: Life, roots: Roots) -> Life:
    """The life with the processes that it has now added, those that are gone are kept (the kernel may name them), with
    its cgroup's counter, and with what it holds of the host's memory. The same life where nothing is new."""
    known = {(ref.pid, ref.start_time) for ref in life.tree}
    living = processes.process_tree(life.leader)
    new = tuple(ref for ref in living if (ref.pid, ref.start_time) not in known)
    counts = _kill_counts(life, roots)
    use = _most(life.host_use, processes.host_use(living, roots))
    if not new and counts == life.kill_counts and use == life.host_use:
        return life
    return dataclasses.replace(life, tree=life.tree + new, kill_counts=counts, host_use=use)


#: A life is written down when it holds so much more than before: 64 MiB and a twentieth.
_WORTH_NOTING_BYTES, _WORTH_NOTING = 64 * 2**20, 0.05


def _most(before: HostUse, now: HostUse) -> HostUse:
    def more(old: int, new: int) -> int:
        return new if new > old + max(_WORTH_NOTING_BYTES, _WORTH_NOTING * old) else old

    return HostUse(
        more(before.anonymous_bytes, now.anonymous_bytes),
        more(before.shared_bytes, now.shared_bytes),
    )


#: Of the rises of a counter, so many are kept.
_KILL_COUNTS = 16


def _kill_counts(life: Life, roots: Roots) -> tuple[KillCount, ...]:
    now = cgroup.read_cgroup(life.cgroup.path, roots) if life.cgroup else None
    if life.cgroup is None or now is None or now.oom_kill_count is None:
        return life.kill_counts
    last = life.kill_counts[-1].count if life.kill_counts else life.cgroup.oom_kill_count
    if now.oom_kill_count == last:
        return life.kill_counts
    return (*life.kill_counts, KillCount(processes.boot_seconds_now(), now.oom_kill_count))[-_KILL_COUNTS:]


def _cgroup_before(life: Life, died_boot_seconds: float) -> CgroupMemory | None:
    """The cgroup as the life found it, with the count of kills as it was shortly before the death."""
    old = [count for count in life.kill_counts if count.boot_seconds < died_boot_seconds - KILL_TO_DEATH_SEC]
    if life.cgroup is None or not old:
        return life.cgroup
    return dataclasses.replace(life.cgroup, oom_kill_count=old[-1].count)


def orphans(life: Life) -> tuple[ProcessRef, ...]:
    """The processes of the dead life that live on."""
    return tuple(ref for ref in life.tree if processes.alive(ref))


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
    died_sec_ago: float = 0.0,
) -> Incident:
    """Everything that can be seen of the death now, apart from the GPU (slow to ask, asked only when it matters)."""
    life = observe(life, roots)
    died_boot_seconds = processes.boot_seconds_now() - max(0.0, died_sec_ago)
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
        kernel_log=read_kernel_log(roots, life.boot_seconds, life.kernel_sequence) or (),
        in_pid_namespace=processes.in_pid_namespace(roots),
        died_boot_seconds=died_boot_seconds,
        cgroup_before=_cgroup_before(life, died_boot_seconds),
        cgroup_after=cgroup.read_cgroup(life.cgroup.path, roots) if life.cgroup else None,
        host_before=life.host,
        host_after=host.read_host(roots),
        host_use=life.host_use if life.host_use.total_bytes else None,
        gpus_before=life.devices,
        orphans=orphans(life),
        vllm_version=vllm_version(log),
        was_healthy=life.healthy,
    )
