"""supervisord's event listener protocol, for the listener and for the output listener.

One stray byte on stdout and supervisord never sends an event again, so stdout is moved out of everybody's reach first.
Each event is answered as soon as it is read: supervisord's buffer throws the *oldest* event away when a listener is
slow (measured).
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from typing import NamedTuple, TextIO


class SupervisordEvent(NamedTuple):
    """`serial` counts supervisord's events: the same event has the same number for every listener (supervisor 4.3.0
    process.py, _acceptEvent). `payload` keeps bytes that are no UTF-8 as surrogates."""

    name: str
    serial: int
    payload: str


def take_stdin() -> TextIO:
    """Only a line feed ends a line. With newline="" a payload that ends in a carriage return (a progress bar) would
    keep the reader waiting for the byte after it, which never comes (measured)."""
    return io.TextIOWrapper(os.fdopen(os.dup(0), "rb"), encoding="utf-8", errors="surrogateescape", newline="\n")


def take_stdout() -> TextIO:
    """The protocol's own copy of stdout; fd 1 becomes stderr, so that no library's print reaches supervisord."""
    protocol_out = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return protocol_out


def read_events(protocol_in: TextIO, protocol_out: TextIO) -> Iterator[SupervisordEvent]:
    """One event after the other, each answered before it is handed on. Ends at the end of file.

    The header's `len` counts characters, not bytes (supervisor 4.3.0 process.py: len of a str).
    """
    _write(protocol_out, "READY\n")
    while header := protocol_in.readline():
        fields = dict(token.split(":", 1) for token in header.split() if ":" in token)
        payload = protocol_in.read(int(fields.get("len", "0")))
        _write(protocol_out, "RESULT 2\nOKREADY\n")
        yield SupervisordEvent(fields.get("eventname", ""), int(fields.get("serial", "0")), payload)


def _write(protocol_out: TextIO, text: str) -> None:
    protocol_out.write(text)
    protocol_out.flush()
