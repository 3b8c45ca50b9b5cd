"""What stands before a message of the kernel's log, in all the shapes in which people have it."""

from __future__ import annotations

import json
from datetime import datetime, timezone

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from supervisor_vllm.evidence.kernel_log import parse_kills
from supervisor_vllm.evidence.kernel_stamp import WallTime, stamped

MESSAGE = "Out of memory: Killed process 7 (a b) total-vm:1kB, anon-rss:1kB"
NOON = 12 * 3600.0


def journal_json(message: object, **fields: str) -> str:
    record = {
        "MESSAGE": message,
        "__REALTIME_TIMESTAMP": "1777636800000000",
        "_SOURCE_MONOTONIC_TIMESTAMP": "2220604297",
        "SYSLOG_IDENTIFIER": "kernel",
        "_TRANSPORT": "kernel",
        "SYSLOG_FACILITY": "0",
    }
    return json.dumps(record | fields, separators=(",", ":"))


#: shape → (what stands before the message, seconds since boot, date as (year, offset) or None)
SHAPES: dict[str, tuple[str, float | None, tuple[int | None, int | None] | None]] = {
    "cat": ("", None, None),
    "kmsg": ("6,1234,2220604297,-;", 2220.604297, None),
    "kmsg-caller": ("3,1234,2220604297,-,caller=T99;", 2220.604297, None),
    "dmesg": ("[ 2220.604297] ", 2220.604297, None),
    "dmesg-caller": ("[ 2220.604297][ T9185] ", 2220.604297, None),
    "dmesg-raw": ("<3>[ 2220.604297] ", 2220.604297, None),
    "dmesg-delta": ("[ 2220.604297 <    0.000123>] ", 2220.604297, None),
    "dmesg-x": ("kern  :err   : [ 2220.604297] ", 2220.604297, None),
    "dmesg-T": ("[Fri May  1 12:00:00 2026] ", None, (2026, None)),
    "dmesg-xT": ("kern  :err   : [Fri May  1 12:00:00 2026] ", None, (2026, None)),
    "dmesg-T-zh": ("[五 5月  1 12:00:00 2026] ", None, (2026, None)),
    "dmesg-iso": ("2026-05-01T12:00:00,000000+02:00 ", None, (2026, 7200)),
    "dmesg-H": ("[May 1 12:00] ", None, (None, None)),
    "short": ("May 01 12:00:00 node7 kernel: ", None, (None, None)),
    "short-precise": ("May 01 12:00:00.000000 node7 kernel: ", None, (None, None)),
    "short-iso": ("2026-05-01T12:00:00+0200 node7 kernel: ", None, (2026, 7200)),
    "short-iso-precise": ("2026-05-01T12:00:00.000000+02:00 node7 kernel: ", None, (2026, 7200)),
    "short-full": ("Fri 2026-05-01 12:00:00 CEST node7 kernel: ", None, (2026, None)),
    "short-monotonic": ("[ 2220.604297] node7 kernel: ", 2220.604297, None),
    "syslog": ("May  1 12:00:00 node7 kernel: [ 2220.604297] ", 2220.604297, (None, None)),
    "syslog-tight": ("May  1 12:00:00 node7 kernel:[ 2220.604297] ", 2220.604297, (None, None)),
    "rsyslog-iso": ("2026-05-01T12:00:00.000000+02:00 node7 kernel: [ 2220.604297] ", 2220.604297, (2026, 7200)),
    "rfc5424": ("<3>1 2026-05-01T12:00:00Z node7 kernel - - - [ 2220.604297] ", 2220.604297, (2026, 0)),
    "grep": ("/var/log/kern.log.1:123:May  1 12:00:00 node7 kernel: [ 2220.604297] ", 2220.604297, (None, None)),
    "cri": ("2026-05-01T12:00:00.000000000Z stdout F ", None, (2026, 0)),
    "verbose": ("    MESSAGE=", None, None),
    "colour": ("\x1b[32m[ 2220.604297] \x1b[0m\x1b[31m", 2220.604297, None),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_shape(shape: str) -> None:
    before, seconds, date = SHAPES[shape]
    found = stamped(before + MESSAGE + ("\x1b[0m" if shape == "colour" else "") + "\r\n")
    assert found.text == MESSAGE
    assert found.by_kernel
    assert found.boot_seconds == seconds
    if date is None:
        assert found.wall is None
    else:
        assert found.wall == WallTime(5, 1, NOON, *date)
    (kill,) = parse_kills([before + MESSAGE])
    assert (kill.pid, kill.name, kill.boot_seconds) == (7, "a b", seconds)


@pytest.mark.parametrize("message", [MESSAGE, list(MESSAGE.encode())], ids=["text", "bytes"])
@pytest.mark.parametrize("before", ["", "\x1e", "data: "], ids=["json", "json-seq", "json-sse"])
def test_journal_json(before: str, message: object) -> None:
    (kill,) = parse_kills([before + journal_json(message)])
    assert (kill.pid, kill.boot_seconds, kill.text) == (7, 2220.604297, MESSAGE)
    assert kill.wall is not None
    assert kill.wall.seconds_after(datetime(2026, 5, 1, 12, tzinfo=timezone.utc)) == 0


@pytest.mark.parametrize(
    "line",
    [
        f"May  1 12:00:00 node7 kernel: message repeated 3 times: [ {MESSAGE}]",
        f"May  1 12:00:00 node7 kernel: message repeated 3 times: [ [ 2220.604297] {MESSAGE}]",
        f'\t"MESSAGE" : "{MESSAGE}",',
        f'         "msg": "{MESSAGE}"',
    ],
    ids=["repeated", "repeated-stamp", "json-pretty", "dmesg-json"],
)
def test_wrapped(line: str) -> None:
    (kill,) = parse_kills([line])
    assert (kill.pid, kill.text) == (7, MESSAGE)


def test_relative_times_know_the_last_minute() -> None:
    (kill,) = parse_kills(["[May 1 12:00] x", "[  +0.000123] y", f"[  +1.500000] {MESSAGE}"])
    assert kill.wall == WallTime(5, 1, NOON)


@pytest.mark.parametrize(
    "before",
    [
        "May  1 12:00:00 node7 python3[5]: ",
        "14,1234,2220604297,-;",
        "<14>[ 2220.604297] ",
        "user  :notice: [ 2220.604297] ",
        "[ 2220.604297] myprogram: ",
        "2026-05-01T12:00:00Z node7 app - - - ",
    ],
)
def test_a_program_that_says_so_is_not_the_kernel(before: str) -> None:
    assert parse_kills([before + MESSAGE]) == ()


def test_a_program_that_says_so_in_the_journal() -> None:
    assert parse_kills([journal_json(MESSAGE, SYSLOG_IDENTIFIER="python3", _TRANSPORT="stdout")]) == ()
    assert parse_kills([journal_json(MESSAGE, SYSLOG_FACILITY="3")]) == ()


@pytest.mark.parametrize(
    ("wall", "moment", "seconds"),
    [
        (WallTime(12, 31, 86399.0), datetime(2026, 1, 1, tzinfo=timezone.utc), -1.0),  # no year: the nearest
        (WallTime(1, 1, 1.0), datetime(2025, 12, 31, 23, 59, 59, tzinfo=timezone.utc), 2.0),
        (WallTime(5, 1, NOON, 2026, 7200), datetime(2026, 5, 1, 10, tzinfo=timezone.utc), 0.0),
        (WallTime(5, 1, NOON, 2026), datetime(2026, 5, 1, 10, tzinfo=timezone.utc), 7200.0),
        (WallTime(2, 29, 0.0), datetime(2026, 3, 1, tzinfo=timezone.utc), -86400.0),
    ],
)
def test_difference(wall: WallTime, moment: datetime, seconds: float) -> None:
    assert wall.seconds_after(moment) == seconds


@given(st.text(max_size=300), st.sampled_from(sorted(SHAPES)), st.integers(0, 40))
@settings(max_examples=400, deadline=None)
def test_no_line_raises(text: str, shape: str, cut: int) -> None:
    before = SHAPES[shape][0]
    stamped(text)
    stamped(before[:cut] + text)
    stamped(before + before + text)
    assert all(kill.text for kill in parse_kills([text, before + text, before[:cut] + MESSAGE[cut:] + text]))
