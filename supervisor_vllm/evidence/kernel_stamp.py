"""What stands before a message of the kernel's log: the time, the machine, who wrote it.

The same line comes as /dev/kmsg, dmesg (plain, -T, -x, -r, -d, -H, --time-format iso, -J), journalctl (short,
short-iso, short-precise, short-full, short-unix, short-monotonic, json, json-pretty, cat, verbose), syslog (RFC 3164,
RFC 5424, rsyslog's repeats), kubelet's and containerd's logs, CRI, `docker logs -t`, and through grep. They nest: each
known piece is taken off, from the left, until a message is left.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from ..lazy import lazy
from .transport import message_text

_MAX_LINE_CHARS = 8192
_MAX_JSON_CHARS = 2**16
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


@dataclass(frozen=True)
class WallTime:
    """A date as a log has it. `year` and `offset_seconds` (of its zone) are None where the log doesn't say."""

    month: int
    day: int
    seconds_of_day: float
    year: int | None = None
    offset_seconds: int | None = None

    def seconds_after(self, moment: datetime) -> float:
        """How much later than the moment it is. Without a zone: in the moment's; without a year: the nearest one."""
        local = moment.replace(tzinfo=None)
        years = (self.year,) if self.year is not None else (local.year - 1, local.year, local.year + 1)
        differences = [(self._naive(year) - local).total_seconds() for year in years]
        difference = min(differences, key=abs)
        zone = moment.utcoffset()
        if self.offset_seconds is not None and zone is not None:
            difference += zone.total_seconds() - self.offset_seconds
        return difference

    def _naive(self, year: int) -> datetime:
        day = 28 if (self.month, self.day) == (2, 29) and not _leap(year) else self.day
        return datetime(year, self.month, day) + timedelta(seconds=self.seconds_of_day)


def _leap(year: int) -> bool:
    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)


@dataclass(frozen=True)
class Stamped:
    """`boot_seconds`: on the kernel log's clock. `tag`: who wrote it, as syslog and journald say it ("" where they
    don't). `by_program`: the facility says that it isn't the kernel's own."""

    text: str
    boot_seconds: float | None = None
    wall: WallTime | None = None
    tag: str = ""
    by_program: bool = False

    @property
    def by_kernel(self) -> bool:
        return not self.by_program and self.tag in ("", "kernel")


_ANSI = lazy(r"\x1b\[[0-9;]{0,16}[A-Za-z]")
_CLOCK = r"(\d\d):(\d\d):(\d\d(?:[.,]\d{1,9})?)"
_ZONE = r"(Z|[+-]\d\d:?\d\d)"
_KMSG = lazy(r"(\d{1,4}),\d{1,20},(\d{1,20}),[^;]{0,80};")
_LEVEL = lazy(r"<(\d{1,3})>(?:\d )?")
_FACILITY = lazy(
    r"([a-z]{2,8}\d?) {0,4}:(?:emerg|alert|crit|err|warn|notice|info|debug) {0,4}: ",
)
_BOOT = lazy(r"\[ {0,12}(\d{1,12}\.\d{1,9})(?: <[ \d.+]{1,24}>)?\](?:\[ {0,8}[TC]\d{1,10}\])? ?")
_DELTA = lazy(r"\[ {0,8}(?:<[ \d.]{1,24}>|\+\d{1,9}\.\d{1,9})\] ?")
#: dmesg -T writes the names of days and months in the user's language.
_CTIME = lazy(r"\[\S{1,12} +(\S{1,12}) +(\d{1,2}) " + _CLOCK + r" (\d{4})(?: <[ \d.]{1,24}>)?\] ?")
_MINUTE = lazy(r"\[([A-Z][a-z]{2}) {1,2}(\d{1,2}) (\d\d):(\d\d)\] ?")
_ISO = lazy(r"(?:[A-Z][a-z]{2} )?(\d{4})-(\d\d)-(\d\d)[T ]" + _CLOCK + r" ?(?:" + _ZONE + r"|[A-Z]{3,5})?(?=\s|$) ?")
_SYSLOG = lazy(r"([A-Z][a-z]{2}) ([ \d]?\d) " + _CLOCK + r"(?: (\d{4}))? ")
_UNIX = lazy(r"(\d{9,11}\.\d{6}) ")
_HOST_TAG = lazy(r"(?:[\w.:-]{1,255} )?([\w./@-]{1,64}?)(?:\[\d{1,10}\])?: ?")
_RFC5424 = lazy(r"[\w.-]{1,255} ([\w./-]{1,64}) (?:-|\d{1,10}) \S{1,32} (?:-|\[[^\]]{0,512}\]) ")
_KLOG = lazy(r"([IWEF])(\d\d)(\d\d) " + _CLOCK + r" {1,8}\d{1,10} [\w./-]{1,80}:\d{1,6}\] ")
_CRI = lazy(r"(?:stdout|stderr) [FP] ")
_REPEATED = lazy(r"message repeated \d{1,9} times?: \[ ?(.{0,8192}?)\]?$")
_FIELD = lazy(r'"?(?:MESSAGE|msg)"? ?[=:] ?(.{1,8192})$')
_GREP = lazy(r"(?:[\w./+-]{1,255}[:-])?(?:\d{1,9}[:-])?(?=[<\[{]|[A-Z][a-z]{2} [ \d]\d |\d{4}-\d\d-\d\d|\d,\d)")


