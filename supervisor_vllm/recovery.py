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

from . import back_up, control, diagnosis, health, launch, memory, output, preparation, remembered, watch
from .context import Context, Stopping, enter
from .control import ControlError
from .errors import UserError
from .evidence import life, processes, vllm_log
from .evidence.life import Life
from .incident import Change, from_json
from .journal import IncidentRow, State
from .policy.learned import merge_learned
from .policy.step_up import is_step_up
from .target import health_target, listens, shape_of

#: While a launch loads, its processes appear one after the other: look often. Later they change no more.
LOADING_TICK_SEC = 0.5
#: A completion that fails this often in a row, while the server lives, is a hang.
FAILED_CHECKS_UNTIL_HUNG = 3


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
    info, running = watch.process_now(context)
    context.log_marks = noted.log_marks if noted else ()
    if running and noted and processes.same(noted.leader, running):
        watch.watch(context, noted)
        return row.state if row.state in ("VERIFYING", "HEALTHY", "HELD", "WATCHING") else "VERIFYING"
    context.leftovers = noted.tree if noted else ()
    if running:
        return _resume_running(context, row.state, running.start_time)
    if noted and info and info.state in watch.DYING:
        context.life = noted
        output.settle(context, unseen=True)
        return enter(context, "DIAGNOSING", "it died while nobody listened", incident_id=row.incident_id)
    if row.state in ("WAITING", "STARTING", "HELD"):
        return row.state
    if info and info.state in watch.DYING and not watch.is_diagnosed(context, info.stop_time):
        output.settle(context, unseen=True)
        context.launch_id = _planned_launch(context, row.incident_id)
        context.life = watch.unseen_life(context, 0)
        return enter(context, "DIAGNOSING", "it died while nobody listened", incident_id=row.incident_id)
    context.journal.set_life(context.name, None)
    context.log_marks = life.mark_logs(watch.log_paths(context), context.log_marks)
    return enter(context, "WATCHING", "not running; a start by a person is looked after")


def _resume_running(context: Context, state: State, start_time: float) -> State:
    """It runs, but the journal doesn't know this process."""
    row = context.journal.program(context.name)
    if state == "WAITING" and _lives_on(context, row.incident_id):
        return state
    context.launch_id = _planned_launch(context, row.incident_id) if state in ("STARTING", "VERIFYING") else None
    ours = context.launch_id is not None
    if not ours:
        who = watch.who_started(context, start_time)
        context.launch_id = context.journal.add_launch(context.name, who, incident_id=None)
    watch.find_process(context)
    return enter(context, "VERIFYING", "running; being verified", incident_id=row.incident_id if ours else None)


def _lives_on(context: Context, incident_id: int | None) -> bool:
    return incident_id is not None and preparation.stops_first(context.journal.incident_row(incident_id))


# -- the states --------------------------------------------------------------------------------------------------------


def watching(context: Context) -> State:
    """Nothing is to be done: it is stopped, or shadow mode looks on."""
    while True:
        state = watch.wait(context, None)
        if state:
            return state


def diagnosing(context: Context) -> State:
    """Evidence → Incident → Verdict → Plan, written down together."""
    return diagnosis.diagnose(context)


def waiting(context: Context) -> State:
    """Own orphans end, the pause passes, the memory becomes free. Then a launch, if the limit allows one more."""
    row, plan = preparation.current(context)
    preparation.clear_away(context, row)
    if plan.action == "hold":
        return preparation.hold(context, row, plan.reason)
    if launch.launches_left(context) == 0:
        return preparation.hold(context, row, preparation.limit_reason(context, row))
    unchanged = plan.action in ("retry", "wait") and not preparation.waits_for_neighbour(row, plan)
    state = preparation.pause(context, row) if unchanged else None
    if state:
        return state
    state = preparation.wait_for_memory(context, row, plan)
    if state:
        return state
    row, plan = preparation.current(context)
    if plan.action == "hold":
        return preparation.hold(context, row, plan.reason)
    given_back = _given_back(context, row)
    if given_back:
        words = "; ".join(f"{change.flag} {change.to or 'as you have it'}: {change.why}" for change in given_back)
        plan = dataclasses.replace(plan, changes=(*plan.changes, *given_back), reason=f"{plan.reason}; {words}")
        context.journal.set_plan(row.id, row.verdict, plan)
    while event := watch.next_event(context, 0):  # a person may have been quicker
        state = watch.after_event(context, event)
        if state:
            return state
    return enter(context, "STARTING", plan.reason, incident_id=row.id)


