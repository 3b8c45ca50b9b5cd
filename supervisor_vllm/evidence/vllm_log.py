"""vLLM's log: the lines of one life, wherever they are (rotated, compressed, in a pipe) and whoever carried them."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from ..errors import UserError
from ..incident import LogLine
from ..lazy import lazy
from . import log_file
from .log_file import RawLine, Segment
from .log_records import parse_records, plain, process_prefixes, without_carrier
from .startup_facts import StartupFacts, startup_facts, vllm_version
from .transport import unwrap, without_unknown_prefix

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

#: supervisord's stdout_logfile_backups is 10 by default
_MAX_BACKUPS = 100
#: So far back a life's beginning is looked for in rotated files.
_MAX_OLDER = 10
_GZIP = b"\x1f\x8b"


@dataclass(frozen=True)
class LogPosition:
    """A place in a log file. inode 0: the file wasn't there. `offset` in bytes."""

    path: str
    inode: int
    offset: int


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
    """The lines since the marks, file after file, with their numbers in their files. Blank lines are left out."""
    lines: list[LogLine] = []
    for position in positions:
        try:
            lines += _decoded(log_file.read_segments(_segments_since(position), _holds_a_start))
        except OSError:  # gone between looking and reading: what is left of the evidence has to do
            continue
    return tuple(lines)


def read_file(path: str, *, life: int | None = None) -> tuple[LogLine, ...]:
    """One life in a whole file (`-`: the standard input): the last one, or the one of that number: 1 is the first,
    -1 the last. Where its beginning was rotated away, the older file has it. UserError: it can't be read."""
    if os.path.isdir(path):
        raise UserError(f"{path} is a directory", hint="give the log file itself, or --dir for a folder of logs")
    try:
        if life is not None:
            return _numbered_life(path, life)
        lines = _read_whole(path)
        starts = life_starts(lines)
        if starts or path == "-":
            return tuple(lines[starts[-1] if starts else 0 :])
        return last_life(_with_older(path, lines))
    except OSError as error:
        hint = "check the path" if isinstance(error, FileNotFoundError) else "check its rights"
        raise UserError(f"{path} can't be read: {error.strerror or error}", hint=hint) from None


def _read_whole(path: str) -> list[LogLine]:
    if path == "-":
        return _decoded(log_file.read_stream(sys.stdin.buffer))
    if _is_gzip(path):
        return _decoded(log_file.read_gzip(path))
    return _decoded(log_file.read_segments([Segment(path, 0, os.stat(path).st_size)], _holds_a_start))


def _is_gzip(path: str) -> bool:
    with open(path, "rb") as file:
        return file.read(2) == _GZIP


def _with_older(path: str, lines: list[LogLine]) -> list[LogLine]:
    """With the lines since the life's beginning in the rotated files; without a beginning there, nothing of them."""
    older: list[LogLine] = []
    for name in older_files(path)[:_MAX_OLDER]:
        try:
            found = _read_whole(name)
        except OSError:
            break
        own = os.path.basename(name)
        older = [replace(line, file=own) for line in found] + older
        if life_starts(found):
            return [*last_life(older), *lines]
    return lines


def older_files(path: str) -> list[str]:
    """The rotated files of a log, newest first: `x.log.1`, `x.log.2.gz` (supervisord, logrotate), `x.log-20260501.gz`
    (logrotate's dateext), `x.log.20260501-120000` (kubelet)."""
    numbered = []
    for number in range(1, _MAX_BACKUPS + 1):
        name = next((name for name in (f"{path}.{number}", f"{path}.{number}.gz") if os.path.isfile(name)), None)
        if name is None:
            break
        numbered.append(name)
    if numbered:
        return numbered
    folder, base = os.path.split(path)
    dated = re.compile(re.escape(base) + r"[-.]\d{8}(?:-\d{1,10})?(?:\.gz)?")
    try:
        names = [name for name in os.listdir(folder or ".") if dated.fullmatch(name)]
    except OSError:
        return []
    return [os.path.join(folder, name) for name in sorted(names, reverse=True)]


