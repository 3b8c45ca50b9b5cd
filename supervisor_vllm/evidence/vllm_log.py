"""vLLM's log files: the lines of one life, through rotation, in bounded memory."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import BinaryIO

from ..errors import UserError
from ..incident import LogLine
from ..lazy import lazy
from .log_records import parse_records, plain, process_prefixes
from .startup_facts import StartupFacts, startup_facts, vllm_version

__all__ = [
    "LogPosition",
    "StartupFacts",
    "mark_begin",
    "mark_end",
    "pids_in_log",
    "read_file",
    "read_life",
    "startup_facts",
    "vllm_version",
]

# Of a longer life, the start (arguments, model, budget) and the end (the death) are kept, the middle is counted.
HEAD_BYTES = 4 * 2**20
TAIL_BYTES = 16 * 2**20
_CHUNK_BYTES = 2**20
#: supervisord's stdout_logfile_backups is 10 by default
_MAX_BACKUPS = 100


@dataclass(frozen=True)
class LogPosition:
    """A place in a log file. inode 0: the file wasn't there. `offset` in bytes."""

    path: str
    inode: int
    offset: int


@dataclass(frozen=True)
class _Segment:
    """`length` bytes of a file from `start` on."""

    path: str
    start: int
    length: int


def mark_end(path: str) -> LogPosition:
    """Where the next life's lines begin. Never raises: a file that can't be seen is as one that isn't there."""
    try:
        status = os.stat(path)
    except OSError:
        return LogPosition(path, 0, 0)
    return LogPosition(path, status.st_ino, status.st_size)


def mark_begin(path: str) -> LogPosition:
    """The oldest line that is still there, in the oldest backup: for a life that nobody saw beginning."""
    oldest = mark_end(path)
    for number in range(1, _MAX_BACKUPS + 1):
        backup = mark_end(f"{path}.{number}")
        if not backup.inode:
            break
        oldest = backup
    return LogPosition(path, oldest.inode, 0)


def read_life(positions: tuple[LogPosition, ...]) -> tuple[LogLine, ...]:
    """The lines since the marks, file after file, each file's numbered from 1. Blank lines are left out."""
    lines: list[LogLine] = []
    for position in positions:
        try:
            lines += _read_segments(_segments_since(position))
        except OSError:  # gone between looking and reading: what is left of the evidence has to do
            continue
    return tuple(lines)


def read_file(path: str) -> tuple[LogLine, ...]:
    """The last life in a whole file, with the file's own line numbers. UserError: it can't be read."""
    if os.path.isdir(path):
        raise UserError(f"{path} is a directory", hint="give the log file itself")
    try:
        size = os.stat(path).st_size
        lines = _read_segments([_Segment(path, 0, size)] if size else [])
    except OSError as error:
        hint = "check the path" if isinstance(error, FileNotFoundError) else "check its rights"
        raise UserError(f"{path} can't be read: {error.strerror or error}", hint=hint) from None
    return last_life(lines)


def pids_in_log(lines: Iterable[LogLine]) -> frozenset[int]:
    """The processes on this host that vLLM's own prefixes and uvicorn name."""
    found: set[int] = set()
    for line in lines:
        found.update(pid for _, pid, remote in process_prefixes(line.text) if not remote)
        if "Started server process [" in line.text:
            record = next(parse_records((line,)))
            if record.level in ("INFO", None) and (match := _SERVER_PROCESS.match(record.body)):
                found.add(int(match[1]))
    return frozenset(found)


_SERVER_PROCESS = lazy(r"Started server process \[(\d{1,10})\]")

# Lines that a server writes once in its life, before anything else of its own. One that comes again is a new life.
# api_server.py until 0.22.1 ("vLLM API server version"), the banner since, argparse's usage.
_SERVER_STARTS = (
    lazy(r"vLLM API server version \d"),
    lazy(r"[█▀▄ ]{6,80}version \d"),
    lazy(r"non-default args: \{"),
    lazy(r"usage: (?:vllm|api_server\.py)\b"),
)
# Without an API server (offline, run-batch): the engine's own first line; one a process (data parallel has several).
_ENGINE_START = lazy(r"Initializing an? (?:V[01] )?LLM engine \(v")


