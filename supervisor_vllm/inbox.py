"""Where one program's thread waits: for an event of supervisord, for the death of a pid, or for a time to pass."""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections import deque
from dataclasses import dataclass, field

#: Not supervisord's: the pid of the life that is being watched is dead (its pidfd became readable).
PID_DIED = "PID_DIED"
#: Not supervisord's: the listener is going.
STOP = "STOP"
#: supervisord's TICK_5.
TICK = "TICK"


@dataclass(frozen=True)
class Event:
    """An event of supervisord about this program. `name` without PROCESS_STATE_ (EXITED, FATAL, …), or TICK.

    `pid` is None where supervisord doesn't say it (STARTING, BACKOFF, FATAL).
    """

    name: str
    pid: int | None = None
    from_state: str | None = None
    expected: bool | None = None


@dataclass
class Inbox:
    """Events for one program, in order. Filled by the protocol's thread, emptied by the program's own."""

    _events: deque[Event] = field(default_factory=deque)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _wake: tuple[int, int] = field(default_factory=lambda: os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC))

    def put(self, event: Event) -> None:
        with self._lock:
            self._events.append(event)
        with contextlib.suppress(BlockingIOError):  # it has been woken often enough
            os.write(self._wake[1], b".")

    def take(self, timeout_sec: float | None, *, pidfd: int | None = None) -> Event | None:
        """The next event; None when the time is over. With `pidfd`, PID_DIED as soon as that process is dead."""
        deadline = None if timeout_sec is None else time.monotonic() + timeout_sec
        while True:
            with self._lock:
                if self._events:
                    return self._events.popleft()
            left_ms = None if deadline is None else max(0.0, (deadline - time.monotonic()) * 1000)
            poll = select.poll()
            poll.register(self._wake[0], select.POLLIN)
            if pidfd is not None:
                poll.register(pidfd, select.POLLIN)
            ready = {fd for fd, _ in poll.poll(left_ms)}
            if self._wake[0] in ready:
                self._drain()
                continue
            if pidfd is not None and pidfd in ready:
                return Event(PID_DIED)
            return None

    def _drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while os.read(self._wake[0], 4096):
                pass
