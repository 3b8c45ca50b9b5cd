"""The shape of a line in vLLM's log: who wrote it, how serious it is, and what it says.

All versions' formats (vLLM 0.6 to 0.33: logging_utils/formatter.py, utils/system_utils.py decorate_logs), uvicorn's,
c10's (`[E1001 16:06:04.5 file.cpp:607]`), Ray's, JSON records, and what containers and journald put in front.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from ..incident import LogLine
from ..lazy import lazy

#: What stands behind this in one line decides nothing, and keeps a 20 MiB line from costing minutes.
MAX_BODY_CHARS = 8192

# also as `cat -v` and rsyslog write it
_ANSI = lazy(r"(?:\^\[|#033)\[[0-9;]{0,20}m|\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")

_LEVEL = r"(?:DEBUG|INFO|WARN(?:ING)?|ERROR|CRITICAL|FATAL)"
_CLOCK = r"\d\d:\d\d:\d\d(?:[.,]\d{1,9})?"
_DATE = r"\d{4}[-/]\d\d[-/]\d\d"
_ISO = _DATE + "T" + _CLOCK + r"(?:Z|[+-]\d\d:?\d\d)"
_HOST_AND_TAG = r"[\w.-]{1,64} [\w.@/-]{1,64}\[\d{1,10}\]: "
# In front of the program's own text, most special first.
_FOREIGN = lazy(
    "(?:"
    + "|".join(
        (
            r"<\d{1,3}>1 " + _ISO + r" \S{1,255} \S{1,48} \S{1,128} \S{1,32} (?:-|\[[^\]]{0,300}\]) ?",  # RFC 5424
            _ISO + " " + _HOST_AND_TAG,  # journalctl -o short-iso, rsyslog
            r"[A-Z][a-z]{2} [ \d]\d "
            + _CLOCK
            + r" [\w.-]{1,64} [\w.@/-]{1,64}(?:\[\d{1,10}\])?: ",  # journalctl, syslog
            r"[A-Z][a-z]{2} " + _DATE + " " + _CLOCK + r" [A-Z+\d:-]{2,6} " + _HOST_AND_TAG,  # -o short-full
            r"(?:\d{10}|\[ {0,8}\d{1,10})\.\d{6}\]? " + _HOST_AND_TAG,  # -o short-unix, -o short-monotonic
            r"\[pod/[\w./-]{1,200}\] ",  # kubectl logs --prefix
            r"\d{1,4}\|[\w.-]{1,64}\s{0,8}\| ",  # pm2
            r"[\w.-]{1,64}\s{0,8}\|\s",  # docker compose
            # docker logs -t, kubectl --timestamps; but not a record of a user's own format that begins with its time
            _ISO + r"\s{1,4}(?:std(?:out|err)\s[FP]\s)?(?!" + _LEVEL + r"\s{1,4}(?![\d\[\s]))",
            r"\s{0,4}\|?\s?\[" + _ISO + r"\] ",  # cloud consoles
            _LEVEL + " " + _ISO + r" \[[\w.: -]{1,80}\] ",
            _DATE + " " + _CLOCK + r"(?: |\t)(?=\(|Traceback|" + _LEVEL + r"(?::  | \d\d-\d\d ))",
            r"\[" + _DATE + " " + _CLOCK + r"\] ",
            r"\(raylet(?:, ip=[\d.]{7,15})?\) ",
            r"\^C(?=[A-Z(\[])",  # a terminal's echo of an interrupt
            r"[│┃|] (?=\(|" + _LEVEL + r" )",  # a terminal's frame
            r"(?:> ?){1,3}(?=\S)",  # quoted in a report
            r"\[\d\d:\d\d:\d\d\] (?:\w{1,12}/[A-Z]{4,8} {1,3})?",
            r" {1,8}(?=" + _LEVEL + r" \d\d-\d\d )",
            r"\d{1,4}: (?=\(|" + _LEVEL + r"(?::  | \d\d-\d\d ))",  # srun -l
            r"\[[\w.-]{1,32}\] (?=\(|" + _LEVEL + r"\b)",
            r"\"(?=" + _LEVEL + r" )",
            _DATE + " " + _CLOCK + r" \[\w{1,12}\] (?:\(Process\) )?",
            r"\[?rank\d+\]:\s?",  # torch; in reports without its first letter
            _DATE + " " + _CLOCK + r" \| " + _LEVEL + r" \| std(?:out|err) \|\s?",  # FastChat
            r"\[[\w./-]{1,200}\.py:\d{1,6}\] (?=[A-Z])",  # in reports: the record's head without its beginning
        )
    )
    + ")"
)
# `(EngineCore_DP0 pid=68) `, nested `(EngineCore_0 pid=5) (VllmWorker TP0 pid=9) `, `(RayWorkerWrapper pid=7, ip=…) `
# (Ray: `(MapWorker(MapBatches(x)) pid=7) `)
_PROCESS = lazy(r"\(([A-Za-z].{0,80}?)\s?\bpid=(\d{1,10})(,[^()]{0,80})?\)\s?")
_HEADER = lazy(
    r"(DEBUG|INFO|WARNING|ERROR|CRITICAL|RROR)\s(?:\d{4}-)?\d\d-\d\d[ T]\d\d:\d\d(?::\d\d(?:[.,]\d{1,9})?)? "
    r"\[?([\w./-]{1,200}):\d{1,6}\] ?"
)
# glog, as XLA on TPU writes it
_GLOG = lazy(r"([IWEF])\d{4} " + _CLOCK + r" {1,12}\d{1,10} ([\w./-]{1,200}):\d{1,6}\] ?")
# in reports: without the date
_SHORT_HEADER = lazy(r"(DEBUG|INFO|WARNING|ERROR|CRITICAL) {1,4}\[([\w./-]{1,200}\.py)(?::\d{1,6})?\] {1,4}")
_UVICORN = lazy(r"(DEBUG|INFO|WARNING|ERROR|CRITICAL): {2,9}")
_C10 = lazy(r"\[([IWEF])(?:\d{3,4} \d\d:\d\d:\d\d\.\d{1,9}|\.{3}|…) (?:\d{1,10} )?([\w./-]{1,200}):\d{1,6}\] ?")
# Ray's own: `[2025-04-02 15:02:00,117 E 1357 1357] (raylet) node_manager.cc:3069: `; a report may leave its date out
_RAY = lazy(
    r"\[(?:DATE|"
    + _DATE
    + " "
    + _CLOCK
    + r" ([IWEF])(?: \d{1,10}){1,2})\] (?:\(\w{1,30}\) )?([\w./-]{1,120}):\d{1,6}: "
)
# A user's own format (VLLM_LOGGING_CONFIG_PATH): `2026-05-01 12:00:00,123 - vllm.core - ERROR - `, loguru's
# `… | ERROR    | vllm.core:run:10 - `, basicConfig's `ERROR:vllm.core:`, `[ERROR] `
_STAMPED = lazy(
    _DATE + r"[ T]" + _CLOCK + r"(?:Z|[+-]\d\d:?\d\d)?\s[-|:\[\s]{0,4}(?:\[?[\w./:-]{1,80}\]?\s(?:[-|]\s)?){0,2}\[?"
    r"(" + _LEVEL + r")\b[\]\s:|-]{0,12}(?:[\w./<>-]{1,200}:(?:[\w<>]{1,80}:)?\d{1,6}\s?(?:--?|\||\]|:)\s?)?"
)
_BASIC = lazy(r"(" + _LEVEL + r"):[\w.]{1,100}:|\[(" + _LEVEL + r")\]:? {1,4}|(" + _LEVEL + r") {0,4}[|-] ")
_LEVELS = {
    "RROR": "ERROR",
    "WARN": "WARNING",
    "FATAL": "CRITICAL",
    "I": "INFO",
    "W": "WARNING",
    "E": "ERROR",
    "F": "CRITICAL",
}


# A record behind what another process left without an end of line: a progress bar, a line that a terminal filled up.
_GLUED = lazy(
    r"(?:(?:it/s|s/it|\?it/s)(?:, [^\]\n]{1,120})?\]| {12})(?=(?:\([A-Za-z][^()]{0,80} pid=\d{1,10}\) )?"
    r"(?:INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d \[?[\w./-]{1,200}\.py:\d{1,6}\] )"
)
#: What a request's line holds is its user's.
_USERS = ("prompt", "request", "Request", "response", "output", "message")


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
    return _ANSI.sub("", text) if "\x1b" in text or "^[[" in text or "#033[" in text else text


def parse_records(lines: Iterable[LogLine]) -> Iterator[Record]:
    for line in lines:
        if line.text.count(" pid=") > _PASTED and (parts := _without_line_ends(line)):
            for part in parts:
                yield from _parse(part)
        else:
            yield from _parse(line)


#: Copied from a page that has lost its line ends, the prefixes stand where lines began.
_PASTED = 3


def _without_line_ends(line: LogLine) -> list[LogLine]:
    text = plain(line.text[:MAX_BODY_CHARS])
    begins = [match.start() for match in _PROCESS.finditer(text)]
    parts = [text[begin:end] for begin, end in zip([0, *begins], [*begins, len(text)], strict=True)]
    return [replace(line, text=part) for part in parts if part] if len(begins) > _PASTED else []


def process_prefixes(text: str) -> tuple[tuple[str, int, bool], ...]:
    """(name, pid, remote) of each prefix at the start of a line, outermost first. remote: on another host (Ray)."""
    return _strip_prefixes(plain(text[:MAX_BODY_CHARS]))[1]


def without_carrier(text: str) -> str:
    """Without what a known carrier or a process prefix puts in front."""
    return _strip_prefixes(plain(text))[0]


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
    text = plain(line.text[:MAX_BODY_CHARS])
    if ".py:" in text and (glued := _GLUED.search(text)):
        before, after = text[: glued.end()], text[glued.end() :]
        if not any(word in before for word in _USERS):
            yield from _parse_text(line, before)
            text = after
    yield from _parse_text(line, text)


def _parse_text(line: LogLine, text: str) -> Iterator[Record]:
    text, prefixes = _strip_prefixes(text)
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
        return _LEVELS.get(match[1], match[1]), text[match.end() :], match[2]
    if match := _UVICORN.match(text):
        return match[1], text[match.end() :], "uvicorn"
    if match := _C10.match(text) or _GLOG.match(text):
        return _LEVELS[match[1]], text[match.end() :], match[2]
    if match := _RAY.match(text):
        return _LEVELS[match[1] or "E"], text[match.end() :], match[2]
    if match := _STAMPED.match(text) or _BASIC.match(text):
        level = next(group for group in match.groups() if group)
        return _LEVELS.get(level, level), text[match.end() :], ""
    return None, text, ""


def _json_message(text: str) -> tuple[str | None, str] | None:
    """(level, message with its traceback) of a JSON log record (VLLM_LOGGING_CONFIG_PATH, 0.32's JSON formatter)."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    level = _first_text(value, ("level", "levelname", "severity", "log.level", "loglevel", "lvl"))
    message = _first_text(value, ("message", "msg", "event", "text"))
    record = value.get("record")  # loguru's serialize=True
    if isinstance(record, dict) and isinstance(record.get("level"), dict):
        level, message = _first_text(record["level"], ("name",)), _first_text(record, ("message",)) or message
    if message is None or level is None:
        return None
    trace = _first_text(value, ("exc_info", "exception", "exc_text", "traceback", "stack_trace", "error.stack_trace"))
    level = level.upper()
    return _LEVELS.get(level, level), f"{message}\n{trace}" if trace else message


def _first_text(value: dict[str, object], keys: tuple[str, ...]) -> str | None:
    return next((text for key in keys if isinstance(text := value.get(key), str) and text), None)
