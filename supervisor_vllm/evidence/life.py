"""One life of the program: what must be noted *while it lives*, because most of it is gone once it's dead.

`begin` notes the baseline, `observe` keeps the list of processes, `gather` makes the Incident of the death.
A Life is immutable and goes into the journal, so that a listener that starts in the middle of one knows it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from ..incident import CgroupMemory, GpuMemory, HostMemory, Incident, ProcessRef
from . import cgroup, host, namespaces, processes
from .cgroup import CgroupKills
from .kernel_log import concerning, last_sequence, parse_kills, read_kernel_log
from .roots import ROOTS, Roots
from .vllm_log import LogPosition, last_life, mark_begin, mark_end, read_life, vllm_version


#: A counter that rose longer ago has nothing to do with a death: vLLM survives the kill of a neighbour in its cgroup,
#: and of a compiler of its own; of its engine's, it doesn't for long.
KILL_IS_NEAR_SEC = 900.0


@dataclass(frozen=True)
class NotedKills:
    """The counters of kills as they stood at a time: of the cgroup and those above it, and the host's."""

    boot_seconds: float
    cgroups: tuple[CgroupKills, ...] = ()
    host: int | None = None


@dataclass(frozen=True)
class Life:
    """`boot_seconds`: on the kernel log's clock, when the life began. `log_marks`: where its log begins.
    `devices`: the device memory before vLLM took any. `noted_kills`: oldest first; the first is from before the time in
    which a kill counts. `kernel_sequence`: the newest record of the kernel's log when the life was first seen."""

    leader: ProcessRef
    tree: tuple[ProcessRef, ...]
    log_marks: tuple[LogPosition, ...]
    boot_seconds: float
    cgroup: CgroupMemory | None = None
    host: HostMemory | None = None
    devices: tuple[GpuMemory, ...] = ()
    launch_id: int | None = None
    healthy: bool = False
    noted_kills: tuple[NotedKills, ...] = ()
    kernel_sequence: int | None = None


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
        noted_kills=(_note_kills(path, roots),),
        kernel_sequence=last_sequence(roots),
    )


def observe(life: Life, roots: Roots = ROOTS) -> Life:
    """The life with the processes that it has now added; those that are gone are kept: the kernel may name them. The
    counters of kills are noted where they have changed."""
    known = {(ref.pid, ref.start_time) for ref in life.tree}
    new = tuple(ref for ref in processes.process_tree(life.leader) if (ref.pid, ref.start_time) not in known)
    noted = _noted_now(life, roots)
    if not new and noted == life.noted_kills:
        return life
    return dataclasses.replace(life, tree=life.tree + new, noted_kills=noted)


def _note_kills(path: str | None, roots: Roots) -> NotedKills:
    counts = cgroup.kill_counts(path, roots) if path else ()
    return NotedKills(processes.boot_seconds_now(), counts, host.oom_kills(roots))


def _noted_now(life: Life, roots: Roots) -> tuple[NotedKills, ...]:
    if not life.noted_kills:
        return ()
    noted = life.noted_kills
    now = _note_kills(life.cgroup.path if life.cgroup else None, roots)
    if (now.cgroups, now.host) != (noted[-1].cgroups, noted[-1].host):
        noted = (*noted, now)
    near = now.boot_seconds - KILL_IS_NEAR_SEC
    while len(noted) > 1 and noted[1].boot_seconds <= near:
        noted = noted[1:]
    return noted


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
    life = observe(life, roots)
    log = last_life(list(read_life(life.log_marks)))
    kernel_log = _kernel_log(life, roots)
    before, after = _cgroup_counters(life, roots, kernel_log)
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
        kernel_log=kernel_log,
        cgroup_before=before,
        cgroup_after=after,
        host_before=_host_before(life),
        host_after=host.read_host(roots),
        gpus_before=life.devices,
        orphans=orphans(life),
        vllm_version=vllm_version(log),
        was_healthy=life.healthy,
    )


def _kernel_log(life: Life, roots: Roots) -> tuple[str, ...]:
    """What the kernel said in this life. Where its pids aren't those that are seen here, only of kills in this very
    container: the pid of a stranger elsewhere on the host may be the number of one of ours.

    The log's clock drifts (up to 0.01 % seen), and a process's start is known to a second or so.
    """
    since = life.boot_seconds - 2.0 - processes.boot_seconds_now() * 1e-4
    lines = read_kernel_log(roots, since, life.kernel_sequence) or ()
    if namespaces.host_pids(roots):
        return lines
    path = life.cgroup.path if life.cgroup else ""
    return concerning(lines, path, namespaces.container_names(roots))


def _cgroup_counters(
    life: Life, roots: Roots, kernel_log: tuple[str, ...]
) -> tuple[CgroupMemory | None, CgroupMemory | None]:
    """The cgroup before the kills that may count, and after. Of one that is gone: the nearest above it, by its path.

    The kernel's log may say that some of the kills in it were others': these are counted as if they had been before.
    """
    if life.cgroup is None:
        return None, None
    after = cgroup.first_readable(life.cgroup.path, roots)
    if after is None:
        return life.cgroup, None
    before = life.cgroup
    if life.noted_kills:
        counts = {noted.path: noted.count for noted in life.noted_kills[0].cgroups}
        before = dataclasses.replace(before, oom_kill_count=counts.get(after.path))
    elif after.path != before.path:
        before = dataclasses.replace(before, oom_kill_count=None)
    if before.oom_kill_count is not None and namespaces.host_pids(roots):
        near = processes.boot_seconds_now() - KILL_IS_NEAR_SEC
        others = _others_kills(life, kernel_log, after.path, near)
        before = dataclasses.replace(before, oom_kill_count=before.oom_kill_count + others)
    return before, after


def _others_kills(life: Life, kernel_log: tuple[str, ...], path: str, since_boot_seconds: float) -> int:
    """The kernel's records of kills in the cgroup, of processes that aren't of this life."""
    own = {ref.pid for ref in life.tree} | {life.leader.pid}
    inside = path.rstrip("/") + "/"
    return sum(
        kill.killer == "kernel"
        and kill.pid is not None
        and kill.pid not in own
        and (kill.boot_seconds is None or kill.boot_seconds >= since_boot_seconds)
        and (kill.task_memcg is None or f"{kill.task_memcg}/".startswith(inside))
        for kill in parse_kills(kernel_log)
    )


def _host_before(life: Life) -> HostMemory | None:
    if life.host is None or not life.noted_kills:
        return life.host
    return dataclasses.replace(life.host, oom_kill_count=life.noted_kills[0].host)
