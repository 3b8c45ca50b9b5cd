"""The recovery of one program: the state machine, and the only place that calls all the others.

    WATCHING → DIAGNOSING → WAITING → STARTING → VERIFYING → HEALTHY, or HELD

Each state is a function that waits for what it needs and returns the next state. It is entered in the journal before
it is taken, so that a listener that was killed goes on from there (`resume`). People go first: whatever they do with
the program (start, stop, remove, edit) is an event that ends the wait of any state.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

from . import cleanup, control, health, launch, memory, watch
from .classify import classify
from .context import Context, Stopping, enter, say
from .control import ControlError
from .errors import UserError
from .evidence import device, exit_status, life, processes, vllm_log
from .evidence.life import Life
from .incident import Incident, Plan, Verdict, from_json
from .journal import IncidentRow, State
from .policy.launch_command import redact
from .policy.learned import merge_learned
from .policy.limit import launches_left, restart_delay_sec
from .policy.plan import Attempt, plan_next
from .redaction import for_journal
from .target import health_target, listens

#: While a launch loads, its processes appear one after the other: look often. Later they change no more.
LOADING_TICK_SEC = 0.5
#: A completion that fails this often in a row, while the server lives, is a hang.
FAILED_CHECKS_UNTIL_HUNG = 3
#: supervisord's stop of a hung server: stopwaitsecs (the user's), then SIGKILL of the group.
STOP_LIMIT_SEC = 120.0


def look_after(context: Context) -> None:
    """The whole life of a program's thread. Ends when the listener stops."""
    try:
        state = resume(context)
        while True:
            state = _STEPS[state](context)
    except Stopping:
        return


def resume(context: Context) -> State:
    """From the journal and from what runs now to the state in which to go on. Each step can be taken again."""
    row = context.journal.program(context.name)
    noted = from_json(Life, row.life) if row.life else None
    info = control.process_info(context.server, context.full_name)
    running = processes.process_ref(info.pid) if info and info.pid else None
    context.log_marks = noted.log_marks if noted else ()
    if running and noted and processes.same(noted.leader, running):
        watch.watch(context, noted)
        return row.state if row.state in ("VERIFYING", "HEALTHY", "HELD", "WATCHING") else "VERIFYING"
    if running:
        return _resume_running(context, row.state, running.start_time)
    if noted and info and info.state in ("EXITED", "FATAL", "BACKOFF", "UNKNOWN"):
        context.life = noted
        return enter(context, "DIAGNOSING", "it died while nobody listened", incident_id=row.incident_id)
    if row.state in ("WAITING", "STARTING", "HELD"):
        return row.state
    if info and info.state in watch.DEAD and not watch.is_diagnosed(context, info.stop_time):
        context.launch_id = _planned_launch(context, row.incident_id)
        context.life = watch.unseen_life(context, 0)
        return enter(context, "DIAGNOSING", "it died while nobody listened", incident_id=row.incident_id)
    context.journal.set_life(context.name, None)
    context.log_marks = life.mark_logs(watch.log_paths(context), context.log_marks)
    return enter(context, "WATCHING", "not running; a start by a person is looked after")


def _resume_running(context: Context, state: State, start_time: float) -> State:
    """It runs, but the journal doesn't know this process."""
    row = context.journal.program(context.name)
    if state == "WAITING" and _is_hung(context, row.incident_id):
        return state
    context.launch_id = _planned_launch(context, row.incident_id) if state in ("STARTING", "VERIFYING") else None
    ours = context.launch_id is not None
    if not ours:
        who = watch.who_started(context, start_time)
        context.launch_id = context.journal.add_launch(context.name, who, incident_id=None)
    watch.find_process(context)
    return enter(context, "VERIFYING", "running; being verified", incident_id=row.incident_id if ours else None)


def _is_hung(context: Context, incident_id: int | None) -> bool:
    return incident_id is not None and context.journal.incident_row(incident_id).verdict.kind == "hung"


# -- the states --------------------------------------------------------------------------------------------------------


