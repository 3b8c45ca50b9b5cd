"""Whether the host's memory ran out: the kernel's record of a kill of this tree, or a kill in its cgroup.

A signal alone proves nothing, and neither does the kill of a stranger, nor one of long ago.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Literal

from ..evidence.kernel_log import KernelKill, parse_kills
from ..evidence.kernel_stamp import WallTime
from ..evidence.log_dates import Period, period_of
from ..incident import KILL_TO_DEATH_SEC, CgroupMemory, Evidence, Incident, Numbers

# What vLLM's processes are called: titles since 0.10.1 (cut to 15 bytes), the interpreter before.
_VLLM_NAME = re.compile(r"VLLM::|vllm|python|pt_main_thread|ray::|EngineCore|VllmWorker")
# What builds its kernels at the start: FlashInfer, DeepGEMM, Triton (#54237).
_COMPILER_NAME = re.compile(r"cicc|ptxas|nvcc|cudafe\+\+|cc1plus|ninja|nvlink|fatbinary")
#: Logs of two machines or containers may be of any two zones (UTC-12 to UTC+14 in the end).
_ZONES_SEC = 26 * 3600.0
#: The kill of a process is written down before its end is seen.
_CLOCK_DRIFT_SEC = 60.0


@dataclass(frozen=True)
class KillProof:
    """A kill for memory, and whose. `victim`: a process of this tree, so that it is the reason whatever the log says.
    `cgroup`: one in this server's cgroup; `hint`: one that is known by its name or its unit only. These two explain an
    end of which nothing else says why."""

    strength: Literal["victim", "cgroup", "hint"]
    evidence: tuple[Evidence, ...]
    numbers: Numbers
    process: str = ""


def kill_proof(incident: Incident, own_pids: frozenset[int]) -> KillProof | None:
    kills = _kills_near_the_death(incident)
    if victim := next((kill for kill in kills if _is_victim(kill, own_pids, incident)), None):
        return _proof("victim", Evidence("kernel-log", victim.text), incident, victim.name)
    if in_cgroup := next((kill for kill in kills if _is_in_named_cgroup(kill, incident)), None):
        return _proof("cgroup", Evidence("kernel-log", in_cgroup.text), incident, in_cgroup.name)
    if counted := _counted(incident, kills, own_pids):
        return _proof("cgroup", counted, incident)
    if hint := next(_hints(kills, own_pids, incident), None):
        return _proof("hint", Evidence("kernel-log", hint.text), incident, hint.name)
    return None


def _proof(
    strength: Literal["victim", "cgroup", "hint"], evidence: Evidence, incident: Incident, process: str = ""
) -> KillProof:
    return KillProof(strength, (evidence,), _limit(incident), process)


def _kills_near_the_death(incident: Incident) -> tuple[KernelKill, ...]:
    """By the clock of the kernel's log where the death's time on it is known, else by the dates in both logs."""
    kills = parse_kills(incident.kernel_log)
    died = incident.died_boot_seconds
    years = [kill.wall.year for kill in kills if kill.wall and kill.wall.year]
    year = years[-1] if years else datetime.fromisoformat(incident.time).year
    period = period_of(incident.log, year=year) if any(kill.wall for kill in kills) else None

    def is_near(kill: KernelKill) -> bool:
        if kill.boot_seconds is not None and died is not None:
            return -_CLOCK_DRIFT_SEC <= died - kill.boot_seconds <= KILL_TO_DEATH_SEC
        return period is None or kill.wall is None or _is_within(kill.wall, period)

    return tuple(kill for kill in kills if is_near(kill))


def _is_within(wall: WallTime, period: Period) -> bool:
    wall = wall if period.year_is_known else replace(wall, year=None)
    return wall.seconds_after(period.first) >= -_ZONES_SEC and wall.seconds_after(period.last) <= _ZONES_SEC


def _is_victim(kill: KernelKill, own_pids: frozenset[int], incident: Incident) -> bool:
    """Its pid is one of ours, or all of a cgroup was killed in which ours is."""
    own = _own_cgroup(incident)
    if kill.pid is None:
        return (
            kill.whole_cgroup and own is not None and (kill.task_memcg == own.path or below(own.path, kill.task_memcg))
        )
    if kill.pid not in own_pids or incident.in_pid_namespace:
        return False
    seen = kill.pid == incident.pid or any(ref.pid == kill.pid for ref in incident.tree)
    # a pid that only a log names may be of another namespace, and small ones are those of the host's daemons
    return seen or bool(_VLLM_NAME.match(kill.name))


def _is_in_named_cgroup(kill: KernelKill, incident: Incident) -> bool:
    """`explain --cgroup`: somebody who knows the cgroup names it; where no process was seen, the pids may be those of a
    namespace. A cgroup inside of ours that was killed as a whole counts, too."""
    own = _own_cgroup(incident)
    if own is None or not below(kill.task_memcg, own.path):
        return False
    if kill.pid is None:
        return kill.whole_cgroup
    return own.oom_kill_count is None and not incident.tree


def _own_cgroup(incident: Incident) -> CgroupMemory | None:
    return incident.cgroup_after or incident.cgroup_before


def below(path: str | None, cgroup: str | None) -> bool:
    """Is this the cgroup, or one in it? Never the root, in which everything is."""
    cgroup = (cgroup or "").rstrip("/")
    return bool(cgroup) and path is not None and (path == cgroup or path.startswith(cgroup + "/"))


def _counted(incident: Incident, kills: tuple[KernelKill, ...], own_pids: frozenset[int]) -> Evidence | None:
    """The counter that went up, by more than the kernel's records of strangers account for."""
    before, after = incident.cgroup_before, incident.cgroup_after
    if before is None or after is None or before.oom_kill_count is None or after.oom_kill_count is None:
        return None
    if before.path != after.path or after.oom_kill_count <= before.oom_kill_count:
        return None
    strangers = {kill.pid for kill in kills if _is_strangers(kill, own_pids, incident)}
    if len(strangers) >= after.oom_kill_count - before.oom_kill_count:
        return None
    return Evidence("cgroup", f"{after.path}: oom_kill went from {before.oom_kill_count} to {after.oom_kill_count}")


