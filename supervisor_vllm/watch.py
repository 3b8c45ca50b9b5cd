"""What goes on while a program lives: supervisord's events, the pidfd, the list of its processes, the user's files."""

from __future__ import annotations

import os
import time

from . import control, launch, output, user_file
from .context import Context, Stopping, enter, say
from .control import ControlError
from .errors import UserError
from .evidence import life, processes
from .evidence.life import Life
from .inbox import PID_DIED, STOP, TICK, Event
from .incident import ProcessRef, to_json
from .journal import StartedBy, State
from .policy.launch_command import redact

#: A launch within this time of the listener's own start came with supervisord's start, not from a person.
AUTOSTART_WINDOW_SEC = 10.0
#: supervisord's states of a program that has died.
DEAD = ("EXITED", "FATAL")
#: And of one that has died, too: too soon after its start (it becomes FATAL, or starts once more), or unknown to it.
DYING = (*DEAD, "BACKOFF", "UNKNOWN")


def wait(context: Context, timeout_sec: float | None) -> State | None:
    """Wait for one event or the time; the state that a person, a death or a tick leads to."""
    event = next_event(context, timeout_sec)
    return after_event(context, event) if event else None


def next_event(context: Context, timeout_sec: float | None) -> Event | None:
    """The next event for a step to judge; None when the time is over.

    The death of the watched pid is not an event by itself: supervisord would say it 1 to 2 s later, so it is poked, and
    says it at once (measured, supervisor 4.3.0: 2 ms). Its event stays the truth.
    """
    event = context.inbox.take(timeout_sec, pidfd=context.pidfd)
    if event is None:
        return None
    if event.name == STOP:
        raise Stopping
    if event.name == PID_DIED:
        _unwatch(context)
        _poke(context)
        return next_event(context, timeout_sec)
    return event


def after_event(context: Context, event: Event) -> State | None:
    """The state that an event leads to, whatever state the program is in; None: it changes nothing."""
    if event.name == TICK:
        return _tick(context)
    if event.name == "STARTING":
        return _starting(context, event)
    if event.name == "RUNNING":
        return _running(context, event)
    if event.name in ("EXITED", "FATAL"):
        return _dead(context, event)
    if event.name in ("STOPPING", "STOPPED"):
        return _stopped(context, event)
    if event.name == "GROUP_REMOVED":
        return _removed(context)
    return None


def _starting(context: Context, event: Event) -> State | None:
    if context.own_start:
        context.own_start = False
        return None
    if context.life and processes.alive(context.life.leader):
        return None  # the start of the life that is being watched: seen before its event came
    info = control.process_info(context.server, context.full_name)
    if info is None or info.state == "STOPPED" or (info.state in DEAD and is_diagnosed(context, info.stop_time)):
        return None  # of a life that is over, and known: events that waited while the listener was away
    started_by = who_started(context, time.time(), event.from_state)
    _forget_life(context)
    incident_id = _open_incident(context)
    context.launch_id = context.journal.add_launch(context.name, started_by, incident_id=incident_id)
    find_process(context)
    by = "a person" if started_by == "person" else "supervisord"
    return enter(context, "VERIFYING", f"started by {by}; loading", incident_id=incident_id)


def _running(context: Context, event: Event) -> State | None:
    if context.life and event.pid == context.life.leader.pid:
        return None
    leader = processes.process_ref(event.pid) if event.pid else None
    if leader is None:
        return None  # it is dead already: its EXITED event follows
    if context.launch_id is None:
        context.launch_id = context.journal.add_launch(
            context.name, who_started(context, leader.start_time), incident_id=None, pid=leader.pid
        )
        begin_life(context, leader)
        return enter(context, "VERIFYING", "running; being verified")
    begin_life(context, leader)
    return None


def _dead(context: Context, event: Event) -> State | None:
    if context.life is None and context.launch_id is None:
        return None  # the death of a life that was diagnosed already
    if context.life and not _is_of(context.life, event):
        return None  # the death of an earlier life: an event that waited while the listener was away
    output.settle(context)
    if context.life is None:
        context.life = unseen_life(context, event.pid or 0)
    row = context.journal.program(context.name)
    return enter(context, "DIAGNOSING", f"{event.name.lower()}; looking for the reason", incident_id=row.incident_id)


def _is_of(born: Life, event: Event) -> bool:
    """FATAL has no pid: then the life must really be over."""
    if event.pid and born.leader.pid not in (0, event.pid):
        return False
    return not processes.alive(born.leader)


def is_diagnosed(context: Context, stop_time: int) -> bool:
    """Is the last death that supervisord knows of in the journal? (It keeps no pid of it, only the second.)"""
    incidents = context.journal.incidents(context.name)
    return bool(incidents) and incidents[-1].time >= stop_time


def _stopped(context: Context, event: Event) -> State | None:
    if event.name == "STOPPING":
        return None
    if context.life is None and context.launch_id is None and context.journal.program(context.name).state != "WATCHING":
        return None  # a hung server that we stopped ourselves
    _forget_life(context)
    _close_open_incident(context)
    context.log_marks = life.mark_logs(log_paths(context), context.log_marks)
    return enter(context, "WATCHING", "stopped by a person or a shutdown; a start brings it back")


