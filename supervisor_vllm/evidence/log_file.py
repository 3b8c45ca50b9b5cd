"""Log files as bytes: what of them is worth reading, through rotation, in bounded time and memory.

Of a long log the end is read, back to where nothing had gone wrong yet, and the start for the facts that stand there.
A gigabyte is as quick as a few megabytes, whatever stands in it.
"""

from __future__ import annotations

import zlib
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import BinaryIO, NamedTuple

# The end is read in steps, at least this far back, at most that far.
STEP_BYTES = 2**19
TAIL_BYTES = 16 * 2**20
#: Of the start, for the facts: until the server is up, at most this much.
HEAD_BYTES = 2**20
#: Of one line: what stands behind this decides nothing, and one line may be as long as a file.
LINE_BYTES = 2**16
#: Line numbers are counted in files up to this size; in larger ones counting would take longer than all the rest.
COUNTED_BYTES = 64 * 2**20
#: Of a run of plain answers so many are kept at each end: all are alike. Errors that lie further apart than this
#: (classify/scan.py) have nothing to do with each other, and still don't.
RUN_LINES = 300

# A stretch without any of these is one in which nothing went wrong.
_TROUBLE = (b"rror", b"RROR", b"xception", b"CRITICAL", b"illed", b"ut of memory", b"died", b'" 500', b'" 503', b"shut")
_UP = b"Application startup complete"


@dataclass(frozen=True)
class Segment:
    """`length` bytes of a file from `start` on; `name` where it isn't the log's own file but a rotated one."""

    path: str
    start: int
    length: int
    name: str | None = None


class RawLine(NamedTuple):
    """`offset` in bytes and `number` (from 1) in its own file; number None: a file that is too large to count.
    `name`: of a rotated file, None for the log itself."""

    data: bytes
    offset: int
    number: int | None = None
    name: str | None = None


#: (offset in all segments seen as one, the line), each following the one before
_Lines = list[tuple[int, bytes]]


def read_segments(segments: list[Segment], is_life_start: Callable[[bytes], bool]) -> list[RawLine]:
    """The lines, oldest first; a line that a rotation cut is whole again.

    `is_life_start`: do these bytes hold the beginning of a life? Then what is older needn't be read. OSError.
    """
    total = sum(segment.length for segment in segments)
    tail, whole = _tail(segments, total, is_life_start)
    if whole:
        return _placed(segments, tail, _without_long_runs(tail))
    head = _head(segments, tail[0][0] if tail else total)
    calm = [index for index, (_, line) in enumerate(head) if not _is_trouble(line)]
    return _placed(segments, head, calm) + _placed(segments, tail, _without_long_runs(tail))


def read_stream(stream: BinaryIO) -> list[RawLine]:
    """The lines of a pipe: its start and its end, with their true numbers."""
    return _ends_of(_lines_of(iter(lambda: stream.read(STEP_BYTES), b"")))


def _ends_of(lines: Iterable[bytes]) -> list[RawLine]:
    head: list[RawLine] = []
    tail: deque[RawLine] = deque()
    kept = number = offset = 0
    for data in lines:
        number += 1
        line = RawLine(data[:LINE_BYTES], offset, number)
        offset += len(data) + 1
        if offset <= HEAD_BYTES:
            head.append(line)
            continue
        tail.append(line)
        kept += len(line.data)
        while kept > TAIL_BYTES:
            kept -= len(tail.popleft().data)
    if tail and tail[0].number != len(head) + 1:
        head = [line for line in head if not _is_trouble(line.data)]
    kept_lines = [*head, *tail]
    return [kept_lines[index] for index in _without_long_runs([(line.offset, line.data) for line in kept_lines])]


def read_gzip(path: str) -> list[RawLine]:
    """The lines of a compressed file; of one that is broken or cut, those before that place. OSError."""
    with open(path, "rb") as file:
        return _ends_of(_lines_of(_decompressed(file)))


