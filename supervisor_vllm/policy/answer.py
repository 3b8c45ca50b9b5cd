"""Plans as the remedies make them: of the levers that move, the first that there is, or none. Pure."""

from __future__ import annotations

from ..incident import Change, Plan
from .levers import Situation


def adjust(*changes: Change | None) -> Plan | None:
    """A plan of those levers that move; None where none does."""
    moved = tuple(change for change in changes if change is not None)
    if not moved:
        return None
    return Plan("adjust", "; ".join(f"{change.flag} {change.to}: {change.why}" for change in moved), moved)


def first(s: Situation, *plans: Plan | None) -> Plan:
    """The first remedy that there is, else a person must act."""
    return next((plan for plan in plans if plan), exhausted(s))


def exhausted(s: Situation) -> Plan:
    pins = f"; pinned: {', '.join(s.settings.pin)}" if s.settings.pin else ""
    return Plan(
        "hold",
        f"{s.verdict.summary.rstrip('.')}; every flag that could help is at its floor, its ceiling or pinned{pins}: "
        "use a larger device, a smaller or quantised model, or more tensor parallelism",
    )


def number(text: str | None) -> float | None:
    try:
        return float(text) if text else None
    except ValueError:
        return None