def _is_strangers(kill: KernelKill, own_pids: frozenset[int], incident: Incident) -> bool:
    """It may have counted in our cgroup and wasn't ours. Where pids can't be compared, only another name says so."""
    if kill.pid is None or _in_another_cgroup(kill, incident):
        return False
    if incident.in_pid_namespace or not incident.tree:
        return not _VLLM_NAME.match(kill.name)
    return kill.pid not in own_pids


def _hints(kills: tuple[KernelKill, ...], own_pids: frozenset[int], incident: Incident) -> Iterator[KernelKill]:
    near = [kill for kill in kills if not _in_another_cgroup(kill, incident)]
    if not own_pids or incident.in_pid_namespace:
        yield from (kill for kill in near if kill.pid is not None and _VLLM_NAME.match(kill.name))
    yield from (kill for kill in near if _COMPILER_NAME.fullmatch(kill.name))
    if not any(kill.pid is not None for kill in near):  # else it's that kill of which systemd speaks
        yield from (kill for kill in near if _is_of_own_unit(kill, incident))


def _is_of_own_unit(kill: KernelKill, incident: Incident) -> bool:
    """The systemd unit, or the container, by whose name our cgroup is called."""
    own = _own_cgroup(incident)
    if own is None or kill.unit is None:
        return False
    container = len(kill.unit) >= 12 and "." not in kill.unit
    return any(part == kill.unit or (container and kill.unit in part) for part in own.path.split("/"))


def _in_another_cgroup(kill: KernelKill, incident: Incident) -> bool:
    """A root says nothing: it may be that of a cgroup namespace, which the kernel names by another path."""
    own = _own_cgroup(incident)
    if own is None or kill.task_memcg is None or not own.path.strip("/.") or ".." in own.path:
        return False
    return not below(kill.task_memcg, own.path)


def _limit(incident: Incident) -> Numbers:
    for counters in (incident.cgroup_after, incident.cgroup_before):
        if counters and counters.limit_bytes is not None:
            return {"limit_bytes": counters.limit_bytes}
    return {}
