"""The levers: each moves one flag in one direction, inside floors, ceilings and pins, or says that it can't. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..incident import Change, Numbers, Verdict
from ..settings import Settings
from .flags import (
    CAPTURE_SIZE,
    EAGER,
    KV_BYTES,
    LENGTH,
    SEQS,
    TOKENS,
    UTILIZATION,
    default_seqs,
    default_tokens,
    default_utilization,
    knows,
)
from .launch_command import LaunchCommand, whole_number
from .model_shape import ModelShape

#: The smallest change of utilisation that is worth a launch.
STEP = 0.01
#: Where a hundredth of the device is much of the KV cache, utilisation moves by as little as this.
FINE_STEP = 0.001


@dataclass(frozen=True)
class Attempt:
    """One death since the last healthy launch, and what was changed after it."""

    kind: str
    changes: tuple[Change, ...] = ()


@dataclass(frozen=True)
class Situation:
    """All that a plan is made from."""

    verdict: Verdict
    launch: LaunchCommand
    settings: Settings
    attempts: tuple[Attempt, ...] = ()
    waited: bool = False
    version: str | None = None
    shape: ModelShape | None = None
    cpu_backend: bool = False

    @property
    def numbers(self) -> Numbers:
        return self.verdict.numbers

    @property
    def total_bytes(self) -> int | None:
        return self.numbers.get("total_bytes") or None

    @property
    def repeats(self) -> int:
        """How often this kind was met with a change before, since the last healthy launch."""
        return sum(1 for attempt in self.attempts if attempt.kind == self.verdict.kind and attempt.changes)

    def pinned(self, flag: str) -> bool:
        return flag in self.settings.pin

    @property
    def utilization(self) -> float:
        text = self.launch.get(UTILIZATION)
        if text is None:
            return float(self.numbers.get("utilization") or default_utilization(self.version))
        return _number(text) or default_utilization(self.version)

    @property
    def seqs(self) -> int:
        given = whole_number(self.launch.get(SEQS))
        return given or self.numbers.get("dummy_requests") or default_seqs(self.version, self.total_bytes)

    @property
    def tokens(self) -> int:
        return whole_number(self.launch.get(TOKENS)) or default_tokens(self.total_bytes)


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 < value <= 1 else None


def change(s: Situation, flag: str, to: str, why: str) -> Change | None:
    """None where the flag is pinned, unknown to the version, or stands there already."""
    before = s.launch.get(flag)
    if s.pinned(flag) or not knows(s.version, flag) or before == to:
        return None
    return Change(flag, before, to, why)


def utilization_to(s: Situation, target: float, why: str, step: float = STEP) -> Change | None:
    """Rounded down to a whole `step`. Refused where it wouldn't move, or where an earlier attempt has failed already:
    between "too much" and "too little" the value closes in, and never goes back and forth."""
    value = rounded_down(target, step)
    if abs(value - s.utilization) < step / 2:
        return None
    lowest, highest = utilization_bounds(s)
    value = min(value, highest) if value > s.utilization else max(value, lowest)
    # the user's own value may lie outside the settings' lines: what is written never does
    value = min(max(value, s.settings.gpu_memory_utilization_min), s.settings.gpu_memory_utilization_max)
    moved_right = value > s.utilization if target > s.utilization else value < s.utilization
    return change(s, UTILIZATION, f"{value:.2f}" if step == STEP else f"{value:g}", why) if moved_right else None


def rounded_down(value: float, step: float) -> float:
    return round(math.floor(round(value / step, 6)) * step, 6)


def utilization_bounds(s: Situation) -> tuple[float, float]:
    """From the settings, and from what failed since the last healthy launch. What was too little says nothing once
    the batch or the length has been made smaller, too."""
    lowest, highest = s.settings.gpu_memory_utilization_min, s.settings.gpu_memory_utilization_max
    for attempt in s.attempts:
        for done in attempt.changes:
            if done.flag != UTILIZATION or done.to is None:
                continue
            before, after = _number(done.from_ or "") or default_utilization(s.version), _number(done.to) or 0.0
            if after < before:
                highest = min(highest, before - FINE_STEP)
            elif len(attempt.changes) == 1:
                lowest = max(lowest, before + FINE_STEP)
    return round(lowest, 3), round(highest, 3)


def seqs_to(s: Situation, target: int, why: str) -> Change | None:
    value = max(target, s.settings.max_num_seqs_min, 1)
    return change(s, SEQS, str(value), why) if value < s.seqs else None


def tokens_to(s: Situation, target: int, why: str) -> tuple[Change, ...]:
    """vLLM wants max_num_batched_tokens ≥ max_num_seqs (config/scheduler.py): where it would fall below, sequences go
    down with it; and ≥ max_model_len where chunked prefill is off (then it isn't touched)."""
    value = max(target, s.settings.max_num_batched_tokens_min, 1)
    length = s.launch.max_model_len
    if s.launch.get("--enable-chunked-prefill") in ("false", "False") and (length is None or value < length):
        return ()
    needed: tuple[Change, ...] = ()
    if value < s.seqs:
        fewer = seqs_to(s, value, f"no more sequences than the {value} tokens of a batch")
        if fewer is None or int(fewer.to or 0) > value:
            return ()
        needed = (fewer,)
    fewer_tokens = change(s, TOKENS, str(value), why) if value < s.tokens else None
    return (fewer_tokens, *needed) if fewer_tokens else ()


def length_to(s: Situation, target: int, why: str) -> Change | None:
    if target < s.settings.max_model_len_min or target < 1:
        return None
    given = s.launch.max_model_len or s.numbers.get("max_model_len")
    return change(s, LENGTH, str(target), why) if given is None or target < given else None


def kv_bytes(s: Situation) -> int | None:
    """The size that the command gives the KV cache: vLLM then doesn't look at utilisation."""
    return whole_number(s.launch.get(KV_BYTES))


def kv_bytes_to(s: Situation, target: int, why: str) -> Change | None:
    """In whole MiB."""
    value = target // 2**20 * 2**20
    return change(s, KV_BYTES, str(value), why) if value > 0 and value != kv_bytes(s) else None


def capture_size_to(s: Situation, target: int, why: str) -> Change | None:
    given = whole_number(s.launch.get(CAPTURE_SIZE)) or min(2 * s.seqs, 512)
    eager = s.launch.get(EAGER) == "true" or s.launch.get("--cudagraph-capture-sizes")
    return change(s, CAPTURE_SIZE, str(max(1, target)), why) if not eager and target < given else None


def eager(s: Situation, why: str) -> Change | None:
    """Slower, so only where the operator allows it."""
    if "enforce_eager" not in s.settings.allow:
        return None
    return change(s, EAGER, "true", why)
