"""Between a death and the next launch: what was left behind ends, the pause passes, the memory becomes free.

Each wait ends at once when a person acts: then it returns the state that this leads to.
"""

from __future__ import annotations

import dataclasses
import time

from . import cleanup, control, memory, watch
from .context import Context, enter, say
from .diagnosis import plan_for, plan_for_journal
from .evidence import processes
from .incident import Plan
from .journal import IncidentRow, State
from .policy.limit import restart_delay_sec

#: supervisord's stop of a server: stopwaitsecs (the user's), then SIGKILL of the group.
STOP_LIMIT_SEC = 120.0


def current(context: Context) -> tuple[IncidentRow, Plan]:
    incident_id = context.journal.program(context.name).incident_id
    assert incident_id is not None
    row = context.journal.incident_row(incident_id)
    return row, row.plan


def stops_first(row: IncidentRow) -> bool:
    """It lives: it is hung, or its restart in the operator's window is our own wish."""
    return row.verdict.kind == "hung" or (row.verdict.kind == "stopped" and row.plan.action == "adjust")


def clear_away(context: Context, row: IncidentRow) -> None:
    """What the dead life left behind ends: by pid and start time, nothing else. One that lives is stopped first."""
    if stops_first(row):
        _stop(context)
    incident = context.journal.incident(row.id)
    left = tuple(ref for ref in (*incident.orphans, *incident.tree) if processes.alive(ref))
    left = tuple({(ref.pid, ref.start_time): ref for ref in left}.values())
    info = control.process_info(context.server, context.full_name)
    if not left or (info and info.pid):
        return  # never while the program runs: then a person was quicker than we
    # vLLM gives its processes their names only once they run: the name is the one of now
    now = tuple(processes.process_ref(ref.pid) or ref for ref in left)
    names = ", ".join(f"{ref.name or 'process'} (pid {ref.pid})" for ref in now)
    enter(context, "WAITING", f"ending what the dead server left behind: {names}", incident_id=row.id)
    result = cleanup.end_processes(left)
    if result.survivors:
        say(context.name, f"still there after SIGKILL: {', '.join(map(str, result.survivors))}")


def _stop(context: Context) -> None:
    deadline = time.monotonic() + STOP_LIMIT_SEC
    stopped = False
    while time.monotonic() < deadline:
        info = control.process_info(context.server, context.full_name)
        if not info or not info.pid:
            return
        if not stopped:
            control.stop(context.server, context.full_name)
            stopped = True
        watch.next_event(context, 0.5)  # its STOPPING and STOPPED are of our own making


def limit_reason(context: Context, row: IncidentRow) -> str:
    settings = context.settings
    return (
        f"{settings.start_limit_burst} launches did not help (start_limit_burst); last: {row.verdict.kind}: "
        f"{row.verdict.summary}; when it's cured: supervisorctl start {context.full_name}"
    )


def pause(context: Context, row: IncidentRow) -> State | None:
    """restart_sec between the death and an unchanged launch."""
    deaths = len(context.journal.incidents_since_healthy(context.name))
    until = row.time + restart_delay_sec(deaths, context.settings)
    if until > time.time():
        enter(context, "WAITING", f"{row.verdict.kind}: {row.plan.reason}", incident_id=row.id)
    while True:
        left_sec = min(until - time.time(), restart_delay_sec(deaths, context.settings))
        if left_sec <= 0:
            return None
        state = watch.wait(context, left_sec)
        if state:
            return state


def waits_for_neighbour(row: IncidentRow, plan: Plan) -> bool:
    return plan.action == "wait" and row.verdict.kind == "gpu_neighbour"


def wait_for_memory(context: Context, row: IncidentRow, plan: Plan) -> State | None:
    """Until what the launch needs is measured as free, or the time is over: then the reason is said, and a plan that
    waited for a neighbour is made anew from what is free now."""
    neighbour = waits_for_neighbour(row, plan)
    if neighbour and _waited_before(context, row):
        _plan_after_wait(context, row, memory.Reading("it looked free the last time, and was not"))
        return None
    need = memory.need_of(context, context.journal.incident(row.id), row, plan)
    limit_sec = context.settings.memory_release_timeout_sec
    deadline = time.monotonic() + limit_sec
    pause_sec, said = 0.1, ""
    while True:
        reading = memory.measure(context, need)
        shortfall = reading.shortfall
        if neighbour and not shortfall and not reading.numbers:
            why = f": {reading.problem}" if reading.problem else ""
            shortfall = f"the device's free memory can't be measured here{why}"
        if not shortfall:
            break
        if time.monotonic() >= deadline:
            enter(context, "WAITING", f"memory is not free after {limit_sec:g} s: {shortfall}", incident_id=row.id)
            break
        if not said:
            said = f"{row.verdict.kind}: waiting for memory: {shortfall}"
            enter(context, "WAITING", said, incident_id=row.id)
        state = watch.wait(context, min(pause_sec, max(0.0, deadline - time.monotonic())))
        if state:
            return state
        pause_sec = min(pause_sec * 2, 1.0)
    if neighbour:
        _plan_after_wait(context, row, memory.Reading(shortfall, reading.numbers))
    return None


def _waited_before(context: Context, row: IncidentRow) -> bool:
    """It was waited for since the last healthy launch, seemed to be gone, and the start failed all the same."""
    earlier = (other for other in context.journal.incidents_since_healthy(context.name) if other.id < row.id)
    return any(other.verdict.kind == "gpu_neighbour" and other.plan.action == "retry" for other in earlier)


def _plan_after_wait(context: Context, row: IncidentRow, reading: memory.Reading) -> None:
    if reading.shortfall is None:
        reason = "the memory has become free: started again with unchanged arguments"
        retry = dataclasses.replace(row.plan, action="retry", reason=reason, changes=())
        context.journal.set_plan(row.id, row.verdict, retry)
        return
    verdict = dataclasses.replace(row.verdict, numbers={**row.verdict.numbers, **reading.numbers})
    plan = plan_for(context, verdict, context.journal.incident(row.id), waited=True)
    context.journal.set_plan(row.id, verdict, plan_for_journal(plan))


def hold(context: Context, row: IncidentRow, reason: str) -> State:
    with context.journal.transaction():
        context.launch_id = None
        context.journal.close_incident(row.id, "held")
        return enter(context, "HELD", reason, incident_id=row.id)
