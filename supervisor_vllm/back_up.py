"""Steps back up in the course of a recovery: when they're due, that they're noted, what becomes of one that fails."""

from __future__ import annotations

import time

from . import launch, override
from .context import Context, say
from .evidence.life import Life
from .incident import Change, Incident, Plan, Verdict
from .journal import IncidentRow
from .kinds import KINDS
from .policy.flags import LENGTH, SEQS, TOKENS, UTILIZATION, default_seqs, default_tokens, default_utilization
from .policy.launch_command import parse_launch, whole_number
from .policy.model_shape import ModelShape
from .policy.step_up import Learned, is_step_up, steps_up
from .settings import in_window


def changes_due(context: Context, row: IncidentRow, shape: ModelShape | None) -> tuple[Change, ...]:
    """What the restart after this incident may take back, where memory wasn't its reason."""
    if row.plan.action != "retry" or KINDS[row.verdict.kind].oom:
        return ()
    return _due(context, context.journal.incident(row.id), shape)


def window_is_open(context: Context) -> bool:
    """Is it the operator's time for a restart of its own, and does the limit leave launches for it to fail?"""
    now = time.localtime()
    if context.settings.mode == "shadow" or not in_window(context.settings.step_up, now.tm_hour, now.tm_min):
        return False
    left = launch.launches_left(context)
    return left is None or left >= 2


def changes_in_window(context: Context, incident: Incident, shape: ModelShape | None) -> tuple[Change, ...]:
    """What a restart of its own may take back."""
    return _due(context, incident, shape)


def _due(context: Context, incident: Incident, shape: ModelShape | None) -> tuple[Change, ...]:
    settings = context.settings
    if settings.step_up == "never":
        return ()
    learned = [Learned(item.change, item.time) for item in context.journal.learned(context.name)]
    if not learned:
        return ()
    deaths = [other.time for other in context.journal.incidents(context.name) if KINDS[other.verdict.kind].oom]
    return steps_up(
        learned,
        own=_own_values(learned, incident, shape),
        failed=context.journal.failed_notches(context.name),
        last_memory_death=max(deaths, default=0.0),
        now=time.time(),
        after_sec=settings.step_up_after_sec,
    )


def _own_values(learned: list[Learned], incident: Incident, shape: ModelShape | None) -> dict[str, float]:
    total = incident.gpus_before[0].total_bytes if incident.gpus_before else None
    command = parse_launch(incident.command)
    defaults: dict[str, float | None] = {
        UTILIZATION: default_utilization(incident.vllm_version),
        SEQS: default_seqs(incident.vllm_version, total),
        TOKENS: default_tokens(total),
        LENGTH: float(shape.max_position) if shape and shape.max_position else None,
    }
    found: dict[str, float] = {}
    for item in learned:
        flag, own = item.change.flag, item.change.from_
        if flag not in defaults or command.get(flag) is None:
            continue
        value = defaults[flag] if own is None else float(own) if flag == UTILIZATION else whole_number(own)
        if value:
            found[flag] = float(value)
    return found


def note(context: Context, launch_id: int, changes: tuple[Change, ...]) -> None:
    """Before the launch: which notches it tries."""
    for change in filter(is_step_up, changes):
        context.journal.add_notch(context.name, change, launch_id=launch_id, when=time.time())


def plan_after_failed_notch(context: Context, dead: Life, verdict: Verdict, command: str) -> Plan | None:
    """A server that ran with a notch and died of device memory: the value before it served, and comes back."""
    if dead.launch_id is None or not (verdict.kind.startswith("gpu_") and KINDS[verdict.kind].oom):
        return None
    tried = context.journal.open_notches(dead.launch_id)
    if not tried:
        return None
    context.journal.fail_notches(dead.launch_id, when=time.time())
    words = " and ".join(f"{change.flag} {change.to or 'as you have it'}" for change in tried)
    say(context.name, f"the step back up failed and is not tried again: {words}")
    why = "the step back up was too much: what served before"
    changes = tuple(Change(change.flag, change.to, change.from_, why) for change in tried)
    reason = f"{verdict.summary.rstrip('.')}; the step back up to {words} is taken back"
    return Plan("adjust", reason, changes, override.apply_changes(command, changes))
