"""From when to when a log was written, by the dates in its lines."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from ..incident import LogLine
from ..lazy import lazy

#: vLLM's own is `05-01 12:00:00`, with a year only in newer versions; ISO dates of carriers and users' formats.
_DATE = lazy(r"(?<!\d)(?:(\d{4})[-/])?(\d\d)[-/](\d\d)[ T](\d\d):(\d\d):(\d\d)(?!\d)")
_HEAD_CHARS = 200
#: A traceback or a user's text may be long; further than this nobody looks for a date.
_LINES = 500


@dataclass(frozen=True)
class Period:
    """In the log's own zone, which it doesn't say. `year_is_known`: else the year was given from outside."""

    first: datetime
    last: datetime
    year_is_known: bool


def period_of(log: tuple[LogLine, ...], *, year: int) -> Period | None:
    """None: no line has a date. `year`: for dates that have none."""
    first = _first_date(log[:_LINES], year)
    last = _first_date(reversed(log[-_LINES:]), year)
    if first is None or last is None:
        return None
    return Period(first[0], last[0], first[1] and last[1])


def _first_date(lines: Iterable[LogLine], year: int) -> tuple[datetime, bool] | None:
    for line in lines:
        if match := _DATE.search(line.text[:_HEAD_CHARS]):
            numbers = [int(text) for text in match.groups()[1:]]
            try:
                return datetime(int(match[1] or year), *numbers), match[1] is not None  # type: ignore[arg-type]
            except ValueError:  # looks like a date and is none
                continue
    return None
