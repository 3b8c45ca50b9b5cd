"""Proof that the host's memory ran out: a kernel record of a kill of this tree, or its cgroup's counter.

A signal alone proves nothing, and neither does the kill of a stranger.
"""

from __future__ import annotations

import dataclasses
import re
import signal
from dataclasses import dataclass
from datetime import datetime

from ..evidence.kernel_log import COMPILER_NAME, KernelKill, parse_kills
from ..incident import CgroupMemory, Evidence, Incident, LogLine, Numbers
from .process_end import end_signal

# What vLLM's processes are called: titles since 0.10.1 (cut to 15 bytes), the interpreter before.
_VLLM_NAME = re.compile(r"VLLM::|vllm|python|pt_main_thread|ray::|EngineCore|VllmWorker")
#: The dates of a kernel's log and of vLLM's may be of different zones, and neither says which.
_ANY_ZONE_SEC = 14 * 3600.0
_LOG_DATE = re.compile(r"(?<!\d)(\d\d)-(\d\d)[ T](\d\d):(\d\d):(\d\d)")
_LINES_TO_THE_DATE = 100


@dataclass(frozen=True)
class KillProof:
    """`certain`: the record names a process of this tree, or a counter of its own cgroup rose. `named`: a record that
    names a process; with `certain` false only its name speaks for it. Not named: a counter, or a word about a unit:
    somebody in it was killed, and it counts only beside an end that fits."""

    evidence: tuple[Evidence, ...]
    numbers: Numbers
    certain: bool
    named: bool
    process: str


def kill_proof(incident: Incident, own_pids: frozenset[int]) -> KillProof | None:
    kills = tuple(kill for kill in parse_kills(incident.kernel_log) if _in_time(kill, incident))
    own = next((kill for kill in kills if _is_own(kill, own_pids, incident)), None)
    if own:
        return KillProof((Evidence("kernel-log", own.text),), _limit(incident, own), True, True, own.name)
    counted = _counted(incident, kills)
    if counted and counted.certain:
        return counted
    if named := next((kill for kill in kills if not own_pids and _VLLM_NAME.match(kill.name)), None):
        return KillProof((Evidence("kernel-log", named.text),), _limit(incident, named), False, True, named.name)
    if counted or (counted := _in_unit(incident, kills) or _on_host(incident)):
        return counted
    if named := next((kill for kill in kills if COMPILER_NAME.fullmatch(kill.name)), None):
        return KillProof((Evidence("kernel-log", named.text),), _limit(incident, named), False, True, named.name)
    return None


# -- whose it was


def _is_own(kill: KernelKill, own_pids: frozenset[int], incident: Incident) -> bool:
    if kill.pid is not None and kill.pid in own_pids:
        seen = kill.pid == incident.pid or any(ref.pid == kill.pid for ref in incident.tree)
        # only the log's prefixes say the number: they are of vLLM's own processes, maybe of a container
        return seen or not kill.name or _VLLM_NAME.match(kill.name) is not None
    own = incident.cgroup_before or incident.cgroup_after
    if own is None:
        return False
    told = own.oom_kill_count is None and not incident.tree  # `explain --cgroup`: somebody who knows it names it
    if kill.whole_cgroup and kill.task_memcg is not None:
        of_all = kill.task_memcg == own.path or below(own.path, kill.task_memcg)
        return of_all or (told and below(kill.task_memcg, own.path))
    return told and below(kill.task_memcg, own.path)


def below(path: str | None, cgroup: str) -> bool:
    """Is this the cgroup, or one in it? Never the root, in which everything is."""
    cgroup = cgroup.rstrip("/")
    return bool(cgroup) and path is not None and (path == cgroup or path.startswith(cgroup + "/"))


def _in_time(kill: KernelKill, incident: Incident) -> bool:
    """Not of a time before this life, as far as dates tell. (Seconds since boot are compared where the log is read.)

    A year is left out: vLLM's dates have none. There is no later bound: an idle server writes nothing for days.
    """
    if kill.wall is None or (begun := _begun(incident.log)) is None:
        return True
    wall = dataclasses.replace(kill.wall, year=None, offset_seconds=None)
    return wall.seconds_after(begun) >= -_ANY_ZONE_SEC