def _given_back(context: Context, row: IncidentRow) -> tuple[Change, ...]:
    """What a restart that happens anyway gives back: the price of a neighbour that left, a step after a quiet time."""
    if any(is_step_up(change) for change in row.plan.changes):
        return ()  # noted already, by a listener that was killed on the way
    restored = memory.without_neighbours(context, row)
    due = back_up.changes_due(context, row, shape_of(context.section, launch.current_command(context)))
    flags = {change.flag for change in restored}
    return (*restored, *(change for change in due if change.flag not in flags))


def starting(context: Context) -> State:
    """The launch is counted, then the override is written and applied, then the program starts."""
    row, plan = preparation.current(context)
    try:
        base_command = launch.user_section(context).command
    except UserError as why:
        return enter(context, "WATCHING", str(why))
    with context.journal.transaction():
        context.launch_id = _planned_launch(context, row.id)
        if context.launch_id is None:
            context.launch_id = context.journal.add_launch(context.name, "supervisor-vllm", incident_id=row.id)
        back_up.note(context, context.launch_id, plan.changes)
        learned = merge_learned(launch.learned_changes(context, base_command), plan.changes)
        context.journal.replace_learned(context.name, learned, incident_id=row.id)
    marks = life.mark_logs(watch.log_paths(context), context.log_marks)
    problem = launch.apply_override(context, changed=bool(plan.changes))
    if problem:
        return preparation.hold(context, row, problem)
    # with autostart it runs from the moment in which its group is added, and AUTO gives it a new file then
    context.log_marks = life.marks_of(watch.log_paths(context), marks)
    context.own_start = True
    try:
        control.start(context.server, context.full_name)
    except ControlError as why:
        context.own_start = False
        return preparation.hold(context, row, f"supervisord can't start it: {why}")
    watch.find_process(context)
    return enter(context, "VERIFYING", "started; loading", incident_id=row.id)


def verifying(context: Context) -> State:
    """From the start to a real answer. A death on the way is a death like any other."""
    settings = context.settings
    incident_id = context.journal.program(context.name).incident_id
    deadline = context.journal.launches(context.name)[-1].time + settings.load_timeout_sec
    launch.adopt_hand_edits(context)
    target = health_target(context.section, launch.current_command(context), settings)
    failed_checks = 0
    while True:
        state = watch.wait(context, LOADING_TICK_SEC)
        if state:
            return state
        watch.find_process(context)
        watch.observe(context)
        if context.life is None:
            continue
        memory.note_baseline(context)
        if time.time() > deadline:
            return diagnosis.hung(context, f"it was not healthy {settings.load_timeout_sec:g} s after its start")
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
            return diagnosis.hung(context, result.reason)


def healthy(context: Context) -> State:
    """It serves. With health_interval_sec it is asked again and again; one that stands still is hung."""
    interval_sec = context.settings.health_interval_sec
    failed_checks = 0
    while True:
        next_check = time.monotonic() + interval_sec
        while not interval_sec or time.monotonic() < next_check:
            state = watch.wait(context, max(0.0, next_check - time.monotonic()) if interval_sec else None)
            if state := state or _step_up(context):
                return state
        target = health_target(context.section, launch.current_command(context), context.settings)
        reason = health.check_while_serving(target)
        failed_checks = failed_checks + 1 if reason else 0
        if reason and failed_checks >= FAILED_CHECKS_UNTIL_HUNG:
            return diagnosis.hung(context, reason)


def _step_up(context: Context) -> State | None:
    """In the operator's window: a restart of its own, where one is due. supervisord's ticks lead here."""
    if context.life is None or not back_up.window_is_open(context):
        return None
    return diagnosis.step_up(context, shape_of(context.section, launch.current_command(context)))


def held(context: Context) -> State:
    """No launch until a person starts it."""
    while True:
        state = watch.wait(context, None)
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
        remembered.remember(context)
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
