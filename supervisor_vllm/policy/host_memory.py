"""The remedies of host memory: the flag that takes it goes down by what is missing, the least loss first. Pure.

Nothing on the device was short, so no flag of the device moves; only on the CPU backend the device *is* the host.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from ..incident import Change, Plan
from ..units import gib
from . import levers
from .answer import adjust, number
from .flags import CPU_OFFLOAD, SWAP_SPACE, UTILIZATION, parse_version
from .launch_command import LaunchCommand
from .levers import Situation

_GIB = 2**30
_API_SERVERS = "--api-server-count"

#: Of what there is, this much is left free; twice as much each time it wasn't enough.
_MARGIN = 0.05
#: vLLM's own line for swap space, of all host memory (config/cache.py, to 0.17).
_LARGEST_SWAP_SPACE = 0.7
#: An API server's anonymous pages (vLLM 0.32, measured).
_API_SERVER_BYTES = int(0.42 * _GIB)
#: What the CPU backend's other processes hold, beside the worker that keeps to its share (0.32, measured: 0.8 GiB).
_CPU_BACKEND_BYTES = int(0.9 * _GIB)


@dataclass(frozen=True)
class Taker:
    """A flag, and the host bytes that one unit of it takes at most. `least`: the value below which it isn't set."""

    flag: str
    words: str
    unit_bytes: Callable[[Situation], int]
    least: float = 0.0


def _api_servers(launch: LaunchCommand) -> int:
    """As many as data-parallel engines, where it isn't said (entrypoints/cli/serve.py, 0.10 to 0.32)."""
    given = launch.get(_API_SERVERS) or launch.get("--data-parallel-size")
    return max(1, int(number(given) or 1))


def _caches(launch: LaunchCommand) -> int:
    """Each API server and each engine has its own cache of multimodal inputs (config/multimodal.py)."""
    return _api_servers(launch) + max(1, int(number(launch.get("--data-parallel-size")) or 1))


#: The least loss first. KV cache and weights in host memory take nearly twice of what is asked for: torch pins memory
#: in powers of two (vLLM #53042, 0.26: 1.92 times, on every size; #56410: 1.9 times).
_TAKERS = (
    Taker("--mm-processor-cache-gb", "cache of multimodal inputs", lambda s: _caches(s.launch) * _GIB),
    Taker(SWAP_SPACE, "swap space of the KV cache", lambda s: s.launch.local_ranks * _GIB),
    Taker("--kv-offloading-size", "KV cache in host memory", lambda s: int(1.92 * _GIB), least=1.0),
    Taker(_API_SERVERS, "API servers", lambda s: _API_SERVER_BYTES, least=1.0),
    Taker(CPU_OFFLOAD, "weights in host memory", lambda s: int(1.9 * s.launch.local_ranks * _GIB)),
)


def host_memory(s: Situation) -> Plan:
    if "swap_space_bytes" in s.numbers:
        return adjust(_allowed_swap_space(s)) or _nothing_to_give(s)
    if s.cpu_backend and "limit_bytes" in s.numbers and "host_total_bytes" in s.numbers:
        return _smaller_device(s, s.numbers["limit_bytes"], s.numbers["host_total_bytes"])
    return adjust(*_fitting(s)) or _nothing_to_give(s)


def _fitting(s: Situation) -> tuple[Change | None, ...]:
    there = _there_bytes(s)
    if there is None or "host_anonymous_bytes" not in s.numbers:
        return (next((change for taker in _TAKERS if (change := _halved(s, taker))), None),)
    if _taken_by_others(s, there):
        return ()
    asked = _asked_bytes(s)
    # what the flags don't account for: seen, or proven by the death with all of theirs
    rest = max(s.numbers["host_anonymous_bytes"], there - asked)
    missing = rest + asked - int(there * (1 - _margin(s)))
    changes = []
    for taker in _TAKERS:
        change, saved = _lowered(s, taker, missing, there)
        if change:
            changes.append(change)
            missing -= saved
    return tuple(changes)


def _there_bytes(s: Situation) -> int | None:
    """What the cgroup's limit, or the host before the start, had to give."""
    sizes = (s.numbers.get("limit_bytes"), s.numbers.get("host_available_bytes"))
    return min((size for size in sizes if size), default=None)


def _margin(s: Situation) -> float:
    return min(0.4, _MARGIN * 2.0**s.repeats)


def _taken_by_others(s: Situation, there: int) -> bool:
    """The first time, where the server held little of what there was: another program's memory is waited for."""
    if s.repeats or any(attempt.kind == s.verdict.kind for attempt in s.attempts):
        return False
    held = s.numbers["host_anonymous_bytes"] + s.numbers.get("host_shared_bytes", 0)
    tried = s.numbers.get("tried_bytes", 0)
    return bool(held + tried + _asked_bytes(s) < 0.7 * there)


