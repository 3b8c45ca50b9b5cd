"""Ending what a dead server left behind: only processes that are proven ours, by pid *and* start time."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil

from .evidence.processes import alive, same
from .incident import ProcessRef

#: EngineCore and Workers have nothing left to save once the API server is dead.
TERM_WAIT_SEC = 5.0
KILL_WAIT_SEC = 10.0
_SLICE_SEC = 0.2


@dataclass(frozen=True)
class EndResult:
    """`survivors` outlived SIGKILL: (process, its state in the kernel's word, such as disk-sleep)."""

    ended: tuple[ProcessRef, ...]
    survivors: tuple[tuple[ProcessRef, str], ...] = ()


def end_processes(refs: tuple[ProcessRef, ...], *, term_wait_sec: float = TERM_WAIT_SEC) -> EndResult:
    """SIGTERM, then SIGKILL. Each signal only after another look that the pid is still that very process."""
    for ref in refs:
        process = _process(ref)
        if process:
            _send(process.terminate)
    left = _wait(refs, term_wait_sec)
    for ref in left:
        process = _process(ref)
        if process:
            _send(process.kill)
    left = _wait(left, KILL_WAIT_SEC)
    survivors = tuple((ref, _state(ref)) for ref in left)
    return EndResult(tuple(ref for ref in refs if ref not in left), survivors)


def _process(ref: ProcessRef) -> psutil.Process | None:
    try:
        process = psutil.Process(ref.pid)
        return process if same(ref, ProcessRef(ref.pid, process.create_time())) else None
    except psutil.Error:
        return None


def _send(signal: Callable[[], None]) -> None:
    """psutil checks pid and start time once more before it sends."""
    # It may end in this moment, or not be ours to end: then the caller names it as a survivor.
    with contextlib.suppress(psutil.Error):
        signal()


def _wait(refs: tuple[ProcessRef, ...], limit_sec: float) -> tuple[ProcessRef, ...]:
    """Those that still live after the limit. A zombie has ended: it holds no memory, its parent has yet to look.

    psutil waits for a zombie of another parent up to the limit, so it waits in short slices.
    """
    end = time.monotonic() + limit_sec
    left = tuple(ref for ref in refs if alive(ref))
    while left and (remaining := end - time.monotonic()) > 0:
        psutil.wait_procs([process for ref in left if (process := _process(ref))], timeout=min(_SLICE_SEC, remaining))
        left = tuple(ref for ref in left if alive(ref))
    return left


def _state(ref: ProcessRef) -> str:
    process = _process(ref)
    try:
        return str(process.status()) if process else "gone"
    except psutil.Error:
        return "gone"