def watching(context: Context) -> State:
    """Nothing is to be done: it is stopped, or shadow mode looks on."""
    while True:
        state = _wait(context, None)
        if state:
            return state


def diagnosing(context: Context) -> State:
    """Evidence → Incident → Verdict → Plan, written down together."""
    assert context.life is not None
    incident = _gather(context, context.life)
    verdict = classify(incident)
    if incident.gpus == () and verdict.kind.startswith("gpu_"):
        incident = _with_devices(context, incident)
        verdict = memory.with_device_numbers(classify(incident), incident)
    return _decide(context, incident, verdict)


def waiting(context: Context) -> State:
    """Own orphans end, the pause passes, the memory becomes free. Then a launch, if the limit allows one more."""
    row, plan = _current(context)
    state = _clear_away(context, row)
    if state:
        return state
    if plan.action == "hold":
        return _hold(context, row, plan.reason)
    if _launches_left(context) == 0:
        return _hold(context, row, _limit_reason(context, row))
    unchanged = plan.action == "retry" or (plan.action == "wait" and not plan.changes)
    state = _pause(context, row) if unchanged else None
    if state:
        return state
    state = _wait_for_memory(context, row, plan)
    if state:
        return state
    row, plan = _current(context)
    if plan.action == "hold":
        return _hold(context, row, plan.reason)
    restored = memory.without_neighbours(context, row)
    if restored:
        plan = dataclasses.replace(
            plan, changes=(*plan.changes, *restored), reason=f"{plan.reason}; {restored[0].flag}: {restored[0].why}"
        )
        context.journal.set_plan(row.id, row.verdict, plan)
    while event := watch.next_event(context, 0):  # a person may have been quicker
        state = watch.after_event(context, event)
        if state:
            return state
    return enter(context, "STARTING", plan.reason, incident_id=row.id)


def starting(context: Context) -> State:
    """The launch is counted, then the override is written and applied, then the program starts."""
    row, plan = _current(context)
    try:
        base_command = launch.user_section(context).command
    except UserError as why:
        return enter(context, "WATCHING", str(why))
    with context.journal.transaction():
        context.launch_id = _planned_launch(context, row.id)
        if context.launch_id is None:
            context.launch_id = context.journal.add_launch(context.name, "supervisor-vllm", incident_id=row.id)
        learned = merge_learned(launch.learned_changes(context, base_command), plan.changes)
        context.journal.replace_learned(context.name, learned, incident_id=row.id)
    problem = launch.apply_override(context, changed=bool(plan.changes))
    if problem:
        return _hold(context, row, problem)
    context.log_marks = life.mark_logs(watch.log_paths(context), context.log_marks)
    context.own_start = True
    try:
        control.start(context.server, context.full_name)
    except ControlError as why:
        context.own_start = False
        return _hold(context, row, f"supervisord can't start it: {why}")
    watch.find_process(context)
    return enter(context, "VERIFYING", "started; loading", incident_id=row.id)


def verifying(context: Context) -> State:
    """From the start to a real answer. A death on the way is a death like any other."""
    settings = context.settings
    incident_id = context.journal.program(context.name).incident_id
    deadline = context.journal.launches(context.name)[-1].time + settings.load_timeout_sec
    failed_checks = 0
    while True:
        state = _wait(context, LOADING_TICK_SEC)
        if state:
            return state
        watch.find_process(context)
        watch.observe(context)
        if context.life is None:
            continue
        memory.note_baseline(context)
        if time.time() > deadline:
            return _hung(context, f"it was not healthy {settings.load_timeout_sec:g} s after its start")
        target = health_target(context.section, launch.current_command(context), settings)
        if not listens(target):
            continue
        result = health.check_health(target)
        if result.healthy:
            return _verified(context, result, incident_id)
        if result.step == "models" and not result.retry:
            return _wrong_server(context, result, incident_id)
        if result.step == "completion":
            failed_checks += 1
            enter(context, "VERIFYING", result.reason, incident_id=incident_id)
        if failed_checks >= FAILED_CHECKS_UNTIL_HUNG:
            return _hung(context, result.reason)


