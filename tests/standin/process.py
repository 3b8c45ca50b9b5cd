"""Names, channels and ends of the stand-in's processes."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

_PR_SET_NAME = 15
#: Of /proc/self/stat, counted after the name's closing bracket: fields 48 and 49 of proc(5).
_ARG_START, _ARG_END = 45, 46


def rename(title: str) -> None:
    """What setproctitle does: the comm (15 bytes of it are kept) and the command line."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, title.encode(), 0, 0, 0)
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[_ARG_START]), int(fields[_ARG_END])
    ctypes.memmove(start, title.encode()[: end - start - 1].ljust(end - start, b"\0"), end - start)


class Channel:
    """JSON objects over one end of a socket pair. `receive` gives None when the other process is gone."""

    def __init__(self, end: socket.socket) -> None:
        self.end = end
        self._buffer = b""

    def fileno(self) -> int:
        return self.end.fileno()

    def send(self, message: dict[str, object]) -> None:
        try:
            self.end.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            return

    def receive(self) -> dict[str, object] | None:
        while b"\n" not in self._buffer:
            try:
                data = self.end.recv(65536)
            except OSError:
                return None
            if not data:
                return None
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        message: dict[str, object] = json.loads(line)
        return message


def start(body: Callable[[Channel], int], close: tuple[socket.socket | Channel, ...] = ()) -> tuple[int, Channel]:
    """Fork a child that runs `body` with its end of a channel and exits with what that returns.

    Gives the pid and our end. The child closes `close`: what isn't its own.
    """
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid:
        theirs.close()
        return pid, Channel(ours)
    code = 70
    try:
        ours.close()
        for item in close:
            (item.end if isinstance(item, Channel) else item).close()
        code = body(Channel(theirs))
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def reap(pid: int, limit_sec: float) -> int | None:
    """The exit code as multiprocessing counts it (a signal is negative); None when it lives on."""
    end = time.monotonic() + limit_sec
    while True:
        try:
            done, status = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            return 0
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() >= end:
            return None
        time.sleep(0.005)


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def lose_sigterm() -> None:
    """Measured with vLLM 0.32: a SIGTERM that comes while it loads is lost."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def heed_sigterm(action: Callable[[int], None]) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _frame: action(received))
