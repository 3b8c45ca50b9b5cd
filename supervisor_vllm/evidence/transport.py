"""What carried the log to us."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..incident import LogLine


def unwrap(lines: Iterable[LogLine]) -> Iterator[LogLine]:
    yield from lines
