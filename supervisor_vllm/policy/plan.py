"""Verdict → Plan: each kind's remedy, in the right direction and by the right number. Pure.

The order of the levers is vLLM's own advice and its maintainers' (docs conserving_memory; #15105, #15598): what loses
the least comes first, what changes results or speed only where the operator allows it. Where a number isn't known a
safe step is taken, and the reason says so.
"""

from __future__ import annotations

from collections.abc import Callable

from ..incident import Change, Plan, Verdict
from ..settings import Settings
from ..units import gib
from . import device_memory, levers
from .flags import UTILIZATION
from .host_memory import host_memory
from .launch_command import parse_launch, with_flag
from .levers import Attempt, Situation
from .memory_equation import Batch, Equation
from .model_shape import ModelShape

__all__ = ["Attempt", "plan_next"]


def plan_next(
    verdict: Verdict,
    command: str,
    settings: Settings,
    *,
    attempts: tuple[Attempt, ...] = (),
    waited: bool = False,
    vllm_version: str | None = None,
    shape: ModelShape | None = None,
    cpu_backend: bool = False,
) -> Plan:
    """What the next launch does differently.

    `attempts`: the deaths since the last healthy launch, oldest first, with what was changed. `waited`: a neighbour's
    memory was waited for in vain, and the verdict's free_bytes are what is free now. `shape`: the model's, where its
    config.json can be read.
    """
    launch = parse_launch(command)
    situation = Situation(verdict, launch, settings, attempts, waited, vllm_version, shape, cpu_backend)
    plan = _REMEDIES[verdict.kind](situation)
    return Plan(plan.action, plan.reason, plan.changes, _changed(command, plan.changes))


def _changed(command: str, changes: tuple[Change, ...]) -> str:
    for change in changes:
        command = with_flag(command, change.flag, change.to)
    return command


def _hold(reason: str) -> Callable[[Situation], Plan]:
    return lambda s: Plan("hold", f"{s.verdict.summary.rstrip('.')}; {reason}")


def _retry(s: Situation) -> Plan:
    return Plan("retry", f"{s.verdict.summary.rstrip('.')}; started again with unchanged arguments")


def _none(s: Situation) -> Plan:
    return Plan("none", f"{s.verdict.summary.rstrip('.')}; nothing is to be done")


# -- others' memory ----------------------------------------------------------------------------------------------------


def _neighbour(s: Situation) -> Plan:
    """First the memory is waited for; only what stays taken is given way to."""
    free, total = s.numbers.get("free_bytes"), s.total_bytes
    if free is None or not total:
        return Plan("wait", f"{s.verdict.summary.rstrip('.')}; waits for the memory, then starts again unchanged")
    on_node = any(" on node " in evidence.text for evidence in s.verdict.evidence)
    fits = free / total - (device_memory.NEIGHBOUR_MARGIN_CPU if on_node else device_memory.NEIGHBOUR_MARGIN)
    held = _holders(s)
    if fits >= s.utilization:
        return Plan("retry", f"{gib(free)} of {gib(total)} are free now: started again with unchanged arguments")
    lowest = levers.utilization_bounds(s)[0]
    change = None
    if fits >= lowest:
        why = f"{gib(free)} of {gib(total)} are free{held}"
        if fitted := device_memory.fitted_plan(s, _within(fits, why)):
            if s.waited or device_memory.can_never_fit(s):
                return fitted
            return Plan("wait", f"waits for the memory; if it stays taken, {fitted.reason}", fitted.changes)
        change = levers.utilization_to(s, fits, why)
    if change is None:
        why = f"is pinned to {s.utilization:g}" if s.pinned(UTILIZATION) else f"would have to go below {lowest:g}"
        reason = f"{gib(free)} of {gib(total)} are free{held}: {UTILIZATION} {why}"
        return Plan("hold" if s.waited else "wait", reason)
    action = f"{UTILIZATION} {change.to}: {change.why}"
    if s.waited:
        return Plan("adjust", action, (change,))
    return Plan("wait", f"waits for the memory; if it stays taken, {action}", (change,))


def _within(fits: float, why: str) -> device_memory.Target:
    """On the CPU backend the figure is that of vLLM's own check, after its other processes took theirs."""

    def target(s: Situation, terms: Equation) -> tuple[Callable[[Batch], float], str]:
        return lambda batch: fits if s.cpu_backend else min(fits, terms.highest_utilization(batch)), why

    return target


def _holders(s: Situation) -> str:
    held = [
        f"pid {holder['pid']} {holder.get('name') or ''}".rstrip()
        + (" (not visible from here)" if holder.get("elsewhere") else "")
        + (f" ({gib(holder['bytes'])}, {holder['owner']})" if holder.get("bytes") else f" ({holder['owner']})")
        for holder in s.numbers.get("holders", ())
    ]
    return f", held by {', '.join(held)}" if held else ""


def _unstable(s: Situation) -> Plan:
    return Plan("wait", f"{s.verdict.summary.rstrip('.')}; started again unchanged once the memory is quiet")


# -- what no flag cures ------------------------------------------------------------------------------------------------


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
    "gpu_weights": device_memory.weights,
    "gpu_profile": device_memory.profile,
    "gpu_warmup": device_memory.warmup,
    "gpu_kv_none": device_memory.kv_none,
    "gpu_kv_small": device_memory.kv_small,
    "gpu_kv_alloc": device_memory.kv_alloc,
    "gpu_graph": device_memory.graph,
    "gpu_runtime": device_memory.runtime,
    "gpu_neighbour": _neighbour,
    "gpu_unstable": _unstable,
    "gpu_oom": device_memory.out_of_memory,
    "host_oom_kill": host_memory,
    "host_alloc": host_memory,
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
