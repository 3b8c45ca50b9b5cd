"""What carried the log to us, taken off before vLLM's own lines are read: Docker's and the kubelet's files, journald's
JSON, supervisord's event stream, and what Ray adds where it folds lines that are alike.

Carriers cut long lines (Docker and containerd at 16 KiB, supervisord anywhere): the parts are joined again. What an
unknown carrier puts in front of each line is learned from the lines in which vLLM's own beginning stands behind it.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from ..incident import LogLine
from ..lazy import lazy

# containerd and CRI-O, https://kubernetes.io/docs/concepts/cluster-administration/logging: P is a part of a line
_CRI = lazy(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d{1,9})?(?:Z|[+-]\d\d:\d\d) (stdout|stderr) ([FP])(?::\S{0,20})? ?")
# supervisor 4.x events.py, http://supervisord.org/events.html
_EVENT = lazy(
    r"ver:3\.0 server:\S{0,80} serial:\d{1,19} pool:\S{1,80} poolserial:\d{1,19} eventname:(\w{1,60}) len:\d{1,19}"
)
_EVENT_OF = lazy(r"processname:\S{1,200} groupname:\S{1,200} pid:\d{1,10}(?: channel:(\w{1,10}))?$")
# ray/_private/ray_logging (2.x): the same line of several processes stands once
_RAY_FOLDED = lazy(
    r" ?\[repeated \d{1,9}x across (?:cluster|all nodes)\](?: \(Ray deduplicates logs by default.{0,300})?$"
)
#: JSON records of a carrier, by the key that holds the program's own line; vLLM's own JSON records have no such key.
_JSON_KEYS = ("log", "MESSAGE", "textPayload")


class _Part(NamedTuple):
    """A carrier's record. `complete`: the line ends here. `stream`: parts of one line have the same."""

    stream: str
    text: str
    complete: bool


def unwrap(lines: Iterable[LogLine]) -> Iterator[LogLine]:
    """The program's own lines, with the numbers of the carrier's. Blank ones are left out."""
    begun: dict[str, LogLine] = {}
    for line in _without_events(lines):
        parts = _parts(line.text)
        if parts is None:
            if not line.text.isspace() and line.text:
                yield _unfolded(line)
            continue
        for part in parts:
            before = begun.pop(part.stream, None)
            whole = replace(before or line, text=before.text + part.text if before else part.text)
            if part.complete:
                yield from _without_returns(_unfolded(whole))
            else:
                begun[part.stream] = whole
    yield from begun.values()


def _without_returns(line: LogLine) -> Iterator[LogLine]:
    """The states of a progress bar, which are one line to the carrier."""
    if "\r" not in line.text:
        yield line
        return
    for text in line.text.split("\r"):
        if text.strip():
            yield replace(line, text=text)


#: A prefix is believed when so many of vLLM's lines have it, and at least that share of them.
_LEARN_LINES = 5
_LEARN_SHARE = 0.6
_LEARN_FROM = 2000
_OWN_BEGINNING = lazy(
    r"(?:\([A-Za-z]\w{2,30}(?: \w{1,20}){0,3} pid=\d{1,10}\) )?"
    r"(?:DEBUG|INFO|WARNING|ERROR) \d\d-\d\d \d\d:\d\d:\d\d \[?[\w./-]{1,80}:\d"
)


def without_unknown_prefix(lines: list[LogLine], known: Callable[[str], str]) -> list[LogLine]:
    """The lines without what an unknown carrier put in front of each: so many words, with these spaces between.

    `known` takes off what is known: what is left before vLLM's own beginning is the unknown.
    """
    shapes: Counter[str] = Counter()
    total = 0
    for line in lines[:_LEARN_FROM]:
        if _OWN_BEGINNING.match(line.text):  # nothing in front of it: most logs are such
            total += 1
            continue
        text = known(line.text[:400])
        match = _OWN_BEGINNING.search(text)
        if match is None:
            continue
        total += 1
        if match.start():
            shapes[_shape(text[: match.start()])] += 1
    shape, count = next(iter(shapes.most_common(1)), ("", 0))
    if count < max(_LEARN_LINES, _LEARN_SHARE * total):
        return lines
    prefix = re.compile(shape)

    def stripped(line: LogLine) -> LogLine:
        text = known(line.text)
        match = prefix.match(text)
        return replace(line, text=text[match.end() :]) if match else line

    return [stripped(line) for line in lines]


def _shape(prefix: str) -> str:
    """Words may change (times, hosts, streams), the spaces between them don't; columns are padded."""
    words = prefix.split()
    inner = r"\s{1,20}".join(r"\S{1,200}" for _ in words)
    return r"\s{0,20}" + inner + re.escape(prefix[len(prefix.rstrip()) :])


def _unfolded(line: LogLine) -> LogLine:
    text = line.text.rstrip()
    if text.endswith((" cluster]", "nodes]", ".)")) and "[repeated " in text:
        text = _RAY_FOLDED.sub("", text)
    return line if text == line.text else replace(line, text=text)


def _parts(text: str) -> list[_Part] | None:
    """None: no carrier's record."""
    if text[:1] == "{":
        return _json_parts(text)
    if text[4:5] == "-" and (match := _CRI.match(text)):
        return [_Part(match[1], text[match.end() :], match[2] == "F")]
    return None


def message_text(value: object) -> str | None:
    """journald writes what is no valid UTF-8, or has colours in it, as an array of bytes. None: no text."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(byte, int) and 0 <= byte <= 255 for byte in value):
        return bytes(value).decode("utf-8", errors="replace")
    return None


def _json_parts(text: str) -> list[_Part] | None:
    if not any(f'"{key}"' in text for key in _JSON_KEYS):
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    key = next((key for key in _JSON_KEYS if key in value), None)
    if key is None:
        return None
    own = message_text(value[key])
    if own is None:
        return []
    stream = str(value.get("stream", ""))
    complete = own.endswith("\n") or key != "log" or "stream" not in value
    lines = own.removesuffix("\n").split("\n")
    return [_Part(stream, part, complete or index < len(lines) - 1) for index, part in enumerate(lines)]


def _without_events(lines: Iterable[LogLine]) -> Iterator[LogLine]:
    """The payloads of supervisord's PROCESS_LOG events; of other events nothing. Lines without events: unchanged."""
    in_events = False
    wanted = False  # the payload of this event is the program's output
    begun: LogLine | None = None  # the next event may go on in the middle of its line
    for line in lines:
        if not in_events and "eventname:" not in line.text:
            yield line
            continue
        match = _EVENT.search(line.text)
        if match is None:
            if wanted and not _EVENT_OF.match(line.text):
                yield replace(begun, text=begun.text + line.text) if begun else line
                begun = None
            continue
        cut = line.text[: match.start()]
        if cut and (wanted or not in_events):
            begun = replace(begun, text=begun.text + cut) if begun else replace(line, text=cut)
        in_events = True
        wanted = match[1].startswith("PROCESS_LOG")
    if begun:
        yield begun
