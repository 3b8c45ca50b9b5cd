"""Verdict → Plan: each kind's remedy, in the right direction and by the right number. Pure.

The order of the levers is vLLM's own advice and its maintainers' (docs conserving_memory; #15105, #15598): what loses
the least comes first, what changes results or speed only where the operator allows it. Where a number isn't known a
safe step is taken, and the reason says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from ..incident import Change, Plan, Verdict
from ..settings import Settings
from ..units import gib
from . import levers
from .flags import CPU_OFFLOAD, SWAP_SPACE, UTILIZATION, offload_works
from .launch_command import parse_launch, with_flag
from .levers import Attempt, Situation

__all__ = ["Attempt", "plan_next"]

#: Where nothing says how much is missing: 5 % of the device, and twice that each time it wasn't enough.
SAFE_STEP = 0.05
#: On top of a deficit that is known: allocations that come after the one that failed.
MARGIN = 0.02
#: Over what vLLM's start check wants to find free. On its CPU backend the starting server moves the figure itself.
NEIGHBOUR_MARGIN, NEIGHBOUR_MARGIN_CPU = 0.01, 0.02


def plan_next(
    verdict: Verdict,
    command: str,
    settings: Settings,
    *,
    attempts: tuple[Attempt, ...] = (),
    waited: bool = False,
    vllm_version: str | None = None,
) -> Plan:
    """What the next launch does differently.

    `attempts`: the deaths since the last healthy launch, oldest first, with what was changed. `waited`: a neighbour's
    memory was waited for in vain, and the verdict's free_bytes are what is free now.
    """
    situation = Situation(verdict, parse_launch(command), settings, attempts, waited, vllm_version)
    plan = _REMEDIES[verdict.kind](situation)
    return Plan(plan.action, plan.reason, plan.changes, _changed(command, plan.changes))


def _changed(command: str, changes: tuple[Change, ...]) -> str:
    for change in changes:
        command = with_flag(command, change.flag, change.to)
    return command


def _adjust(*changes: Change | None) -> Plan | None:
    """A plan of those levers that move; None where none does."""
    moved = tuple(change for change in changes if change is not None)
    if not moved:
        return None
    return Plan("adjust", "; ".join(f"{change.flag} {change.to}: {change.why}" for change in moved), moved)


def _first(s: Situation, *plans: Plan | None) -> Plan:
    """The first remedy that there is, else a person must act."""
    return next((plan for plan in plans if plan), _exhausted(s))


def _exhausted(s: Situation) -> Plan:
    pins = f"; pinned: {', '.join(s.settings.pin)}" if s.settings.pin else ""
    return Plan(
        "hold",
        f"{s.verdict.summary.rstrip('.')}; every flag that could help is at its floor, its ceiling or pinned{pins}: "
        "use a larger device, a smaller or quantised model, or more tensor parallelism",
    )


def _hold(reason: str) -> Callable[[Situation], Plan]:
    return lambda s: Plan("hold", f"{s.verdict.summary.rstrip('.')}; {reason}")


def _retry(s: Situation) -> Plan:
    return Plan("retry", f"{s.verdict.summary.rstrip('.')}; started again with unchanged arguments")


def _none(s: Situation) -> Plan:
    return Plan("none", f"{s.verdict.summary.rstrip('.')}; nothing is to be done")


# -- the KV cache ------------------------------------------------------------------------------------------------------


def _kv_small(s: Situation) -> Plan:
    shorter = _adjust(_shorter(s))
    if s.settings.prefer == "context":
        return _first(s, _adjust(_more_for_kv(s)), shorter)
    return _first(s, shorter, _adjust(_more_for_kv(s)), _more_for_kv_blocks(s))


def _shorter(s: Situation) -> Change | None:
    """vLLM's own estimate passes its own check as it stands (0.32 v1/core/kv_cache_utils.py searches for the longest
    length that fits); the second time the cache has shrunk a little in between, so a little less."""
    estimate = s.numbers.get("estimated_max_model_len")
    if estimate:
        target = int(estimate) if not s.repeats else int(estimate * 0.98) // 16 * 16
        return levers.length_to(s, target, f"vLLM's own estimate of what fits is {estimate}")
    needed, available = s.numbers.get("kv_needed_bytes"), s.numbers.get("kv_available_bytes")
    length = s.launch.max_model_len or s.numbers.get("max_model_len")
    if not length:
        return None
    if needed and available and available > 0:
        # printed with two decimals: 1 % less, in whole blocks
        target = int(length * available / needed * 0.99) // 16 * 16
        return levers.length_to(s, target, f"{gib(available)} of the {gib(needed)} that {length} tokens need are there")
    return levers.length_to(s, length // 2 // 16 * 16, "half: vLLM doesn't say how much fits (safe step)")


def _more_for_kv(s: Situation) -> Change | None:
    needed, available = s.numbers.get("kv_needed_bytes"), s.numbers.get("kv_available_bytes")
    if not needed or available is None or not s.total_bytes:
        return None
    missing = (needed - available) / s.total_bytes
    target = s.utilization + missing + levers.STEP
    if target > _ceiling(s):
        return None
    return levers.utilization_to(s, target, f"{gib(needed - available)} more for the KV cache of one request")


def _kv_none(s: Situation) -> Plan:
    return _first(s, _adjust(_as_much_as_is_free(s)), _more_for_kv_blocks(s))


def _as_much_as_is_free(s: Situation) -> Change | None:
    """Up, not down: the budget is what is too small. As far as memory is free and the ceiling allows."""
    at_least = s.numbers.get("utilization_min")
    if at_least and at_least + 0.05 <= _ceiling(s):
        why = f"vLLM needs more than {at_least:g} before anything is left for the KV cache"
        return levers.utilization_to(s, max(at_least + 0.05, s.utilization + 0.05), why)
    target = _ceiling(s)
    if target < s.utilization + levers.STEP:
        return None
    return levers.utilization_to(s, target, "nothing was left for the KV cache: up as far as memory is free")


def _ceiling(s: Situation) -> float:
    """The settings' maximum, or what is measured as free, less the margin of the start check."""
    highest = levers.utilization_bounds(s)[1]
    free = s.numbers.get("free_bytes")
    if free and s.total_bytes:
        highest = min(highest, free / s.total_bytes - NEIGHBOUR_MARGIN)
    return highest


