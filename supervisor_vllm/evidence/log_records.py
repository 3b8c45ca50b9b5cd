"""The shape of a line in vLLM's log: who wrote it, how serious it is, and what it says.

All versions' formats (vLLM 0.6 to 0.33: logging_utils/formatter.py, utils/system_utils.py decorate_logs), uvicorn's,
c10's (`[E1001 16:06:04.5 file.cpp:607]`), Ray's, JSON records, and what containers and journald put in front.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ..incident import LogLine
from ..lazy import lazy

#: What stands behind this in one line decides nothing, and keeps a 20 MiB line from costing minutes.
MAX_BODY_CHARS = 8192

# also as `cat -v` writes it
_ANSI = lazy(r"\^\[\[[0-9;]{0,20}m|\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")

# In front of the program's own text: docker compose, kubernetes and docker timestamps, cloud consoles, journald,
# a program's own tag, torch's rank.
_LEVEL = r"(?:DEBUG|INFO|WARNING|ERROR|CRITICAL)"
_ISO = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)"
_FOREIGN = lazy(
    r"(?:[\w.-]{1,64}\s{0,8}\|\s"
    r"|" + _ISO + r"\s{1,4}(?:std(?:out|err)\s[FP]\s)?"
    r"|\s{0,4}\|?\s?\[" + _ISO + r"\] "
    r"|" + _LEVEL + " " + _ISO + r" \[[\w.: -]{1,80}\] "
    r"|\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[.,]\d{1,9} (?=\()"
    r"|\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:[.,]\d{1,9})?\] "
    r"|\(raylet(?:, ip=[\d.]{7,15})?\) "
    r"|(?:> ?){1,3}(?=\S)"
    r"|\[\d\d:\d\d:\d\d\] (?:\w{1,12}/[A-Z]{4,8} {1,3})?"
    r"| {1,8}(?=" + _LEVEL + r" \d\d-\d\d )"
    r"|\[[\w.-]{1,32}\] (?=\(|" + _LEVEL + r"\b)"
    r"|\"(?=" + _LEVEL + r" )"
    r"|\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[.,]\d{1,9} \[\w{1,12}\] (?:\(Process\) )?"
    r"|[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d [\w.-]{1,64} [\w.@-]{1,64}(?:\[\d+\])?: "
    r"|\[rank\d+\]:\s?)"
)
# `(EngineCore_DP0 pid=68) `, nested `(EngineCore_0 pid=5) (VllmWorker TP0 pid=9) `, `(RayWorkerWrapper pid=7, ip=…) `
# (Ray: `(MapWorker(MapBatches(x)) pid=7) `)
_PROCESS = lazy(r"\(([A-Za-z].{0,80}?)\s?\bpid=(\d{1,10})(,[^()]{0,80})?\)\s?")
_HEADER = lazy(
    r"(DEBUG|INFO|WARNING|ERROR|CRITICAL)\s(?:\d{4}-)?\d\d-\d\d[ T]\d\d:\d\d(?::\d\d(?:[.,]\d{1,9})?)? "
    r"\[?([\w./-]{1,200}):\d{1,6}\] ?"
)
# in reports: without the date
_SHORT_HEADER = lazy(r"(DEBUG|INFO|WARNING|ERROR|CRITICAL) {1,4}\[([\w./-]{1,200}\.py)(?::\d{1,6})?\] {1,4}")
_UVICORN = lazy(r"(DEBUG|INFO|WARNING|ERROR|CRITICAL): {2,9}")
_C10 = lazy(r"\[([IWEF])(?:\d{3,4} \d\d:\d\d:\d\d\.\d{1,9}|\.{3}|…) (?:\d{1,10} )?([\w./-]{1,200}):\d{1,6}\] ?")
_STAMPED = lazy(
    r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?\s[-|:\[\s]{0,4}(?:[\w.]{1,60}\s[-|]\s)?"
    r"(DEBUG|INFO|WARNING|ERROR|CRITICAL)\b[\]\s:|-]{0,5}(?:[\w./-]{1,200}:\d{1,6} -- )?"
)
_C10_LEVELS = {"I": "INFO", "W": "WARNING", "E": "ERROR", "F": "CRITICAL"}


#: torch warns of an allocation that failed, and raises it afterwards.
_WARNS_OF_ERRORS = "CUDACachingAllocator.cpp"


@dataclass(frozen=True)
class Record:
    """One line. `level` is None for bare lines (raw tracebacks, prints, tqdm). `process` is the innermost prefix's
    name, `pid` its process on this host (None: no prefix, or Ray's on another host)."""

    line: LogLine
    level: str | None
    process: str
    pid: int | None
    body: str
    origin: str = ""

    @property
    def may_be_error(self) -> bool:
        return self.level in (None, "ERROR", "CRITICAL") or self.origin == _WARNS_OF_ERRORS


def plain(text: str) -> str:
    """Without terminal colours and control sequences."""
    return _ANSI.sub("", text) if "\x1b" in text or "^[[" in text else text


def parse_records(lines: Iterable[LogLine]) -> Iterator[Record]:
    for line in lines:
        yield from _parse(line)


def process_prefixes(text: str) -> tuple[tuple[str, int, bool], ...]:
    """(name, pid, remote) of each prefix at the start of a line, outermost first. remote: on another host (Ray)."""
    return _strip_prefixes(plain(text[:MAX_BODY_CHARS]))[1]


def _strip_prefixes(text: str) -> tuple[str, tuple[tuple[str, int, bool], ...]]:
    position = 0
    found: list[tuple[str, int, bool]] = []
    for _ in range(8):
        if match := _PROCESS.match(text, position):
            found.append((match[1].strip(), int(match[2]), "ip=" in (match[3] or "")))
        elif not (match := _FOREIGN.match(text, position)):
            break
        position = match.end()
    return text[position:], tuple(found)


def _parse(line: LogLine) -> Iterator[Record]:
    text, prefixes = _strip_prefixes(plain(line.text[:MAX_BODY_CHARS]))
    process, pid, remote = prefixes[-1] if prefixes else ("", None, False)
    pid = None if remote else pid
    if text.startswith("{") and (message := _json_message(text)):
        level, body = message
        for part in body.splitlines():
            yield Record(line, level, process, pid, part)
        return
    level, body, origin = _split_level(text)
    yield Record(line, level, process, pid, body, origin)


def _split_level(text: str) -> tuple[str | None, str, str]:
    if match := _HEADER.match(text) or _SHORT_HEADER.match(text):
        return match[1], text[match.end() :], match[2]
    if match := _UVICORN.match(text):
        return match[1], text[match.end() :], "uvicorn"
    if match := _C10.match(text):
        return _C10_LEVELS[match[1]], text[match.end() :], match[2]
    if match := _STAMPED.match(text):
        return match[1], text[match.end() :], ""
    return None, text, ""


def _json_message(text: str) -> tuple[str | None, str] | None:
    """(level, message with its traceback) of a JSON log record (VLLM_LOGGING_CONFIG_PATH, 0.32's JSON formatter)."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    level = value.get("level") or value.get("levelname") or value.get("severity")
    message = value.get("message") or value.get("msg")
    if not isinstance(message, str) or not isinstance(level, str):
        return None
    trace = value.get("exc_info") or value.get("exception") or ""
    return level.upper(), f"{message}\n{trace}" if isinstance(trace, str) and trace else message