def last_life(lines: list[LogLine]) -> tuple[LogLine, ...]:
    """The lines of the last start only: old error text in an appended log must not decide."""
    start = _last_start(lines, server=True)
    if start is None:
        start = _last_start(lines, server=False)
    return tuple(lines[start or 0 :])


def _last_start(lines: list[LogLine], *, server: bool) -> int | None:
    """The index at which the last of several lives begins; 0 for the only one, None without any mark."""
    start: int | None = None
    seen: dict[object, int | None] = {}
    for index, line in enumerate(lines):
        if (
            "version " not in line.text
            and "usage: " not in line.text
            and " engine (v" not in line.text
            and ("non-default args" not in line.text)
        ):
            continue
        for record in parse_records((line,)):
            mark = _start_mark(record.body, record.process, server=server)
            if mark is None or record.level not in (None, "INFO"):
                continue
            if start is None:
                start = 0
            elif mark in seen and (seen[mark] is None or seen[mark] != record.pid):
                start = index
                seen.clear()
            seen[mark] = record.pid
    return start


def _start_mark(body: str, process: str, *, server: bool) -> object | None:
    if not server:
        return ("engine", process) if _ENGINE_START.match(body) else None
    return next((pattern.pattern for pattern in _SERVER_STARTS if pattern.match(body)), None)


def _segments_since(position: LogPosition) -> list[_Segment]:
    """Where the bytes after the mark are now, oldest first."""
    current = mark_end(position.path)
    if current.inode == position.inode and position.inode:
        # copytruncate: the same file, shorter than it was
        start = position.offset if current.offset >= position.offset else 0
        return [_Segment(position.path, start, current.offset - start)]
    newer = [_Segment(position.path, 0, current.offset)] if current.inode else []
    if not position.inode:
        return newer
    # supervisord renames path → path.1 → path.2 …: all files that are newer than the marked one are of this life
    for number in range(1, _MAX_BACKUPS + 1):
        backup = mark_end(f"{position.path}.{number}")
        if not backup.inode:
            break
        if backup.inode == position.inode:
            start = min(position.offset, backup.offset)
            return [_Segment(backup.path, start, backup.offset - start), *newer]
        newer.insert(0, _Segment(backup.path, 0, backup.offset))
    # the marked file is gone (cleared, or rotated away): only the newest file is surely of this life
    return newer[-1:]


def _read_segments(segments: list[_Segment]) -> list[LogLine]:
    total = sum(segment.length for segment in segments)
    if total <= HEAD_BYTES + TAIL_BYTES:
        return list(_lines(b"".join(_chunks(segments, 0, total)), first_number=1))
    head = b"".join(_chunks(segments, 0, HEAD_BYTES))
    head = head[: head.rfind(b"\n") + 1] or head  # the cut line is not a line
    skipped = sum(chunk.count(b"\n") for chunk in _chunks(segments, len(head), total - TAIL_BYTES))
    tail = b"".join(_chunks(segments, total - TAIL_BYTES, total))
    number = head.count(b"\n") + skipped + 1
    cut = tail.find(b"\n") + 1
    return [*_lines(head, first_number=1), *_lines(tail[cut:], first_number=number + (1 if cut else 0))]


def _chunks(segments: list[_Segment], begin: int, end: int) -> Iterator[bytes]:
    """The bytes begin..end of the segments seen as one: a line that a rotation cut is whole again."""
    position = 0
    for segment in segments:
        low, high = max(begin, position), min(end, position + segment.length)
        if low < high:
            with open(segment.path, "rb") as file:
                file.seek(segment.start + low - position)
                yield from _read_exactly(file, high - low)
        position += segment.length


def _read_exactly(file: BinaryIO, length: int) -> Iterator[bytes]:
    while length > 0 and (chunk := file.read(min(length, _CHUNK_BYTES))):
        length -= len(chunk)
        yield chunk


def _lines(data: bytes, *, first_number: int) -> Iterator[LogLine]:
    """Only \\n counts as a line's end; the parts of a progress bar (\\r) share their line's number."""
    for number, raw in enumerate(data.split(b"\n"), first_number):
        for part in raw.split(b"\r"):
            text = plain(part.decode("utf-8", errors="replace")).rstrip()
            if text:
                yield LogLine(number, text)