def _value(s: Situation, taker: Taker) -> float | None:
    """None where the flag takes nothing: absent, or of an engine that doesn't use it."""
    if taker.flag == _API_SERVERS:
        return float(_api_servers(s.launch))
    version = parse_version(s.version)
    if taker.flag == SWAP_SPACE and version and version >= (0, 11):
        return None  # V1 has none; the flag is still read there, up to 0.17
    given = number(s.launch.get(taker.flag))
    if given is None and taker.flag == SWAP_SPACE and version and version < (0, 8):
        return 4.0  # its default on V0, pinned at the start
    return given or None


def _asked_bytes(s: Situation) -> int:
    """What the flags ask for beside the processes' own memory: API servers are a part of that."""
    takers = [taker for taker in _TAKERS if taker.flag != _API_SERVERS]
    return sum(int((_value(s, taker) or 0) * taker.unit_bytes(s)) for taker in takers)


def _lowered(s: Situation, taker: Taker, missing: int, there: int) -> tuple[Change | None, int]:
    """By what is missing, in whole units above 4, in quarters below; with the bytes that this saves."""
    value = _value(s, taker)
    if missing <= 0 or not value or value <= taker.least:
        return None, 0
    unit = taker.unit_bytes(s)
    target = value - missing / unit
    step = 1.0 if target >= 4 or taker.flag == _API_SERVERS else 0.25
    target = max(taker.least, math.floor(target / step) * step)
    saved = int((value - target) * unit)
    why = f"{taker.words}: {gib(missing)} are missing of the {gib(there)} there are"
    return levers.change(s, taker.flag, f"{target:g}", why), saved


def _halved(s: Situation, taker: Taker) -> Change | None:
    """Where nothing was measured."""
    value = _value(s, taker)
    if not value or value < max(1.0, 2 * taker.least):
        return None
    if taker.flag == _API_SERVERS:
        return levers.change(s, taker.flag, f"{value - 1:g}", "each API server takes host memory")
    why = f"{taker.words}: half of it; how much is missing isn't known"
    return levers.change(s, taker.flag, f"{math.floor(value / 2):g}", why)


def _allowed_swap_space(s: Situation) -> Change | None:
    """vLLM refuses more than 70 % of all host memory, whatever is free of it."""
    total = s.numbers.get("host_total_bytes")
    if total is None:
        return _halved(s, _TAKERS[1])
    target = math.floor(_LARGEST_SWAP_SPACE * total / _GIB / s.launch.local_ranks)
    before = number(s.launch.get(SWAP_SPACE)) or 4.0
    why = f"vLLM allows 70 % of the host's {gib(total)} for all ranks together"
    return levers.change(s, SWAP_SPACE, f"{target:g}", why) if target < before else None


def _smaller_device(s: Situation, limit: int, total: int) -> Plan:
    """vLLM's CPU backend takes its share of all the host's memory, and knows no cgroup."""
    target = (limit * (1 - _margin(s)) - _CPU_BACKEND_BYTES) / total
    target = min(target, s.utilization * (1 - _margin(s)))
    why = f"of the {gib(total)} that vLLM sees, its cgroup allows {gib(limit)}"
    lowest = s.settings.gpu_memory_utilization_min
    if target >= lowest and (plan := adjust(levers.utilization_to(s, target, why))):
        return plan
    stays = f"is pinned to {s.utilization:g}" if s.pinned(UTILIZATION) else f"may not go below {lowest:g}"
    return Plan(
        "hold",
        f"{s.verdict.summary.rstrip('.')}; {why}: {UTILIZATION} would have to be {max(0.0, target):.2f}, and {stays}; "
        "raise the memory limit, or lower the floor",
    )


def _nothing_to_give(s: Situation) -> Plan:
    summary = s.verdict.summary.rstrip(".")
    limit = s.numbers.get("limit_bytes")
    again = any(attempt.kind == s.verdict.kind and not attempt.changes for attempt in s.attempts)
    if limit and again:
        held = s.numbers.get("host_anonymous_bytes", 0) + s.numbers.get("host_shared_bytes", 0)
        seen = f" ({gib(held)} of it seen in use)" if held else ""
        return Plan(
            "hold",
            f"{summary}; the second time at the limit of {gib(limit)}{seen}, and no flag of this command takes host "
            "memory that could go down: raise the memory limit of its cgroup or container, then start it",
        )
    return Plan(
        "retry",
        f"{summary}; no flag of this command takes host memory that could go down: started again unchanged once memory "
        "is free",
    )