def _removed(context: Context) -> State | None:
    if control.process_info(context.server, context.full_name) is not None:
        return None  # removed and added again: by our own apply, or by somebody's `update`
    _forget_life(context)
    _close_open_incident(context)
    return enter(context, "WATCHING", "removed from supervisord by a person")


def _tick(context: Context) -> State | None:
    observe(context)
    gone = user_file.follow_user_file(context)
    if gone and context.journal.program(context.name).state != "WATCHING":
        return enter(context, "WATCHING", gone)
    return None


def _poke(context: Context) -> None:
    try:
        control.poke(context.server)
    except ControlError as why:
        say(context.name, f"supervisord can't be poked ({why}); its event comes a little later")


def _open_incident(context: Context) -> int | None:
    """The last incident, while its end is open: whoever starts the program, that launch is its outcome."""
    incident_id = context.journal.program(context.name).incident_id
    if incident_id is None or context.journal.incident_row(incident_id).outcome != "running":
        return None
    return incident_id


def _close_open_incident(context: Context) -> None:
    incident_id = _open_incident(context)
    if incident_id is not None:
        context.journal.close_incident(incident_id, "held")


# -- the life ----------------------------------------------------------------------------------------------------------


def who_started(context: Context, when: float, from_state: str | None = None) -> StartedBy:
    """A start that isn't ours: supervisord's own, or a person's.

    supervisord starts by itself what it tries again (BACKOFF), what the override doesn't keep it from (shadow mode),
    and, with its own start, what has autostart: that comes from STOPPED, and within seconds of the listener's start.
    """
    if context.settings.mode == "shadow" or from_state == "BACKOFF":
        return "supervisord"
    with_supervisord = when < context.started_time + AUTOSTART_WINDOW_SEC
    return "supervisord" if with_supervisord and from_state in (None, "STOPPED") else "person"


def process_now(context: Context) -> tuple[control.ProcessInfo | None, ProcessRef | None]:
    """supervisord's word of the program, and its process: None while there is none.

    A word from between two of supervisord's turns is asked for again (each call makes it take a turn, measured): a
    process that is gone by now, or BACKOFF, which startretries=0 turns into FATAL.
    """
    for _ in range(5):
        info = control.process_info(context.server, context.full_name)
        running = processes.process_ref(info.pid) if info and info.pid else None
        if info is None or running or not (info.pid or info.state == "BACKOFF"):
            break
    return info, running


def find_process(context: Context) -> None:
    """The process of a launch that is under way, as soon as it can be seen."""
    if context.life is not None or context.launch_id is None:
        return
    info = control.process_info(context.server, context.full_name)
    leader = processes.process_ref(info.pid) if info and info.pid else None
    if leader:
        begin_life(context, leader)


def begin_life(context: Context, leader: ProcessRef) -> None:
    assert context.launch_id is not None
    marks = context.log_marks or life.mark_logs(log_paths(context), ())
    born = life.begin(leader, marks, context.roots, launch_id=context.launch_id)
    with context.journal.transaction():
        context.journal.set_launch_process(context.launch_id, leader.pid, _command(context))
        watch(context, born)
    context.launch_id = None


def _command(context: Context) -> str | None:
    try:
        return redact(launch.current_command(context))
    except UserError:  # the section is being edited
        return None


def watch(context: Context, born: Life) -> None:
    _unwatch(context)
    context.life = born
    context.pidfd = processes.open_pidfd(born.leader.pid)
    keep(context)


def keep(context: Context) -> None:
    """The life as it is known now, into the journal."""
    context.journal.set_life(context.name, to_json(context.life))


def observe(context: Context) -> None:
    """Add the processes that have appeared to the life's list."""
    if context.life is None:
        return
    now = life.observe(context.life, context.roots)
    if now is not context.life:
        context.life = now
        keep(context)


def unseen_life(context: Context, pid: int) -> Life:
    """A life too short to be seen: its log is all that is left of it."""
    launch_id, context.launch_id = context.launch_id, None
    started = context.journal.launch(launch_id).time if launch_id is not None else context.started_time
    return Life(
        leader=ProcessRef(pid, started),
        tree=(),
        log_marks=context.log_marks or life.mark_logs(log_paths(context), ()),
        boot_seconds=processes.boot_seconds_now() - max(0.0, time.time() - started) - 1.0,
        launch_id=launch_id,
    )


def _forget_life(context: Context) -> None:
    _unwatch(context)
    context.life = None
    context.launch_id = None
    context.journal.set_life(context.name, None)


def _unwatch(context: Context) -> None:
    if context.pidfd is not None:
        os.close(context.pidfd)
        context.pidfd = None


def log_paths(context: Context) -> tuple[str, ...]:
    """The files that hold the program's log now, with all that it wrote before its end: stdout's, and stderr's where
    that is another one. What isn't a file (a terminal, a pipe, nothing) can't be read back: the output listener's file
    stands in for it, where there is one."""
    output.settle(context)
    info = control.process_info(context.server, context.full_name)
    if info is None:
        return ()
    captured = output.captured_paths(context)
    named = {"stdout": info.stdout_logfile, "stderr": info.stderr_logfile}
    paths = (path if output.is_log_file(path) else captured.get(channel) for channel, path in named.items())
    return tuple(dict.fromkeys(path for path in paths if path))