def _begun(log: tuple[LogLine, ...]) -> datetime | None:
    """The first date in the log, in a year that doesn't matter."""
    for line in log[:_LINES_TO_THE_DATE]:
        if match := _LOG_DATE.search(line.text, 0, 400):
            month, day, hour, minute, second = (int(part) for part in match.groups())
            try:
                return datetime(2024, month, day, hour, minute, second)
            except ValueError:
                continue
    return None


# -- counters


def _counted(incident: Incident, kills: tuple[KernelKill, ...]) -> KillProof | None:
    """The counter that went up, unless the kernel's records say that all of it were strangers.

    A record named as vLLM names its processes is none: in a pid namespace the kernel's pids can't be compared. Of a
    cgroup that is gone, the one above it counts those beside it as well.
    """
    before, after = incident.cgroup_before, incident.cgroup_after
    if before is None or after is None or before.oom_kill_count is None or after.oom_kill_count is None:
        return None
    of_own = before.path == after.path
    if (not of_own and not _above(after.path, before.path)) or after.oom_kill_count <= before.oom_kill_count:
        return None
    inside = (kill for kill in kills if kill.pid is not None and _inside(kill, after.path))
    strangers = [kill for kill in inside if not _VLLM_NAME.match(kill.name)]
    if len(strangers) >= after.oom_kill_count - before.oom_kill_count:
        return None
    text = f"{after.path}: oom_kill went from {before.oom_kill_count} to {after.oom_kill_count}"
    if not of_own:
        text += f" ({before.path} in it is gone)"
    return KillProof((Evidence("cgroup", text),), _limit(incident, None), of_own, False, "")


def _above(path: str, cgroup: str) -> bool:
    return path != cgroup and (path == "/" or below(cgroup, path))


def _inside(kill: KernelKill, path: str) -> bool:
    """In the cgroup, for all that is known: the root of a cgroup namespace is some path of the host's."""
    if path == "/":
        return kill.killer == "kernel"
    return below(kill.task_memcg, path)


def _in_unit(incident: Incident, kills: tuple[KernelKill, ...]) -> KillProof | None:
    """systemd or containerd say that something in our unit or container was killed."""
    own = incident.cgroup_before or incident.cgroup_after
    if own is None:
        return None
    parts = own.path.split("/")
    for kill in kills:
        unit = kill.unit
        if unit and any(part == unit or (len(unit) >= 64 and unit in part) for part in parts):
            return KillProof((Evidence("kernel-log", kill.text),), _limit(incident, kill), False, False, "")
    return None


def _on_host(incident: Incident) -> KillProof | None:
    """Somebody on the host was killed, the kernel's log can't be read, nor the cgroup's counter, and it was a SIGKILL."""
    before, after = incident.host_before, incident.host_after
    own = incident.cgroup_after
    if incident.kernel_log or (own and own.oom_kill_count is not None) or before is None or after is None:
        return None
    if before.oom_kill_count is None or after.oom_kill_count is None or after.oom_kill_count <= before.oom_kill_count:
        return None
    end = end_signal(incident)
    if end is None or end.number != signal.SIGKILL:
        return None
    text = f"/proc/vmstat: oom_kill went from {before.oom_kill_count} to {after.oom_kill_count}"
    return KillProof((Evidence("host", text),), {}, False, False, "")


def _limit(incident: Incident, kill: KernelKill | None) -> Numbers:
    """The limit of the cgroup; of a kill for the whole host, none."""
    if kill and (kill.for_cgroup is False or kill.killer in ("systemd-oomd", "oomd")):
        return {}
    counters: CgroupMemory | None
    for counters in (incident.cgroup_after, incident.cgroup_before):
        if counters and counters.limit_bytes is not None:
            return {"limit_bytes": counters.limit_bytes}
    return {}
