"""The kernel's log: which process it killed for memory, and what it says of the GPUs.

Lines of Linux 2.6 (RHEL 6) to 6.x, as dmesg (with and without -T), /dev/kmsg and journald show them, and the two
daemons that kill for memory from user space: systemd-oomd and earlyoom.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from .roots import Roots

_KMSG = re.compile(r"\d+,\d+,(\d+),[^;]{0,40};")
_DMESG = re.compile(r"(?:<\d{1,3}>)?\[ {0,12}(\d{1,12}\.\d{1,6})\] ?")
_DMESG_DATE = re.compile(r"\[[A-Z][a-z]{2} [A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \d{4}\] ?")
_JOURNAL = re.compile(
    r"(?:[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d(?:\.\d{1,9})?|\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d\S{0,20}) "
    r"[\w.-]{1,64} [\w.@-]{1,64}(?:\[\d{1,10}\])?: "
)

# mm/oom_kill.c. A name is a comm: at most 15 bytes, any of them: spaces, quotes, ")".
# 5.4 on: "Killed process N (name) total-vm:"; 4.x the same behind "Kill process … score";
# RHEL 7: "Killed process N (name), UID 48, total-vm:"; 2.6: "Killed process N, UID 27, (name) total-vm:"
_CAUSE = r"(?:(?:Memory cgroup out of memory|Out of memory)[^:]{0,40}: )?"
_KILLED = re.compile(_CAUSE + r"Killed process (\d{1,10}),?(?: UID \d{1,10},)? \((.{0,40})\),? (?=UID |total-vm:)")
_KILLED_SHORT = re.compile(_CAUSE + r"Killed process (\d{1,10}) \((.{0,40})\)$")
# 5.0 on. Every key may be absent, and unknown words stand for the constraint.
_CONSTRAINT = re.compile(r"oom-kill:constraint=(\w{1,40}),")
_KEY = re.compile(r"(?:^|,)(oom_memcg|task_memcg|task|pid|uid)=")
# 3.x, 4.x: "Task in A killed as a result of limit of B"
_TASK_IN = re.compile(r"Task in (\S{1,4096}) killed as a result of limit of (\S{1,4096})")
# systemd src/oom/oomd-manager.c
_OOMD = re.compile(r"Killed (/\S{1,4096}) due to memory (?:pressure|used)")
# earlyoom kill.c
_EARLYOOM = re.compile(r'sending SIG(?:TERM|KILL) to process (\d{1,10})(?: uid \d{1,10})? "(.{0,40}?)"')


@dataclass(frozen=True)
class KernelKill:
    """One kill. `pid` is the host's; None: a whole cgroup (systemd-oomd). `boot_seconds`: None where only a date
    stands. `oom_memcg`: the cgroup whose limit was met, `task_memcg`: the one the process was in."""

    pid: int | None
    name: str
    text: str
    constraint: str | None = None
    oom_memcg: str | None = None
    task_memcg: str | None = None
    boot_seconds: float | None = None


def split_stamp(line: str) -> tuple[float | None, str]:
    """(seconds since boot or None, message) of a line in any of the shapes."""
    line = line.strip()
    if match := _KMSG.match(line):
        return int(match[1]) / 1e6, line[match.end() :]
    seconds: float | None = None
    for _ in range(3):
        if match := _DMESG.match(line):
            seconds = float(match[1])
        elif not (match := _JOURNAL.match(line) or _DMESG_DATE.match(line)):
            break
        line = line[match.end() :]
    return seconds, line.removeprefix("kernel: ")


def parse_kills(lines: Iterable[str]) -> tuple[KernelKill, ...]:
    """Every process (or cgroup) that was killed for memory, once each, in order."""
    kills: list[KernelKill] = []
    about: KernelKill | None = None  # a constraint line, its kill comes with the next lines
    for line in lines:
        seconds, text = split_stamp(line[:8192])
        if constraint := _constraint(text, seconds):
            about = constraint
            kills.append(constraint)
        elif match := _TASK_IN.match(text):
            about = KernelKill(None, "", text, None, match[2], match[1], seconds)
        elif match := _KILLED.match(text) or _KILLED_SHORT.match(text):
            kill = KernelKill(int(match[1]), match[2], text, boot_seconds=seconds)
            about = _add_kill(kills, kill, about)
        elif match := _OOMD.match(text):
            kills.append(KernelKill(None, "", text, None, match[1], match[1], seconds))
        elif match := _EARLYOOM.match(text):
            kills.append(KernelKill(int(match[1]), match[2], text, boot_seconds=seconds))
    return tuple(kills)


def _add_kill(kills: list[KernelKill], kill: KernelKill, about: KernelKill | None) -> KernelKill | None:
    """Joins a `Killed process` line with the constraint line before it; that one alone was already a kill."""
    if about and about.pid == kill.pid and kills and kills[-1] is about:
        kills[-1] = replace(about, name=kill.name, text=kill.text)
        return about
    if about and about.pid is None:
        kill = replace(kill, oom_memcg=about.oom_memcg, task_memcg=about.task_memcg)
    elif about and about.pid != kill.pid:  # memory.oom.group: the rest of the group, same cgroups
        kill = replace(kill, constraint=about.constraint, oom_memcg=about.oom_memcg, task_memcg=about.task_memcg)
    kills.append(kill)
    return about


def _constraint(text: str, seconds: float | None) -> KernelKill | None:
    match = _CONSTRAINT.match(text)
    if not match:
        return None
    keys = list(_KEY.finditer(text))
    values = {
        key[1]: text[key.end() : keys[index + 1].start() if index + 1 < len(keys) else len(text)]
        for index, key in enumerate(keys)
    }
    if not values.get("pid", "").isdigit():
        return None
    return KernelKill(
        pid=int(values["pid"]),
        name=values.get("task", ""),
        text=text,
        constraint=match[1],
        oom_memcg=values.get("oom_memcg"),
        task_memcg=values.get("task_memcg"),
        boot_seconds=seconds,
    )


# drivers of NVIDIA: hardware errors among the Xids (docs.nvidia.com/deploy/xid-errors): double bit ECC, NVLink,
# fallen off the bus, uncontained error, GSP time-out. Xid 13, 31, 43, 45 are the application's own.
_XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]{4,20})\): (48|64|74|79|95|119|120|140)\b")
_OFF_THE_BUS = re.compile(r"NVRM: .{0,80}GPU has fallen off the bus", re.IGNORECASE)


def gpu_faults(lines: Iterable[str]) -> tuple[str, ...]:
    """The kernel's lines of a broken GPU."""
    texts = (split_stamp(line[:2048])[1] for line in lines)
    return tuple(text for text in texts if _XID.match(text) or _OFF_THE_BUS.match(text))


