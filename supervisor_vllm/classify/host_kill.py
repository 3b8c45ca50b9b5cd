"""Proof that the host's memory ran out: a kernel record of a kill of this tree, or its cgroup's counter.

A signal alone proves nothing, and neither does the kill of a stranger.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..evidence.kernel_log import KernelKill, parse_kills
from ..incident import Evidence, Incident, Numbers

# What vLLM's processes are called: titles since 0.10.1 (cut to 15 bytes), the interpreter before.
_VLLM_NAME = re.compile(r"VLLM::|vllm|python|pt_main_thread|ray::|EngineCore|VllmWorker")
# What builds its kernels at the start: FlashInfer, DeepGEMM, Triton (#54237).
_COMPILER_NAME = re.compile(r"cicc|ptxas|nvcc|cudafe\+\+|cc1plus|ninja|nvlink|fatbinary")


@dataclass(frozen=True)
class KillProof:
    """`certain`: the record names a process of this tree. Else a counter, or a name where no pid could be compared."""

    evidence: tuple[Evidence, ...]
    numbers: Numbers
    certain: bool
    named: bool
    process: str


def kill_proof(incident: Incident, own_pids: frozenset[int]) -> KillProof | None:
    kills = parse_kills(incident.kernel_log)
    own = next((kill for kill in kills if _is_own(kill, own_pids, incident)), None)
    if own:
        return KillProof((Evidence("kernel-log", own.text),), _limit(incident), True, True, own.name)
    if counted := _counted(incident, kills):
        return KillProof((counted,), _limit(incident), True, False, "")
    kills = tuple(kill for kill in kills if not _in_another_cgroup(kill, incident))
    named = next((kill for kill in kills if not own_pids and _VLLM_NAME.match(kill.name)), None)
    named = named or next((kill for kill in kills if _COMPILER_NAME.fullmatch(kill.name)), None)
    if named:
        return KillProof((Evidence("kernel-log", named.text),), _limit(incident), False, True, named.name)
    return None


def _in_another_cgroup(kill: KernelKill, incident: Incident) -> bool:
    """A root says nothing: it may be that of a cgroup namespace, which the kernel names by another path."""
    own = incident.cgroup_after or incident.cgroup_before
    if own is None or kill.task_memcg is None or not own.path.strip("/.") or ".." in own.path:
        return False
    return not below(kill.task_memcg, own.path)


def _is_own(kill: KernelKill, own_pids: frozenset[int], incident: Incident) -> bool:
    if kill.pid is not None and kill.pid in own_pids:
        return True
    own_cgroup = incident.cgroup_after or incident.cgroup_before
    if own_cgroup is None or own_cgroup.oom_kill_count is not None or incident.tree:
        return kill.pid is None and own_cgroup is not None and below(kill.task_memcg, own_cgroup.path)
    # `explain --cgroup`: somebody who knows the cgroup names it, where the pids may be those of a namespace
    return below(kill.task_memcg, own_cgroup.path)


def below(path: str | None, cgroup: str) -> bool:
    """Is this the cgroup, or one in it? Never the root, in which everything is."""
    cgroup = cgroup.rstrip("/")
    return bool(cgroup) and path is not None and (path == cgroup or path.startswith(cgroup + "/"))


def _counted(incident: Incident, kills: tuple[KernelKill, ...]) -> Evidence | None:
    """The counter that went up, unless the kernel's records say that all of it were strangers.

    A record named as vLLM names its processes is none: in a pid namespace the kernel's pids can't be compared.
    """
    before, after = incident.cgroup_before, incident.cgroup_after
    if before is None or after is None or before.oom_kill_count is None or after.oom_kill_count is None:
        return None
    if before.path != after.path or after.oom_kill_count <= before.oom_kill_count:
        return None
    inside = (kill for kill in kills if kill.pid is not None and below(kill.task_memcg, after.path))
    strangers = [kill for kill in inside if not _VLLM_NAME.match(kill.name)]
    if len(strangers) >= after.oom_kill_count - before.oom_kill_count:
        return None
    return Evidence("cgroup", f"{after.path}: oom_kill went from {before.oom_kill_count} to {after.oom_kill_count}")


def _limit(incident: Incident) -> Numbers:
    for counters in (incident.cgroup_after, incident.cgroup_before):
        if counters and counters.limit_bytes is not None:
            return {"limit_bytes": counters.limit_bytes}
    return {}