def _more_for_kv_blocks(s: Situation) -> Plan | None:
    """Smaller batches leave more of the same budget."""
    return (
        _adjust(*levers.tokens_to(s, s.tokens // 2, "smaller batches need less, and leave more for the KV cache"))
        or _adjust(levers.seqs_to(s, s.seqs // 2, "fewer sequences need less, and leave more for the KV cache"))
        or _adjust(levers.eager(s, "no CUDA graphs: their memory goes to the KV cache"))
    )


# -- out of device memory ----------------------------------------------------------------------------------------------


def _less_utilization(s: Situation) -> Change | None:
    """Down by what was missing and a margin, so that so much more stays outside vLLM's budget."""
    tried, free, total = s.numbers.get("tried_bytes"), s.numbers.get("free_bytes"), s.total_bytes
    step, why = SAFE_STEP * 2**s.repeats, "what is missing isn't known: a safe step"
    if tried and free is not None and total and tried >= total * levers.STEP:
        step = max((tried - free) / total, 0.0) + MARGIN * 2**s.repeats
        why = f"{gib(max(tried - free, 0))} were missing, and a margin"
    available = s.numbers.get("kv_available_bytes")
    if available and total and available < step * total * 1.1:
        return None  # it would leave nothing for the KV cache
    return levers.utilization_to(s, s.utilization - step, why)


def _half_tokens(s: Situation) -> Plan | None:
    return _adjust(*levers.tokens_to(s, s.tokens // 2, "activations grow with the tokens of a batch: half of them"))


def _profile(s: Situation) -> Plan:
    return _absurd(s) or _first(s, _half_tokens(s), _adjust(_half_seqs(s)), _adjust(_less_utilization(s)))


def _half_seqs(s: Situation) -> Change | None:
    return levers.seqs_to(s, s.seqs // 2, "less memory with fewer sequences: half of them")


def _warmup(s: Situation) -> Plan:
    blocks = s.numbers.get("mamba_blocks")
    if blocks:
        return _first(s, _adjust(levers.seqs_to(s, int(blocks), f"there are {blocks} Mamba cache blocks")))
    quarter = levers.seqs_to(s, s.seqs // 4, f"the warm-up with {s.seqs} requests failed: a quarter of them")
    return _first(s, _adjust(quarter), _adjust(_less_utilization(s)))


def _graph(s: Situation) -> Plan:
    return _absurd(s) or _first(
        s,
        _adjust(_less_utilization(s)),
        _adjust(levers.capture_size_to(s, 64, "fewer and smaller CUDA graphs")),
        _adjust(levers.eager(s, "no CUDA graphs")),
        _adjust(_half_seqs(s)),
    )


def _runtime(s: Situation) -> Plan:
    return _absurd(s) or _first(s, _adjust(_less_utilization(s)), _half_tokens(s), _adjust(_half_seqs(s)))


def _oom(s: Situation) -> Plan:
    return _absurd(s) or _first(s, _adjust(_less_utilization(s)), _half_tokens(s))


def _kv_alloc(s: Situation) -> Plan:
    return _first(s, _adjust(_less_utilization(s)))


def _absurd(s: Situation) -> Plan | None:
    """More in one piece than the device has: a wrong kernel or an absurd batch; no launch is worth it."""
    tried = s.numbers.get("tried_bytes")
    if not tried or not s.total_bytes or tried <= s.total_bytes:
        return None
    return Plan(
        "hold", f"it asked for {gib(tried)} at once and the device has {gib(s.total_bytes)}: no memory flag can help"
    )


def _weights(s: Situation) -> Plan:
    total, tried, free = s.total_bytes, s.numbers.get("tried_bytes"), s.numbers.get("free_bytes")
    if "cpu_offload" in s.settings.allow and offload_works(s.version) and s.repeats < 3:
        missing = max((tried or 0) - (free or 0), int((total or 0) * 0.1))
        given = _float(s.launch.get(CPU_OFFLOAD)) or 0.0
        target = f"{math.ceil(given + max(1.0, missing / 2**30))}"
        offloaded = _adjust(levers.change(s, CPU_OFFLOAD, target, "weights that don't fit go to host memory (allowed)"))
        if offloaded:
            return offloaded
    return Plan(
        "hold",
        f"{s.verdict.summary.rstrip('.')}; no memory flag helps: a larger --tensor-parallel-size, a quantised "
        "checkpoint or a larger device does",
    )


# -- others' memory ----------------------------------------------------------------------------------------------------


def _neighbour(s: Situation) -> Plan:
    """First the memory is waited for; only what stays taken is given way to."""
    free, total = s.numbers.get("free_bytes"), s.total_bytes
    if free is None or not total:
        return Plan("wait", f"{s.verdict.summary.rstrip('.')}; waits for the memory, then starts again unchanged")
    cpu_backend = any(" on node " in evidence.text for evidence in s.verdict.evidence)
    fits = free / total - (NEIGHBOUR_MARGIN_CPU if cpu_backend else NEIGHBOUR_MARGIN)
    held = _holders(s)
    if fits >= s.utilization:
        return Plan("retry", f"{gib(free)} of {gib(total)} are free now: started again with unchanged arguments")
    lowest = levers.utilization_bounds(s)[0]
    change = None
    if fits >= lowest:
        change = levers.utilization_to(s, fits, f"{gib(free)} of {gib(total)} are free{held}")
    if change is None:
        why = f"is pinned to {s.utilization:g}" if s.pinned(UTILIZATION) else f"would have to go below {lowest:g}"
        reason = f"{gib(free)} of {gib(total)} are free{held}: {UTILIZATION} {why}"
        return Plan("hold" if s.waited else "wait", reason)
    action = f"{UTILIZATION} {change.to}: {change.why}"
    if s.waited:
        return Plan("adjust", action, (change,))
    return Plan("wait", f"waits for the memory; if it stays taken, {action}", (change,))


def _holders(s: Situation) -> str:
    held = [
        f"pid {holder['pid']} {holder.get('name') or ''}".rstrip()
        + (f" ({gib(holder['bytes'])}, {holder['owner']})" if holder.get("bytes") else f" ({holder['owner']})")
        for holder in s.numbers.get("holders", ())
    ]
    return f", held by {', '.join(held)}" if held else ""


def _unstable(s: Situation) -> Plan:
    return Plan("wait", f"{s.verdict.summary.rstrip('.')}; started again unchanged once the memory is quiet")


# -- host memory -------------------------------------------------------------------------------------------------------


def _host(s: Situation) -> Plan:
    """Host-side flags only: nothing on the device was short. The one that is set and takes host memory goes down."""
    for flag, words in (
        (SWAP_SPACE, "swap space of the KV cache"),
        (CPU_OFFLOAD, "weights in host memory"),
        ("--kv-offloading-size", "KV cache in host memory"),
        ("--mm-processor-cache-gb", "cache of the multimodal processor"),
    ):
        given = _float(s.launch.get(flag))
        if given and given >= 1:
            plan = _adjust(levers.change(s, flag, f"{math.floor(given / 2):g}", f"{words}: half of it"))
            if plan:
                return plan
    count = s.launch.get("--api-server-count") or ""
    if count.isdigit() and int(count) > 1:
        fewer = levers.change(s, "--api-server-count", str(int(count) - 1), "each API server takes host memory")
        plan = _adjust(fewer)
        if plan:
            return plan
    return Plan(
        "retry",
        f"{s.verdict.summary.rstrip('.')}; no flag of this command takes host memory that could go down: started again "
        "unchanged once memory is free",
    )


def _float(text: str | None) -> float | None:
    try:
        return float(text) if text else None
    except ValueError:
        return None


def _shm(s: Situation) -> Plan:
    required, free = s.numbers.get("shm_required_bytes"), s.numbers.get("shm_free_bytes")
    figures = f" ({gib(required)} required, {gib(free)} free)" if required and free is not None else ""
    return Plan(
        "hold",
        f"/dev/shm is full{figures}: enlarge it (mount -o remount,size=… /dev/shm; in a container --shm-size)",
    )


def _port(s: Situation) -> Plan:
    """Often it's our own dead server's orphan, which is ended before a launch. If it stays, it's somebody else's."""
    port = s.launch.port
    if not any(attempt.kind == "port_in_use" for attempt in s.attempts):
        return Plan("retry", f"port {port} was taken: started again, after what the dead server left behind has ended")
    return Plan("hold", f"port {port} is taken by another program: free it, or give --port another number")


_REMEDIES: dict[str, Callable[[Situation], Plan]] = {
    "gpu_weights": _weights,
    "gpu_profile": _profile,
    "gpu_warmup": _warmup,
    "gpu_kv_none": _kv_none,
    "gpu_kv_small": _kv_small,
    "gpu_kv_alloc": _kv_alloc,
    "gpu_graph": _graph,
    "gpu_runtime": _runtime,
    "gpu_neighbour": _neighbour,
    "gpu_unstable": _unstable,
    "gpu_oom": _oom,
    "host_oom_kill": _host,
    "host_alloc": _host,
    "shm_full": _shm,
    "port_in_use": _port,
    "bad_arguments": _hold("mend the command in your program section, then: supervisorctl update"),
    "bad_model": _hold("mend the model directory or its name, then start it"),
    "gpu_unavailable": _hold("look at nvidia-smi, the driver and CUDA_VISIBLE_DEVICES, then start it"),
    "gpu_fault": _hold("the device needs a reset or a technician (dmesg, nvidia-smi -q), then start it"),
    "engine_crash": _retry,
    "hung": _retry,
    "killed": _retry,
    "stopped": _none,
    "exited": _none,
    "unknown": _retry,
}
