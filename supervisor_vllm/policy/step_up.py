"""Back up: what was learned is a price. After a quiet time half of it is given back, at a launch that happens anyway.

A notch that failed is remembered, and never tried again; between it and what serves the value closes in. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..incident import Change
from .flags import LENGTH, SEQS, TOKENS, UTILIZATION
from .launch_command import whole_number

#: The smallest step that is worth a risk: of utilisation, and of whole numbers as a share.
_SMALLEST_UTILIZATION, _SMALLEST_SHARE = 0.01, 0.05
_WHY = "quiet for long enough: half of the way back"


@dataclass(frozen=True)
class Learned:
    """A learned change, and since when it has been in force (seconds since the epoch)."""

    change: Change
    time: float


def steps_up(
    learned: Sequence[Learned],
    *,
    own: Mapping[str, float],
    failed: Mapping[str, Sequence[str | None]],
    last_memory_death: float,
    now: float,
    after_sec: float,
) -> tuple[Change, ...]:
    """The changes that a launch may try. `own`: the user's own value of each flag, with vLLM's default where he gave
    none; a flag that isn't there is left alone. `failed`: values that were tried and died of memory (None: no flag)."""
    if not after_sec:
        return ()
    found = []
    for item in learned:
        quiet_since = max(item.time, last_memory_death)
        if now - quiet_since < after_sec or item.change.to is None or item.change.flag not in own:
            continue
        if step := _half_way(item.change, own[item.change.flag], failed.get(item.change.flag, ())):
            found.append(step)
    return tuple(found)


def _half_way(change: Change, own: float, failed: Sequence[str | None]) -> Change | None:
    now = _value(change.flag, change.to)
    if now is None or now == own:
        return None
    tried = [own if text is None else _value(change.flag, text) for text in failed]
    bounds = [bound for bound in tried if bound is not None and _between(now, bound, own)]
    nearest = min(bounds, key=lambda bound: abs(bound - now), default=None)
    goal = own if nearest is None else nearest
    target = (now + goal) / 2
    if nearest is None and abs(own - target) <= _smallest(change.flag, own) + 1e-9:
        return Change(change.flag, change.to, change.from_, _WHY)  # the user's own again
    text = (
        f"{target:.2f}" if change.flag == UTILIZATION else str(int(target) // 16 * 16 if target >= 16 else int(target))
    )
    moved = _value(change.flag, text)
    if moved is None or abs(moved - now) < _smallest(change.flag, now) or moved == nearest:
        return None
    return Change(change.flag, change.to, text, _WHY)


def _between(low: float, value: float, high: float) -> bool:
    return low < value <= high or high <= value < low


def _smallest(flag: str, value: float) -> float:
    return _SMALLEST_UTILIZATION if flag == UTILIZATION else max(1.0, value * _SMALLEST_SHARE)


def _value(flag: str, text: str | None) -> float | None:
    if flag == UTILIZATION:
        try:
            return float(text) if text else None
        except ValueError:
            return None
    return whole_number(text) if flag in (LENGTH, SEQS, TOKENS) else None


def is_step_up(change: Change) -> bool:
    return change.why == _WHY