def healthy(context: Context) -> State:
    """It serves. With health_interval_sec it is asked again and again; one that stands still is hung."""
    interval_sec = context.settings.health_interval_sec
    failed_checks = 0
    while True:
        next_check = time.monotonic() + interval_sec
        while not interval_sec or time.monotonic() < next_check:
            state = _wait(context, max(0.0, next_check - time.monotonic()) if interval_sec else None)
            if state:
                return state
        target = health_target(context.section, launch.current_command(context), context.settings)
        reason = health.check_while_serving(target)
        failed_checks = failed_checks + 1 if reason else 0
        if reason and failed_checks >= FAILED_CHECKS_UNTIL_HUNG:
            return _hung(context, reason)


def held(context: Context) -> State:
    """No launch until a person starts it."""
    while True:
        state = _wait(context, None)
        if state:
            return state


_STEPS: dict[State, Callable[[Context], State]] = {
    "WATCHING": watching,
    "DIAGNOSING": diagnosing,
    "WAITING": waiting,
    "STARTING": starting,
    "VERIFYING": verifying,
    "HEALTHY": healthy,
    "HELD": held,
}


def _wait(context: Context, timeout_sec: float | None) -> State | None:
    """Wait for one event or the time; the state that a person, a death or a tick leads to."""
    event = watch.next_event(context, timeout_sec)
    return watch.after_event(context, event) if event else None


# -- diagnosing --------------------------------------------------------------------------------------------------------


def _gather(context: Context, dead: Life, *, alive: bool = False) -> Incident:
    status, signal = (None, None)
    if not alive:
        log = control.main_log_tail(context.server)
        status, signal = exit_status.exit_in_log(log, context.full_name.partition(":")[2], dead.leader.pid)
    incident = life.gather(
        dead,
        context.roots,
        program=context.name,
        time=_now_text(),
        command=_command_text(context),
        exit_status=status,
        signal=signal,
        stop_requested=False,
    )
    return dataclasses.replace(incident, orphans=()) if alive else incident


def _with_devices(context: Context, incident: Incident) -> Incident:
    devices = memory.read_devices(context, incident)
    return dataclasses.replace(incident, gpus=device.name_holders(devices, own=incident.tree, orphans=incident.orphans))


def _decide(context: Context, incident: Incident, verdict: Verdict) -> State:
    """The plan, and the incident with both into the journal: one transaction, after which the dead life is history."""
    dead = context.life
    assert dead is not None
    plan = _plan(context, verdict, incident, waited=False)
    with context.journal.transaction():
        _close_previous(context, dead)
        incident_id = context.journal.add_incident(for_journal(incident), verdict, _for_journal(plan))
        context.journal.set_life(context.name, None)
        context.journal.set_served(context.name, None)
        say(context.name, f"{verdict.kind} ({verdict.confidence}): {verdict.summary}")
        state: State = "WAITING"
        reason = f"{verdict.kind}: {plan.reason}"
        if plan.action == "none":
            context.journal.close_incident(incident_id, "held")  # it stays down until a person starts it
            state = "WATCHING"
        elif context.settings.mode == "shadow":
            state, reason = "WATCHING", f"shadow mode: would {plan.action}: {plan.reason}"
        enter(context, state, reason, incident_id=incident_id)
    context.life = None
    return state


