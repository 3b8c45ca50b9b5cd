"""The remedies of device memory: by vLLM's equation where its terms are known, else by safe steps. Pure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from ..incident import Change, Plan
from ..units import gib
from . import levers
from .answer import adjust, first, number
from .fit import asked_length, equation_of, least_loss, nothing_fits, request_bytes, smallest_useful_request, too_large
from .flags import CPU_OFFLOAD, UTILIZATION, offload_works
from .levers import Situation
from .memory_equation import SMALLEST_MARGIN, Batch, Equation

#: Where nothing says how much is missing: 5 % of the device, and twice that each time it wasn't enough.
SAFE_STEP = 0.05
#: Where the equation knows all other terms, what a server takes beside them is less than that.
SERVING_STEP = 0.03
#: But of the KV cache no more than this at first.
STEP_OF_CACHE = 0.15
#: On top of a deficit that is known: allocations that come after the one that failed.
MARGIN = 0.02
#: Over what vLLM's start check wants to find free. On its CPU backend the starting server moves the figure itself.
NEIGHBOUR_MARGIN, NEIGHBOUR_MARGIN_CPU = 0.01, 0.02


# -- by vLLM's equation ------------------------------------------------------------------------------------------------


Target = Callable[[Situation, Equation], tuple[Callable[[Batch], float], str]]


def fitted_plan(
    s: Situation, target: Target, learn: Callable[[Equation], Equation] = lambda terms: terms
) -> Plan | None:
    """What makes it fit by the equation; None: the numbers aren't known, or nothing fits."""
    terms = equation_of(s)
    if terms is None:
        return None
    if reason := can_never_fit(s):
        return Plan("hold", reason)
    changes = None
    for margin in (terms.serving_margin, SMALLEST_MARGIN):
        terms = dataclasses.replace(terms if learn is None else learn(terms), margin=margin)
        changes = changes or least_loss(s, terms, *target(s, terms))
    # where the activations are only estimated, one launch may prove the estimate wrong
    if changes is None and (terms.is_measured or ("weights" in terms.measured and s.repeats)):
        return Plan("hold", f"{s.verdict.summary.rstrip('.')}; {nothing_fits(s, terms)}")
    return adjust(*changes) if changes else None


def can_never_fit(s: Situation) -> str | None:
    """The arithmetic where the weights alone are larger than the device, whoever else uses it."""
    terms = equation_of(s)
    return too_large(terms, s.shape) if terms else None


def if_adjusts(plan: Plan | None) -> Plan | None:
    """Before a person is called, what the equation doesn't know of is tried."""
    return plan if plan and plan.action == "adjust" else None


def _as_high_as_needed(s: Situation, terms: Equation) -> tuple[Callable[[Batch], float], str]:
    """Up, not down: the budget is what is too small. No higher than what must stay free beside it."""

    def target(batch: Batch) -> float:
        top = terms.highest_utilization(batch)
        asked = asked_length(s)
        needed = request_bytes(s, terms.at(batch), asked) if asked else None
        if needed is None or s.verdict.kind == "gpu_kv_none":
            return max(top, s.utilization)
        return max(s.utilization, min(top, terms.utilization_for(int(needed * 1.01), batch) + levers.STEP))

    return target, "the KV cache needs it, and so much memory is free"


def _lowered(s: Situation) -> Plan | None:
    """By what is missing; where that would leave nothing for the KV cache, by as much as can be done without."""
    step, why = _missing(s, SERVING_STEP)
    plan = None
    while step >= levers.STEP:
        plan = fitted_plan(s, _lower_by(step, why))
        if plan is None or plan.action == "adjust":
            break
        step, why = step / 2, "less would leave nothing for the KV cache"
    return plan


def _lower_by(step: float, why: str) -> Target:
    def target(s: Situation, terms: Equation) -> tuple[Callable[[Batch], float], str]:
        of_cache = STEP_OF_CACHE * 2**s.repeats * terms.kv_cache(s.utilization) / terms.total
        least = min(step, max(levers.FINE_STEP, of_cache))
        return lambda batch: min(s.utilization - least, max(terms.highest_utilization(batch), s.utilization / 2)), why

    return target


# -- the KV cache ------------------------------------------------------------------------------------------------------


