"""What an exit status and a signal say by themselves: little, and never that it was memory."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from ..incident import Incident
from ..lazy import lazy


@dataclass(frozen=True)
class EndSignal:
    number: int
    name: str
    text: str


_KINDS = {
    signal.SIGBUS: "shm_full",  # a page of /dev/shm that can't be had (#859, #1710)
    signal.SIGSEGV: "engine_crash",
    signal.SIGABRT: "engine_crash",
    signal.SIGFPE: "engine_crash",
    signal.SIGILL: "engine_crash",
    signal.SIGTRAP: "engine_crash",
    signal.SIGSYS: "engine_crash",
}
_SERVER_COMMAND = lazy(r"\bvllm\s+serve\b|api_server\b|\brun_server\b")


def end_signal(incident: Incident) -> EndSignal | None:
    """The signal that ended it: told as such, or as the exit status of a shell (128 + n) or Python (−n)."""
    if incident.signal:
        name = incident.signal.upper()
        name = name if name.startswith("SIG") else f"SIG{name}"
        number = int(getattr(signal, name, 0) or 0)
        if not number and incident.signal.isdigit():
            number = int(incident.signal)
        return EndSignal(number, _name(number) or name, f"terminated by {_name(number) or name}")
    status = incident.exit_status
    if status is None:
        return None
    number = -status if status < 0 else status - 128
    name = _name(number)
    return EndSignal(number, name, f"exit status {status} ({name})") if name and status not in (0, -1, 255) else None


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return ""


def kind_of_signal(number: int) -> str:
    return _KINDS.get(signal.Signals(number), "killed") if _name(number) else "killed"


def looks_like_server(incident: Incident, said_in_log: bool) -> bool:
    return said_in_log or incident.was_healthy or bool(_SERVER_COMMAND.search(incident.command))
