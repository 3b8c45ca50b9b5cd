"""What was learned is one change a flag, from the user's own value to ours. Pure."""

from __future__ import annotations

import dataclasses

from ..incident import Change
from .launch_command import parse_launch


def changes_between(base_command: str, command: str, learned: tuple[Change, ...]) -> tuple[Change, ...]:
    """The changes that lead from the user's command to this one, which a person may have edited by hand. What was
    learned keeps its reason."""
    base, now = parse_launch(base_command), parse_launch(command)
    names = dict.fromkeys(argument.name for argument in (*base.arguments, *now.arguments))
    known = {(change.flag, change.to): change for change in learned}
    found = []
    for flag in (f"--{name}" for name in names):
        if base.get(flag) != now.get(flag):
            made = Change(flag, base.get(flag), now.get(flag), "edited by hand in the override")
            found.append(known.get((flag, made.to), made))
    return tuple(found)


def merge_learned(learned: tuple[Change, ...], changes: tuple[Change, ...]) -> tuple[Change, ...]:
    """The learned changes after a plan's `changes` (which start from the learned command) came on top.

    A change's `from_` stays the user's own value: that is how an edit of theirs is noticed later. A flag that came back
    to the user's value is no change any more.
    """
    merged = {change.flag: change for change in learned}
    for change in changes:
        base = merged[change.flag].from_ if change.flag in merged else change.from_
        merged[change.flag] = dataclasses.replace(change, from_=base)
    return tuple(change for change in merged.values() if change.from_ != change.to)