def read_kernel_log(roots: Roots, since_boot_seconds: float) -> tuple[str, ...] | None:
    """The kernel's lines at or after that time on its clock, as dmesg writes them: `[ 2220.604174] text`.

    None: it can't be read (no right, no /dev/kmsg): that is not the same as nothing.
    """
    try:
        descriptor = os.open(roots.kmsg, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    lines: list[str] = []
    try:
        for record in _kmsg_records(descriptor):
            match = _KMSG.match(record)
            if match and int(match[1]) / 1e6 >= since_boot_seconds:
                microseconds = int(match[1])
                text = record[match.end() :].split("\n", 1)[0]
                lines.append(f"[{microseconds // 10**6:5d}.{microseconds % 10**6:06d}] {text}")
    except OSError:
        return tuple(lines) or None
    finally:
        os.close(descriptor)
    return tuple(lines)


def _kmsg_records(descriptor: int) -> Iterable[str]:
    """Each read of the device gives one record; a plain file (a test's) gives lines."""
    rest = ""
    while True:
        try:
            data = os.read(descriptor, 2**16)
        except BlockingIOError:  # the end, for now
            break
        except BrokenPipeError:  # overwritten while reading: the next read goes on with the oldest there is
            continue
        if not data:
            break
        rest += data.decode("utf-8", errors="replace")
        *complete, rest = rest.split("\n")
        yield from complete
    if rest:
        yield rest