def _numbered_life(path: str, number: int) -> tuple[LogLine, ...]:
    """Reads all of the file: a life in the middle can be anywhere."""
    if path == "-" or _is_gzip(path):
        lines = _read_whole(path)
        starts = life_starts(lines) or [0]
        begin, end = _life_bounds(path, starts, number, len(lines))
        return tuple(lines[begin:end])
    starts = _start_offsets(path)
    begin, end = _life_bounds(path, starts, number, os.stat(path).st_size)
    return tuple(_decoded(log_file.read_segments([Segment(path, begin, end - begin)], lambda _: False)))


def _life_bounds(path: str, starts: list[int], number: int, end: int) -> tuple[int, int]:
    index = number - 1 if number > 0 else len(starts) + number
    if number == 0 or not 0 <= index < len(starts):
        lives = f"{len(starts)} lives" if len(starts) != 1 else "1 life"
        raise UserError(f"{path} holds {lives}, there is no life {number}", hint="1 is the first, -1 the last")
    return starts[index], starts[index + 1] if index + 1 < len(starts) else end


def _start_offsets(path: str) -> list[int]:
    """Where in the file the lives begin, in bytes."""
    lines: list[LogLine] = []
    offset = 0
    with open(path, "rb") as file:
        for data in file:
            if any(word in data for word in _START_WORDS) or any(word in data for word in _ALIVE_WORDS):
                lines += _decoded([RawLine(data[: log_file.LINE_BYTES], offset)])
            offset += len(data)
    return [lines[index].offset or 0 for index in life_starts(lines)] or [0]


def pids_in_log(lines: Iterable[LogLine]) -> frozenset[int]:
    """The processes on this host that vLLM's own prefixes and uvicorn name; where no line begins with one (a carrier
    that isn't understood), those that are named anywhere: else a stranger's kill would be taken for this server's."""
    found: set[int] = set()
    anywhere: set[int] = set()
    for line in lines:
        if not found and "pid=" in line.text:
            anywhere.update(int(pid) for pid in _ANY_PREFIX.findall(line.text[:_PREFIX_CHARS]))
        found.update(pid for _, pid, remote in process_prefixes(line.text) if not remote)
        if "Started server process [" in line.text:
            record = next(parse_records((line,)))
            if record.level in ("INFO", None) and (match := _SERVER_PROCESS.match(record.body)):
                found.add(int(match[1]))
    return frozenset(found or anywhere)


_ANY_PREFIX = lazy(r"\([A-Z]\w{1,40} pid=(\d{1,10})\) ")
_PREFIX_CHARS = 500
_SERVER_PROCESS = lazy(r"Started server process \[(\d{1,10})\]")

# Lines that a server writes once in its life, before anything else of its own. One that comes again is a new life.
# api_server.py until 0.22.1 ("vLLM API server version"), the banner since, argparse's usage.
_SERVER_STARTS = (
    lazy(r"vLLM API server version \d"),
    lazy(r"[█▀▄ ]{6,80}version \d"),
    lazy(r"non-default args: \{"),
    lazy(r"usage: (?:vllm|api_server\.py)\b"),
)
_USAGE = _SERVER_STARTS[-1].pattern
# Without an API server (offline, run-batch): the engine's own first line; one a process (data parallel has several).
_ENGINE_START = lazy(r"Initializing an? (?:V[01] )?LLM engine \(v")
_SERVER_START_WORDS = (
    b"API server version ",
    b"  version ",
    b"non-default args: {",
    b"usage: vllm",
    b"usage: api_server",
)
_START_WORDS = (*_SERVER_START_WORDS, b" engine (v")
# What a server writes only after these: found before the first of them, it is the end of an earlier life.
_ALIVE_WORDS = (
    b"Application startup complete",
    b"Starting to load model",
    b"Loading model weights took",
    b"Model loading took",
    b"Avg prompt throughput: ",
    b"Engine core init",
    b"EngineCore ",
    b"Shutting down",
    b"KV cache size: ",
    b"OutOfMemoryError",
    b"(EngineCore",
    b"(Worker",
    b"(VllmWorker",
    b"(RayWorker",
)