def _decompressed(file: BinaryIO) -> Iterator[bytes]:
    decompressor = zlib.decompressobj(wbits=31)
    while data := file.read(STEP_BYTES // 8):
        try:
            while data:
                yield decompressor.decompress(data)
                data = decompressor.unused_data  # gzip files may follow each other in one
                if data:
                    decompressor = zlib.decompressobj(wbits=31)
        except zlib.error:
            return


def _lines_of(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Lines without their end; of one that is longer than memory should hold, the beginning."""
    rest = b""
    for chunk in chunks:
        first, *others = chunk.split(b"\n")
        rest = rest + first if len(rest) < LINE_BYTES else rest
        for line in others:
            yield rest
            rest = line
    if rest:
        yield rest


def _tail(segments: list[Segment], total: int, is_life_start: Callable[[bytes], bool]) -> tuple[_Lines, bool]:
    """(the last lines, are they all there are of this life?)"""
    steps: list[_Lines] = []
    rest, end, kept = b"", total, 0
    while end > 0 and kept < TAIL_BYTES:
        begin = max(0, end - STEP_BYTES)
        data = b"".join(_chunks(segments, begin, end))
        end = begin
        cut = data.find(b"\n") + 1 if begin else 0  # what stands before it is the end of an older line
        if begin and not cut:
            rest = (data + rest)[:LINE_BYTES]
            continue
        steps.append(_split(data[cut:] + rest, begin + cut))
        rest = data[:cut]
        kept += len(data) - cut
        if is_life_start(data):
            return _joined(steps), True
        if len(steps) > 1 and not _is_trouble(data):
            break
    return _joined(steps), end == 0


def _joined(steps: list[_Lines]) -> _Lines:
    return [line for step in reversed(steps) for line in step]


def _head(segments: list[Segment], end: int) -> _Lines:
    """The start, until the server is up. Its troubles don't count: megabytes of log came after them."""
    data = b"".join(_chunks(segments, 0, min(end, HEAD_BYTES)))
    up = data.find(_UP)
    last = data.find(b"\n", up) if up >= 0 else data.rfind(b"\n")
    return _split(data[: last + 1], 0)


def _is_trouble(data: bytes) -> bool:
    return any(word in data for word in _TROUBLE)


def _split(data: bytes, offset: int) -> _Lines:
    parts = data.split(b"\n")
    if not parts[-1]:
        parts.pop()
    lines = []
    for part in parts:
        lines.append((offset, part if len(part) <= LINE_BYTES else part[:LINE_BYTES]))
        offset += len(part) + 1
    return lines


def _placed(segments: list[Segment], lines: _Lines, kept: list[int]) -> list[RawLine]:
    """The kept ones of the lines, with their place in their own file."""
    placed: list[RawLine] = []
    begin = 0
    for segment in segments:
        end = begin + segment.length
        low, high = bisect_left(lines, (begin, b"")), bisect_left(lines, (end, b""))
        own_kept = kept[bisect_left(kept, low) : bisect_left(kept, high)]
        number = _line_number(segment, lines[low][0] - begin) if own_kept else None
        for index in own_kept:
            offset, data = lines[index]
            own = None if number is None else number + index - low
            placed.append(RawLine(data, segment.start + offset - begin, own, segment.name))
        begin = end
    return placed


def _line_number(segment: Segment, offset: int) -> int | None:
    """Of the line at that place of the segment, in its file."""
    until = segment.start + offset
    if until > COUNTED_BYTES:
        return None
    with open(segment.path, "rb") as file:
        return 1 + sum(chunk.count(b"\n") for chunk in _read_exactly(file, until))


def _without_long_runs(lines: _Lines) -> list[int]:
    """Indexes of the lines without the middles of long runs of answers."""
    kept: list[int] = []
    run: list[int] = []
    for index, (_, line) in enumerate(lines):
        if b'" 200 OK' in line or b"Avg prompt throughput: " in line:
            run.append(index)
            continue
        if run:
            kept += _ends(lines, run)
            run = []
        kept.append(index)
    return kept + _ends(lines, run)


def _ends(lines: _Lines, run: list[int]) -> list[int]:
    if len(run) <= 2 * RUN_LINES:
        return run
    middle = run[RUN_LINES:-RUN_LINES]
    if _is_trouble(b"".join(lines[index][1] for index in middle)):
        middle = [index for index in middle if _is_trouble(lines[index][1])]
    else:
        middle = []
    return run[:RUN_LINES] + middle + run[-RUN_LINES:]


def _chunks(segments: list[Segment], begin: int, end: int) -> Iterator[bytes]:
    """The bytes begin..end of the segments seen as one."""
    position = 0
    for segment in segments:
        low, high = max(begin, position), min(end, position + segment.length)
        if low < high:
            with open(segment.path, "rb") as file:
                file.seek(segment.start + low - position)
                yield from _read_exactly(file, high - low)
        position += segment.length


def _read_exactly(file: BinaryIO, length: int) -> Iterator[bytes]:
    while length > 0 and (chunk := file.read(min(length, STEP_BYTES))):
        length -= len(chunk)
        yield chunk