def kv_small(s: Situation) -> Plan:
    shorter = adjust(_shorter(s))
    if s.settings.prefer == "context":
        return first(s, adjust(_more_for_kv(s)), fitted_plan(s, _as_high_as_needed), shorter)
    fitted = None if _is_useful(s) else fitted_plan(s, _as_high_as_needed)
    if fitted and fitted.action == "adjust":
        return fitted
    return first(s, shorter, adjust(_more_for_kv(s)), _more_for_kv_blocks(s))


def _is_useful(s: Situation) -> bool:
    """Is vLLM's estimate worth a server? If not, more is to be moved than the length."""
    estimate = s.numbers.get("estimated_max_model_len")
    return estimate is None or int(estimate) >= smallest_useful_request(s)


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
        # printed with two decimals: 1 % less, in whole blocks; and much less where that wasn't enough
        target = int(length * available / needed * 0.99 * 0.75**s.repeats) // 16 * 16
        return levers.length_to(s, target, f"{gib(available)} of the {gib(needed)} that {length} tokens need are there")
    return levers.length_to(s, length // 2 // 16 * 16, "half: vLLM doesn't say how much fits (safe step)")


def _more_for_kv(s: Situation) -> Change | None:
    needed, available = s.numbers.get("kv_needed_bytes"), s.numbers.get("kv_available_bytes")
    if not needed or available is None or not s.total_bytes:
        return None
    if levers.kv_bytes(s):
        free = s.numbers.get("free_bytes") or 0
        larger = needed + needed // 100
        fits = larger - available < free - MARGIN * s.total_bytes
        return levers.kv_bytes_to(s, larger, f"one request needs {gib(needed)}") if fits else None
    missing = (needed - available) / s.total_bytes
    target = s.utilization + missing + levers.STEP
    if target > _ceiling(s):
        return None
    return levers.utilization_to(s, target, f"{gib(needed - available)} more for the KV cache of one request")


def kv_none(s: Situation) -> Plan:
    fitted = fitted_plan(s, _as_high_as_needed)
    eager = None if if_adjusts(fitted) else adjust(levers.eager(s, "no CUDA graphs: their memory goes to the KV cache"))
    return first(s, eager, fitted, adjust(_as_much_as_is_free(s)), _more_for_kv_blocks(s))


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
        adjust(*levers.tokens_to(s, s.tokens // 2, "smaller batches need less, and leave more for the KV cache"))
        or adjust(levers.seqs_to(s, s.seqs // 2, "fewer sequences need less, and leave more for the KV cache"))
        or adjust(levers.eager(s, "no CUDA graphs: their memory goes to the KV cache"))
    )


# -- out of device memory ----------------------------------------------------------------------------------------------


def _missing(s: Situation, unknown: float = SAFE_STEP) -> tuple[float, str]:
    """(of the total, and a margin, so that so much more stays outside vLLM's budget; why)."""
    tried, free, total = s.numbers.get("tried_bytes"), s.numbers.get("free_bytes"), s.total_bytes
    if tried and free is not None and total and tried >= total * levers.STEP:
        step = max((tried - free) / total, 0.0) + MARGIN * 2**s.repeats
        return step, f"{gib(max(tried - free, 0))} were missing, and a margin"
    return unknown * 2**s.repeats, "what is missing isn't known: a safe step"


def _less_utilization(s: Situation) -> Change | None:
    step, why = _missing(s)
    total = s.total_bytes
    if given := levers.kv_bytes(s):
        return levers.kv_bytes_to(s, max(_smaller_cache(s, given, step), given // 2), why)
    available = s.numbers.get("kv_available_bytes")
    if available and total and available < step * total * 1.1:
        return None  # it would leave nothing for the KV cache
    return levers.utilization_to(s, s.utilization - step, why)


def _smaller_cache(s: Situation, given: int, step: float) -> int:
    free, tried = s.numbers.get("free_bytes"), s.numbers.get("tried_bytes")
    if free and tried and tried >= given * 0.99:  # all of it in one piece: what is free is what fits
        return int(free * (1 - MARGIN * 2**s.repeats))
    return given - int(step * s.total_bytes) if s.total_bytes else given // 2


def _half_tokens(s: Situation) -> Plan | None:
    return adjust(*levers.tokens_to(s, s.tokens // 2, "activations grow with the tokens of a batch: half of them"))


def profile(s: Situation) -> Plan:
    fitted = fitted_plan(s, _as_high_as_needed, _profile_failed)
    return _absurd(s) or first(s, fitted, _half_tokens(s), adjust(_half_seqs(s)), adjust(_less_utilization(s)))


def _profile_failed(terms: Equation) -> Equation:
    """The activations were more than what was left: at least so much is known of them."""
    left = terms.free - terms.weights - terms.non_torch
    return dataclasses.replace(terms, activations=max(terms.activations, int(left * 1.05)))


def _half_seqs(s: Situation) -> Change | None:
    return levers.seqs_to(s, s.seqs // 2, "less memory with fewer sequences: half of them")


def warmup(s: Situation) -> Plan:
    blocks = s.numbers.get("mamba_blocks")
    if blocks:
        return first(s, adjust(levers.seqs_to(s, int(blocks), f"there are {blocks} Mamba cache blocks")))
    quarter = levers.seqs_to(s, s.seqs // 4, f"the warm-up with {s.seqs} requests failed: a quarter of them")
    return first(s, adjust(quarter), adjust(_less_utilization(s)))


def graph(s: Situation) -> Plan:
    fitted = _lowered(s)
    return _absurd(s) or first(
        s,
        if_adjusts(fitted),
        None if fitted else adjust(_less_utilization(s)),
        adjust(levers.capture_size_to(s, 64, "fewer and smaller CUDA graphs")),
        adjust(levers.eager(s, "no CUDA graphs")),
        fitted,
        adjust(_half_seqs(s)),
    )


def runtime(s: Situation) -> Plan:
    fitted = _lowered(s)
    less = adjust(_less_utilization(s)) or _cache_by_size(s)
    return _absurd(s) or first(s, fitted, less, _half_tokens(s), adjust(_half_seqs(s)))


def out_of_memory(s: Situation) -> Plan:
    return _absurd(s) or first(s, _lowered(s), adjust(_less_utilization(s)), _cache_by_size(s), _half_tokens(s))


def kv_alloc(s: Situation) -> Plan:
    return first(s, _lowered(s), adjust(_less_utilization(s)), _cache_by_size(s))


def _cache_by_size(s: Situation) -> Plan | None:
    """Utilisation is at its floor: beside a large neighbour a smaller share of the whole device says little. vLLM is
    then given the KV cache's size outright, less than what it measured, where a request still fits into it."""
    terms = equation_of(s)
    if terms is None or not terms.is_measured or s.pinned(UTILIZATION):
        return None
    step, why = _missing(s, SERVING_STEP)
    size = terms.kv_cache(s.utilization) - int(step * terms.total)
    asked = asked_length(s)
    needed = request_bytes(s, terms, asked) if asked else None
    if needed is None or needed * 1.02 > size:
        return None
    return adjust(levers.kv_bytes_to(s, size, f"{UTILIZATION} is at its floor; {why}"))


def _absurd(s: Situation) -> Plan | None:
    """More in one piece than the device has: a wrong kernel or an absurd batch; no launch is worth it."""
    tried = s.numbers.get("tried_bytes")
    if not tried or not s.total_bytes or tried <= s.total_bytes:
        return None
    return Plan(
        "hold", f"it asked for {gib(tried)} at once and the device has {gib(s.total_bytes)}: no memory flag can help"
    )


def weights(s: Situation) -> Plan:
    total, tried, free = s.total_bytes, s.numbers.get("tried_bytes"), s.numbers.get("free_bytes")
    if "cpu_offload" in s.settings.allow and offload_works(s.version) and s.repeats < 3:
        missing = max((tried or 0) - (free or 0), int((total or 0) * 0.1))
        given = number(s.launch.get(CPU_OFFLOAD)) or 0.0
        target = f"{math.ceil(given + max(1.0, missing / 2**30))}"
        offloaded = adjust(levers.change(s, CPU_OFFLOAD, target, "weights that don't fit go to host memory (allowed)"))
        if offloaded:
            return offloaded
    return Plan(
        "hold",
        f"{s.verdict.summary.rstrip('.')}; no memory flag helps: a larger --tensor-parallel-size, a quantised "
        "checkpoint or a larger device does",
    )