def last_life(lines: list[LogLine]) -> tuple[LogLine, ...]:
    """The lines of the last start only: old error text in an appended log must not decide."""
    starts = life_starts(lines)
    return tuple(lines[starts[-1] if starts else 0 :])


def life_starts(lines: list[LogLine]) -> list[int]:
    """The indexes at which lives begin; none where no line says so."""
    return list(_starts(lines, server=True)) or list(_starts(lines, server=False))


def _holds_a_start(data: bytes) -> bool:
    """Does a server's life begin in these bytes?"""
    if not any(word in data for word in _SERVER_START_WORDS):
        return False
    marked = [line for line in data.split(b"\n") if any(word in line for word in _SERVER_START_WORDS)]
    return bool(list(_starts(_decoded([RawLine(line, 0) for line in marked]), server=True)))


def _starts(lines: list[LogLine], *, server: bool) -> Iterator[int]:
    """What stands before the first mark (warnings of imports) belongs to that life, unless a life ended there."""
    begun = alive = False
    seen: dict[object, int | None] = {}
    for index, line in enumerate(lines):
        if not any(word in line.text for word in _START_TEXTS):
            alive = alive or (server and not begun and any(word in line.text for word in _ALIVE_TEXTS))
            continue
        for record in parse_records((line,)):
            mark = _start_mark(record.body, record.process, server=server)
            if mark is None or record.level not in (None, "INFO"):
                continue
            if not begun:
                begun = True
                if alive:
                    yield 0
                yield index if alive else 0
            elif mark == _USAGE or (mark in seen and (seen[mark] is None or seen[mark] != record.pid)):
                yield index
                seen.clear()
            seen[mark] = record.pid
            if mark == _USAGE:  # wrong use ends a life at once: whatever begins next is another
                seen = dict.fromkeys((pattern.pattern for pattern in _SERVER_STARTS), None)


_START_TEXTS = tuple(word.decode() for word in _START_WORDS)
_ALIVE_TEXTS = tuple(word.decode() for word in _ALIVE_WORDS)


def _start_mark(body: str, process: str, *, server: bool) -> object | None:
    if not server:
        return ("engine", process) if _ENGINE_START.match(body) else None
    return next((pattern.pattern for pattern in _SERVER_STARTS if pattern.match(body)), None)


def _segments_since(position: LogPosition) -> list[Segment]:
    """Where the bytes after the mark are now, oldest first."""
    current = mark_end(position.path)
    if current.inode == position.inode and position.inode:
        # copytruncate: the same file, shorter than it was
        start = position.offset if current.offset >= position.offset else 0
        return [Segment(position.path, start, current.offset - start)]
    newer = [Segment(position.path, 0, current.offset)] if current.inode else []
    if not position.inode:
        return newer
    # supervisord renames path → path.1 → path.2 …: all files that are newer than the marked one are of this life
    for number in range(1, _MAX_BACKUPS + 1):
        backup = mark_end(f"{position.path}.{number}")
        if not backup.inode:
            break
        if backup.inode == position.inode:
            start = min(position.offset, backup.offset)
            return [Segment(backup.path, start, backup.offset - start, os.path.basename(backup.path)), *newer]
        newer.insert(0, Segment(backup.path, 0, backup.offset, os.path.basename(backup.path)))
    # the marked file is gone (cleared, or rotated away): only the newest file is surely of this life
    return newer[-1:]


def _decoded(raw: list[RawLine]) -> list[LogLine]:
    """Only \\n counts as a line's end; the parts of a progress bar (\\r) share their line's number."""
    lines = []
    for data, offset, number, name in raw:
        for part in data.split(b"\r") if b"\r" in data else (data,):
            text = plain(part.decode("utf-8", errors="replace"))
            lines.append(LogLine(number, text.removeprefix("\ufeff"), "vllm-log", offset, name))
    return without_unknown_prefix(list(unwrap(lines)), without_carrier)
