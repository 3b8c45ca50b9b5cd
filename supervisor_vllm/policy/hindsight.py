"""Shadow mode: whether the launches that followed proved a plan right, though nobody carried it out. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..incident import Change, Plan
from .answer import number
from .launch_command import parse_launch, whole_number

Judgement = Literal["right", "wrong", "open"]


@dataclass(frozen=True)
class Followed:
    """The launch after a death. `died_as`: its own death's kind; neither of both: it's on its way still."""

    command: str
    healthy: bool
    died_as: str | None = None


@dataclass(frozen=True)
class Hindsight:
    judgement: Judgement
    why: str


def hindsight(kind: str, plan: Plan, command: str, followed: Followed | None) -> Hindsight:
    """`command`: the one that died as `kind`."""
    if followed is None:
        return Hindsight("open", "not started again yet")
    if not followed.healthy and followed.died_as is None:
        return Hindsight("open", "the launch after it is on its way")
    if followed.command == command:
        return _unchanged(kind, plan, followed)
    if not plan.changes:
        return Hindsight("open", "started with another command")
    if all(_goes_as_far(change, followed.command) for change in plan.changes):
        if followed.healthy:
            return Hindsight("right", "changed like this, or further, it served")
        if followed.died_as == kind:
            return Hindsight("wrong", "changed like this, or further, it died of the same again")
    return Hindsight("open", "started with another command")


def _unchanged(kind: str, plan: Plan, followed: Followed) -> Hindsight:
    needs_no_change = plan.action in ("retry", "wait", "none")
    if followed.healthy:
        return Hindsight("right" if needs_no_change else "wrong", "started unchanged, it served")
    if followed.died_as == kind:
        return Hindsight("wrong" if needs_no_change else "right", "started unchanged, it died of the same again")
    return Hindsight("open", f"started unchanged, it died as {followed.died_as}")


def _goes_as_far(change: Change, command: str) -> bool:
    text = parse_launch(command).get(change.flag)
    if text == change.to:
        return True
    before, planned, value = _value(change.from_), _value(change.to), _value(text)
    if planned is None or value is None:
        return False
    rises = before is not None and planned > before
    return value >= planned if rises else value <= planned


def _value(text: str | None) -> float | None:
    whole = whole_number(text)
    return number(text) if whole is None else float(whole)