def stamped(line: str) -> Stamped:
    """The message of a line, and what stood before it."""
    line = line[: _MAX_JSON_CHARS if line.lstrip("\x1e").startswith(("{", "data:")) else _MAX_LINE_CHARS]
    if "\x1b" in line:
        line = _ANSI.sub("", line)
    line = line.strip().lstrip("\x1e")
    if line.startswith(("{", "data: {")) and (found := _of_json(line.removeprefix("data: "))):
        return found
    if match := _GREP.match(line):
        line = line[match.end() :]
    if (match := _FIELD.match(line)) and not line.startswith("{"):
        line = _unquoted(match[1])
    return _take_off(Stamped(line))


def _take_off(found: Stamped) -> Stamped:
    for _ in range(8):
        before = found.text
        found = _one_piece(found)
        if found.text == before:
            break
    return replace(found, text=found.text.strip())


def _one_piece(found: Stamped) -> Stamped:
    text = found.text
    if match := _KMSG.match(text):
        return _after(found, match, boot=int(match[2]) / 1e6, by_program=int(match[1]) >= 8)
    if match := _LEVEL.match(text):
        return _after(found, match, by_program=int(match[1]) >= 8)
    if match := _FACILITY.match(text):
        return _after(found, match, by_program=match[1] != "kern")
    if match := _BOOT.match(text):
        found = _after(found, match, boot=float(match[1]))
        return _host(found) if not found.tag else found
    if match := _DELTA.match(text):
        return _after(found, match)
    if match := _CTIME.match(text):
        return _after(found, match, wall=_wall(match[6], _month(match[1]), match[2], match[3], match[4], match[5]))
    if match := _MINUTE.match(text):
        return _after(found, match, wall=_wall(None, _month(match[1]), match[2], match[3], match[4], "0"))
    if match := _ISO.match(text):
        wall = _wall(match[1], int(match[2]), match[3], match[4], match[5], match[6], match[7])
        return _sender(_after(found, match, wall=wall))
    if match := _SYSLOG.match(text):
        return _sender(
            _after(found, match, wall=_wall(match[6], _month(match[1]), match[2], match[3], match[4], match[5]))
        )
    if match := _UNIX.match(text):
        moment = datetime.fromtimestamp(float(match[1]))
        return _sender(_after(found, match, wall=_of_moment(moment)))
    if match := _KLOG.match(text):
        wall = _wall(None, int(match[2]), match[3], match[4], match[5], match[6])
        return replace(_after(found, match, wall=wall), tag=found.tag or "kubelet")
    if match := _CRI.match(text):
        return _after(found, match)
    if match := _REPEATED.match(text):
        return replace(found, text=match[1])
    if text.startswith("kernel: "):
        return replace(found, text=text[8:], tag=found.tag or "kernel")
    return found


def _after(
    found: Stamped,
    match: re.Match[str],
    *,
    boot: float | None = None,
    wall: WallTime | None = None,
    by_program: bool = False,
) -> Stamped:
    return replace(
        found,
        text=found.text[match.end() :],
        boot_seconds=found.boot_seconds if boot is None else boot,
        wall=found.wall or wall,
        by_program=found.by_program or by_program,
    )


def _sender(found: Stamped) -> Stamped:
    """After a date: the machine and the program, in syslog's way or RFC 5424's."""
    if match := _RFC5424.match(found.text):
        return replace(found, text=found.text[match.end() :], tag=found.tag or _program(match[1]))
    return _host(found)