def _plan(context: Context, verdict: Verdict, incident: Incident, *, waited: bool) -> Plan:
    attempts = tuple(
        Attempt(row.verdict.kind, row.plan.changes) for row in context.journal.incidents_since_healthy(context.name)
    )
    return plan_next(
        verdict,
        _command_text(context),
        context.settings,
        attempts=attempts[:-1] if waited else attempts,
        waited=waited,
        vllm_version=incident.vllm_version,
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
        return launch.current_command(context)
    except UserError:
        return ""


def _for_journal(plan: Plan) -> Plan:
    return dataclasses.replace(plan, command=redact(plan.command))


# -- waiting -----------------------------------------------------------------------------------------------------------


def _current(context: Context) -> tuple[IncidentRow, Plan]:
    incident_id = context.journal.program(context.name).incident_id
    assert incident_id is not None
    row = context.journal.incident_row(incident_id)
    return row, row.plan


def _clear_away(context: Context, row: IncidentRow) -> State | None:
    """What the dead life left behind ends: by pid and start time, nothing else. A hung server is stopped first."""
    if row.verdict.kind == "hung":
        state = _stop_hung(context)
        if state:
            return state
    incident = context.journal.incident(row.id)
    left = tuple(ref for ref in (*incident.orphans, *incident.tree) if processes.alive(ref))
    left = tuple({(ref.pid, ref.start_time): ref for ref in left}.values())
    info = control.process_info(context.server, context.full_name)
    if not left or (info and info.pid):
        return None  # never while the program runs: then a person was quicker than we
    # vLLM gives its processes their names only once they run: the name is the one of now
    now = tuple(processes.process_ref(ref.pid) or ref for ref in left)
    names = ", ".join(f"{ref.name or 'process'} (pid {ref.pid})" for ref in now)
    enter(context, "WAITING", f"ending what the dead server left behind: {names}", incident_id=row.id)
    result = cleanup.end_processes(left)
    if result.survivors:
        say(context.name, f"still there after SIGKILL: {', '.join(map(str, result.survivors))}")
    return None


def _stop_hung(context: Context) -> State | None:
    info = control.process_info(context.server, context.full_name)
    if not info or not info.pid:
        return None
    control.stop(context.server, context.full_name)
    deadline = time.monotonic() + STOP_LIMIT_SEC
    while time.monotonic() < deadline:
        info = control.process_info(context.server, context.full_name)
        if not info or not info.pid:
            return None
        watch.next_event(context, 0.5)  # its STOPPING and STOPPED are of our own making
    return None


def _launches_left(context: Context) -> int | None:
    return launches_left(
        context.journal.own_launch_times(context.name),
        last_healthy_time=context.journal.last_healthy_time(context.name),
        now=time.time(),
        settings=context.settings,
    )


def _limit_reason(context: Context, row: IncidentRow) -> str:
    settings = context.settings
    return (
        f"{settings.start_limit_burst} launches did not help (start_limit_burst); last: {row.verdict.kind}: "
        f"{row.verdict.summary}; when it's cured: supervisorctl start {context.full_name}"
    )


def _pause(context: Context, row: IncidentRow) -> State | None:
    """restart_sec between the death and an unchanged launch."""
    deaths = len(context.journal.incidents_since_healthy(context.name))
    until = row.time + restart_delay_sec(deaths, context.settings)
    if until > time.time():
        enter(context, "WAITING", f"{row.verdict.kind}: {row.plan.reason}", incident_id=row.id)
    while True:
        left_sec = min(until - time.time(), restart_delay_sec(deaths, context.settings))
        if left_sec <= 0:
            return None
        state = _wait(context, left_sec)
        if state:
            return state


def _wait_for_memory(context: Context, row: IncidentRow, plan: Plan) -> State | None:
    """Until what the launch needs is measured as free, or the time is over: then the reason is said, and a plan that
    waited for a neighbour is made anew from what is free now."""
    need = memory.need_of(context, context.journal.incident(row.id), row, plan)
    deadline = time.monotonic() + context.settings.memory_release_timeout_sec
    pause_sec, said = 0.1, False
    while True:
        reading = memory.measure(context, need)
        if reading.shortfall is None:
            break
        if time.monotonic() >= deadline:
            limit = f"{context.settings.memory_release_timeout_sec:g} s"
            enter(context, "WAITING", f"memory is not free after {limit}: {reading.shortfall}", incident_id=row.id)
            break
        if not said:
            enter(
                context, "WAITING", f"{row.verdict.kind}: waiting for memory: {reading.shortfall}", incident_id=row.id
            )
            said = True
        state = _wait(context, min(pause_sec, max(0.0, deadline - time.monotonic())))
        if state:
            return state
        pause_sec = min(pause_sec * 2, 1.0)
    if plan.action == "wait" and plan.changes:
        _plan_after_wait(context, row, reading)
    return None


def _plan_after_wait(context: Context, row: IncidentRow, reading: memory.Reading) -> None:
    if reading.shortfall is None:
        reason = "the memory has become free: started again with unchanged arguments"
        retry = dataclasses.replace(row.plan, action="retry", reason=reason, changes=(), command=row.plan.command)
        context.journal.set_plan(row.id, row.verdict, retry)
        return
    verdict = dataclasses.replace(row.verdict, numbers={**row.verdict.numbers, **reading.numbers})
    plan = _plan(context, verdict, context.journal.incident(row.id), waited=True)
    context.journal.set_plan(row.id, verdict, _for_journal(plan))


def _hold(context: Context, row: IncidentRow, reason: str) -> State:
    with context.journal.transaction():
        context.launch_id = None
        context.journal.close_incident(row.id, "held")
        return enter(context, "HELD", reason, incident_id=row.id)


# -- starting and verifying --------------------------------------------------------------------------------------------


def _planned_launch(context: Context, incident_id: int | None) -> int | None:
    """The launch of this incident that was written down but has no process yet: it counts once, however often the
    listener is killed on the way."""
    for row in context.journal.launches(context.name):
        if row.incident_id == incident_id and row.started_by == "supervisor-vllm" and row.pid is None:
            return row.id
    return None


def _verified(context: Context, result: health.Health, incident_id: int | None) -> State:
    assert context.life is not None
    now = time.time()
    facts = vllm_log.startup_facts(vllm_log.read_life(context.life.log_marks))
    served = {
        "model": result.model,
        "root": result.root,
        "max_model_len": result.max_model_len,
        "weights": {
            "directory": facts.model_path,
            "shards_loaded": facts.shards_loaded,
            "shards_total": facts.shards_total,
            "seconds": facts.loading_seconds,
            "bytes": facts.weights_bytes,
        },
        "kv_tokens": facts.kv_tokens,
        "first_answer_sec": result.latency_seconds,
    }
    with context.journal.transaction():
        context.life = dataclasses.replace(context.life, healthy=True)
        watch.keep(context)
        if context.life.launch_id is not None:
            context.journal.set_launch_healthy(context.life.launch_id, now)
        context.journal.set_served(context.name, served)
        if incident_id is not None:
            context.journal.close_incident(incident_id, "healthy", healthy_time=now)
        return enter(context, "HEALTHY", _healthy_reason(result, facts), incident_id=incident_id)


def _healthy_reason(result: health.Health, facts: vllm_log.StartupFacts) -> str:
    reason = f"a completion came back in {result.latency_seconds or 0:.1f} s"
    if facts.shards_loaded is not None:
        reason += f"; {facts.shards_loaded}/{facts.shards_total} weight files loaded"
    if facts.loading_seconds is not None:
        reason += f" in {facts.loading_seconds:g} s"
    return reason


def _wrong_server(context: Context, result: health.Health, incident_id: int | None) -> State:
    """Another model answers on the port: no restart cures that, and it isn't ours to stop."""
    if incident_id is not None:
        context.journal.close_incident(incident_id, "held")
    return enter(context, "HELD", f"not what was launched: {result.reason}", incident_id=incident_id)


def _hung(context: Context, reason: str) -> State:
    """Alive, but it doesn't answer: an incident like a death. It is stopped after that is written down."""
    assert context.life is not None
    incident = _gather(context, context.life, alive=True)
    verdict = Verdict("hung", "likely", reason)
    return _decide(context, incident, verdict)


def _now_text() -> str:
    from datetime import datetime

    return datetime.now().astimezone().isoformat(timespec="milliseconds")
