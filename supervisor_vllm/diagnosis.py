"""From a death to a plan: the evidence is gathered, judged, answered, and all of it written down together."""

from __future__ import annotations

import dataclasses
import time
from datetime import datetime

from . import back_up, control, launch, memory, override, watch
from .classify import classify
from .classify.numbers import with_device_numbers, with_host_numbers
from .context import Context, enter, say
from .errors import UserError
from .evidence import device, exit_status, life, processes
from .evidence.life import Life
from .incident import Evidence, Incident, Plan, Verdict
from .journal import State
from .policy.launch_command import redact
from .policy.model_shape import ModelShape
from .policy.plan import Attempt, plan_next
from .redaction import for_journal
from .target import shape_of


def diagnose(context: Context) -> State:
    """The death of the life that was watched. Reading it again after a crash gives the same."""
    assert context.life is not None
    incident = _gather(context, context.life)
    verdict = classify(incident, context.signatures)
    if incident.gpus == () and verdict.kind.startswith("gpu_"):
        incident, problem = _with_devices(context, incident)
        verdict = with_device_numbers(classify(incident, context.signatures), incident)
        if problem:
            say(context.name, f"devices: {problem}")
            verdict = dataclasses.replace(verdict, evidence=(*verdict.evidence, Evidence("gpu", problem)))
    if verdict.kind.startswith("host_"):
        verdict = with_host_numbers(verdict, incident)
    return _decide(context, incident, verdict)


def hung(context: Context, reason: str) -> State:
    """Alive, but it doesn't answer: an incident like a death. It is stopped after that is written down."""
    assert context.life is not None
    incident = _gather(context, context.life, alive=True)
    verdict = Verdict("hung", "likely", reason)
    return _decide(context, incident, verdict)


def step_up(context: Context, shape: ModelShape | None) -> State | None:
    """A step back up in the operator's window: an end of our own making, written down like any other."""
    assert context.life is not None
    incident = _gather(context, context.life, alive=True)
    changes = back_up.changes_in_window(context, incident, shape)
    if not changes:
        return None
    words = "; ".join(f"{change.flag} {change.to or 'as you have it'}: {change.why}" for change in changes)
    verdict = Verdict("stopped", "proven", f"Stopped for a step back up in the {context.settings.step_up}.")
    command = override.apply_changes(incident.command, changes)
    return _decide(context, incident, verdict, Plan("adjust", words, changes, command))


def _gather(context: Context, dead: Life, *, alive: bool = False) -> Incident:
    status, signal = (None, None)
    if not alive:
        log = control.main_log_tail(context.server)
        status, signal = exit_status.exit_in_log(log, context.full_name.partition(":")[2], dead.leader.pid)
    incident = life.gather(
        dead,
        context.roots,
        program=context.name,
        time=datetime.now().astimezone().isoformat(timespec="milliseconds"),
        command=_command_text(context),
        exit_status=status,
        signal=signal,
        stop_requested=False,
        died_sec_ago=0.0 if alive else _died_sec_ago(context),
    )
    if alive:
        return dataclasses.replace(incident, orphans=())
    left = tuple(ref for ref in context.leftovers if ref not in incident.orphans and processes.alive(ref))
    return dataclasses.replace(incident, orphans=incident.orphans + left)


def _died_sec_ago(context: Context) -> float:
    """By supervisord's own time: a death while the listener was away may be old."""
    info = control.process_info(context.server, context.full_name)
    return time.time() - info.stop_time if info and info.stop_time and info.state in watch.DEAD else 0.0


def _with_devices(context: Context, incident: Incident) -> tuple[Incident, str | None]:
    """The incident with the program's devices, and what of them couldn't be read."""
    reading = memory.read_devices(context, incident)
    named = device.name_holders(reading.gpus, own=incident.tree, orphans=incident.orphans)
    return dataclasses.replace(incident, gpus=named), reading.problem


def _decide(context: Context, incident: Incident, verdict: Verdict, plan: Plan | None = None) -> State:
    """The plan, and the incident with both into the journal: one transaction, after which the dead life is history."""
    dead = context.life
    assert dead is not None
    plan = plan or plan_for(context, verdict, incident, waited=False)
    with context.journal.transaction():
        plan = back_up.plan_after_failed_notch(context, dead, verdict, _command_text(context)) or plan
        _close_previous(context, dead)
        in_shadow = context.settings.mode == "shadow"
        incident_id = context.journal.add_incident(
            for_journal(incident), verdict, plan_for_journal(plan), in_shadow=in_shadow
        )
        context.journal.set_life(context.name, None)
        context.journal.set_served(context.name, None)
        say(context.name, f"{verdict.kind} ({verdict.confidence}): {verdict.summary}")
        state: State = "WAITING"
        reason = f"{verdict.kind}: {plan.reason}"
        if plan.action == "none":
            context.journal.close_incident(incident_id, "held")  # it stays down until a person starts it
            state = "WATCHING"
        elif in_shadow:
            state, reason = "WATCHING", f"shadow mode: would {plan.action}: {plan.reason}"
        enter(context, state, reason, incident_id=incident_id)
    context.life = None
    return state


def plan_for(context: Context, verdict: Verdict, incident: Incident, *, waited: bool) -> Plan:
    attempts = tuple(
        Attempt(row.verdict.kind, () if row.in_shadow else row.plan.changes)
        for row in context.journal.incidents_since_healthy(context.name)
    )
    command = _command_text(context)
    return plan_next(
        verdict,
        command,
        context.settings,
        attempts=attempts[:-1] if waited else attempts,
        waited=waited,
        vllm_version=incident.vllm_version,
        shape=shape_of(context.section, command),
        cpu_backend=device.on_cpu_backend(incident.log),
    )


def _close_previous(context: Context, dead: Life) -> None:
    """The incident whose launch has just died: healthy for a while, or died again on the way."""
    if dead.launch_id is None:
        return
    earlier = context.journal.launch(dead.launch_id)
    if earlier.incident_id is not None and earlier.healthy_time is None:
        context.journal.close_incident(earlier.incident_id, "died again")


def _command_text(context: Context) -> str:
    try:
        launch.adopt_hand_edits(context)
        return launch.current_command(context)
    except UserError:
        return ""


def plan_for_journal(plan: Plan) -> Plan:
    return dataclasses.replace(plan, command=redact(plan.command))