def _host(found: Stamped) -> Stamped:
    """`host kernel: ` or `systemd-oomd[600]: `. A message of the kernel's own may look alike: it then has no tag."""
    match = _HOST_TAG.match(found.text)
    if match is None or found.text.startswith(_KERNEL_OWN):
        return found
    return replace(found, text=found.text[match.end() :], tag=found.tag or _program(match[1]))


#: Beginnings of the kernel's own messages that look like `tag: ` or `host tag: `.
_KERNEL_OWN = (
    "Out of memory",
    "Memory cgroup",
    "No available memory",
    "oom-kill:",
    "oom_reaper:",
    "Killed process",
    "oomd kill:",
    "NVRM:",
    "amdgpu",
    "Memory failure",
    "MCE",
    "mce:",
)


def _program(tag: str) -> str:
    return tag.rpartition("/")[2]


def _month(name: str) -> int | None:
    digits = name.rstrip("月")
    if digits.isdecimal():
        return int(digits)
    return _MONTHS.index(name) + 1 if name in _MONTHS else None


def _wall(
    year: str | None, month: int | None, day: str, hour: str, minute: str, second: str, zone: str | None = None
) -> WallTime | None:
    if month is None or not 1 <= month <= 12 or not 1 <= int(day) <= 31:
        return None
    seconds = int(hour) * 3600 + int(minute) * 60 + float(second.replace(",", "."))
    number = int(year) if year else None
    try:
        datetime(number or 2000, month, int(day))
    except ValueError:
        return None
    return WallTime(month, int(day), seconds, number, _offset(zone))


def _offset(zone: str | None) -> int | None:
    if zone is None:
        return None
    if zone == "Z":
        return 0
    digits = zone[1:].replace(":", "")
    seconds = int(digits[:2]) * 3600 + int(digits[2:]) * 60
    return -seconds if zone[0] == "-" else seconds


def _of_moment(moment: datetime) -> WallTime:
    zone = moment.astimezone().utcoffset()
    seconds = moment.hour * 3600 + moment.minute * 60 + moment.second + moment.microsecond / 1e6
    return WallTime(moment.month, moment.day, seconds, moment.year, int(zone.total_seconds()) if zone else 0)


def _unquoted(text: str) -> str:
    """The value of a field: JSON's string in journalctl -o json-pretty and dmesg -J, bare in -o export and verbose."""
    text = text.strip().removesuffix(",")
    if text.startswith('"'):
        try:
            value = json.loads(text)
        except ValueError:
            return text.strip('"')
        return value if isinstance(value, str) else text
    return text


def _of_json(line: str) -> Stamped | None:
    """A record of journalctl -o json, or of Docker's json-file. None: it is none, or has no message."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict):
        return None
    message = message_text(record.get("MESSAGE", record.get("log", record.get("msg"))))
    if message is None:
        return None
    tag = record.get("SYSLOG_IDENTIFIER") or record.get("_COMM") or record.get("_TRANSPORT") or ""
    found = Stamped(
        message[:_MAX_LINE_CHARS],
        boot_seconds=_number(record.get("_SOURCE_MONOTONIC_TIMESTAMP"), 1e6),
        wall=_epoch(_number(record.get("__REALTIME_TIMESTAMP"), 1e6)),
        tag=tag if isinstance(tag, str) else "",
        by_program=record.get("SYSLOG_FACILITY") not in (None, "0", 0) and record.get("_TRANSPORT") == "kernel",
    )
    inner = _take_off(replace(found, tag="")) if found.tag == "" else _take_off(found)
    return replace(inner, wall=found.wall or inner.wall, tag=found.tag or inner.tag)


def _number(value: object, unit: float) -> float | None:
    try:
        return int(value) / unit if isinstance(value, (str, int)) else None
    except ValueError:
        return None


def _epoch(seconds: float | None) -> WallTime | None:
    try:
        return _of_moment(datetime.fromtimestamp(seconds)) if seconds is not None else None
    except (ValueError, OverflowError, OSError):
        return None


def with_minutes(lines: Iterable[str]) -> Iterator[str]:
    """dmesg -H says the minute once and then seconds since the last line: each line with the last minute known."""
    minute = ""
    for line in lines:
        if line.startswith("["):
            if match := _MINUTE.match(line):
                minute = match[0].rstrip()
            elif minute and _DELTA.match(line):
                yield f"{minute} {line}"
                continue
        yield line
