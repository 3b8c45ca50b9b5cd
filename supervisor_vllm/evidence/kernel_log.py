"""The kernel's log: which process it killed for memory, and what it says of the GPUs.

Lines of Linux 2.6 (RHEL 5 and 6) to 6.x in every shape in which people have them (kernel_stamp.py), and what kills for
memory from user space: systemd-oomd, earlyoom, nohang and oomd; kubelet's, containerd's and systemd's words about it.
Wordings from mm/oom_kill.c and mm/memcontrol.c of 2.6.18 to 6.18 and from the daemons' sources.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import cast

from ..lazy import lazy
from .gpu_events import GpuEvent, gpu_events, gpu_faults
from .kernel_stamp import Stamped, WallTime, stamped, with_minutes
from .roots import Roots

__all__ = [
    "GpuEvent",
    "KernelKill",
    "gpu_events",
    "gpu_faults",
    "last_sequence",
    "parse_kills",
    "read_kernel_file",
    "read_kernel_log",
    "split_stamp",
]

# A name is a comm: at most 15 bytes, any of them: spaces, quotes, ")", ",". /dev/kmsg escapes some as \x0a.
_NAME = r"(.{0,64})"
#: mm/oom_kill.c `message`; 2.6.18 wrote "Out of Memory", and "No available memory (MPOL_BIND)" or "… in cpuset".
_CAUSE = r"(?:(Memory cgroup out of memory|Out of [Mm]emory|No available memory)[^:]{0,40}: )?"
#: OpenVZ and Virtuozzo name the container.
_VE = r'(?: in VE "[^"]{0,64}")?'
# 5.1 on: "Out of memory: Killed process N (name) total-vm:"; 4.x the same behind "Kill process … score";
# RHEL 7: "Killed process N (name), UID 48, total-vm:"; RHEL 6: "Killed process N, UID 27, (name) total-vm:"
# 2.6.3x: "vsz:" in place of "total-vm:"
_KILLED = lazy(
    _CAUSE + r"Killed process (\d{1,10}),?(?: UID \d{1,10},)? \(" + _NAME + r"\)" + _VE + r",? (?=UID |total-vm:|vsz:)"
)
_KILLED_SHORT = lazy(_CAUSE + r"Killed process (\d{1,10}) \(" + _NAME + r"\)" + _VE + r"\.?$")
#: 2.6.36 to 4.x: a process that shares the victim's memory goes with it.
_SHARING = lazy(r"Kill(?:ed)? process (\d{1,10}),?(?: UID \d{1,10},)? \(" + _NAME + r"\)" + _VE + r" sharing same mem")
#: The choice, not the kill: up to 5.0 a child could be "sacrificed" in its place.
_CHOSEN = lazy(_CAUSE + r"[Kk]ill process (\d{1,10}) \(" + _NAME + r"\)" + _VE + r" score ")
#: 5.3 on: chosen, but it was on its way out by itself.
_SKIPPED = lazy(_CAUSE + r"OOM victim (\d{1,10}) \(" + _NAME + r"\) is already exiting\. Skip killing the task")
# 5.0 on. Every key may be absent, and unknown words stand for the constraint.
_CONSTRAINT = lazy(r"oom-kill: ?constraint=(\w{1,40}),")
_KEY = lazy(r"(?:^|,)(oom_memcg|task_memcg|task|pid|uid)=")
# 2.6.3x to 4.x
_TASK_IN = lazy(r"Task in (.{1,4096}?) killed as a result of limit of (.{1,4096})$")
# 4.19 on, before or after the first kill
_GROUP = lazy(r"Tasks in (.{1,4096}) are going to be killed due to memory\.oom\.group set")

# systemd src/oom/oomd-manager.c: 248 on "Killed", 258 on "Marked … for killing"
_SYSTEMD_OOMD = lazy(r"(?:Killed|Marked) (/.{0,4096}?)(?: for killing)? due to memory (?:pressure|used)\b")
# systemd's own word about a unit (src/core/unit.c); it doesn't say which process
_UNIT_KILLED = lazy(
    r"([\w:.\\@-]{1,255}\.(?:service|scope|slice)): (?:A process of this unit has been killed by the OOM killer|"
    r"Failed with result 'oom-kill'|systemd-oomd killed \d{1,9} process)"
)
# oomd (facebookincubator/oomd, BaseKillPlugin::logKill, "v2"): the path is relative, a dry run says so
_OOMD = lazy(r"oomd kill: [\d.]{1,20} [\d.]{1,20} [\d.]{1,20} (\S{1,4096}) {1,2}\d{1,20} .{0,512}?\bkiller:(\(dry\))?")
# earlyoom kill.c, 1.0 to 1.8
_EARLYOOM = lazy(
    r"sending (?:SIGTERM|SIGKILL) to process (\d{1,10})(?: uid \d{1,10})? "
    r'"(.{0,64}?)"(?:: (?:badness|oom_score) |$)'
)
_EARLYOOM_FAILED = lazy(r"kill failed: |dryrun, not actually sending any signal")
# nohang 0.1 on: the victim, then the signal, then the outcome, in a line each
_NOHANG_VICTIM = lazy(r"PID: {1,8}(\d{1,10}), name: " + _NAME + r", state: ")
_NOHANG_SENDING = lazy(r"Sending (?:SIGTERM|SIGKILL) to the victim$")
_NOHANG_DONE = lazy(r"OK; total response time: ")
# kubelet's event (pkg/kubelet/oom), and its log; containerd's event of a container's cgroup
_KUBELET = lazy(r"System OOM encountered, victim process: " + _NAME + r", pid: (\d{1,10})\b")
_KUBELET_LOG = lazy(r'Got sys oom event.{0,20}?"?Pid"?:(\d{1,10})[, ]"?ProcessName"?:"?([^",]{0,64}?)"?[, ]"?TimeOf')
_CONTAINERD = lazy(r'TaskOOM event .{0,16}?(?:container_id:\\?"?|ContainerID:)([0-9a-f]{12,64})\b')

#: Cheap: a line that has none of these needs no further look. The last two are how journald writes what is no UTF-8.
_WORDS = ("ill", "oom", "OOM", "SIG", "PID: ", "OK; ", "dryrun", 'MESSAGE":[', 'MESSAGE" : [')
_DEVICE_WORDS = ("NVRM", "amdgpu", "VRAM is lost")
_MESSAGE = lazy(
    r"[Kk]illed process|[Kk]ill process|oom-kill: ?constraint|killed as a result of limit|are going to be killed|"
    r"OOM victim|due to memory |killed by the OOM killer|'oom-kill'|systemd-oomd killed|oomd kill|sending SIG|"
    r"kill failed|dryrun|PID: |to the victim|OK; total|sys oom event|System OOM|TaskOOM|MESSAGE\" ?: ?\["
)


@dataclass(frozen=True)
class KernelKill:
    """One kill.

    `pid` is the host's; None: not said. `boot_seconds` and `wall`: when, as far as the line says. `oom_memcg`: the
    cgroup whose limit was met, `task_memcg`: the one the process was in. `whole_cgroup`: all of task_memcg was killed.
    `unit`: the systemd unit or the container in which something was killed. `for_cgroup`: for a cgroup's limit (True),
    for the whole host (False), or not said.
    """

    pid: int | None
    name: str
    text: str
    constraint: str | None = None
    oom_memcg: str | None = None
    task_memcg: str | None = None
    boot_seconds: float | None = None
    wall: WallTime | None = None
    killer: str = "kernel"
    whole_cgroup: bool = False
    unit: str | None = None
    for_cgroup: bool | None = None


def split_stamp(line: str) -> tuple[float | None, str]:
    """(seconds since boot or None, message) of a line in any of the shapes."""
    found = stamped(line)
    return found.boot_seconds, found.text


@dataclass
class _Reader:
    """What earlier lines say of the next ones."""

    kills: list[KernelKill] = field(default_factory=list)
    #: constraint lines whose `Killed process` hasn't come: pid → place in kills
    open: dict[int, int] = field(default_factory=dict)
    last_open: int | None = None
    task_in: tuple[str, str] | None = None
    chosen: int | None = None
    group: KernelKill | None = None
    nohang: tuple[int, str] | None = None
    nohang_sending: bool = False


def parse_kills(lines: Iterable[str]) -> tuple[KernelKill, ...]:
    """Every process (or cgroup) that was killed for memory, in order. Linear, and quick where nothing was killed."""
    reader = _Reader()
    for line in with_minutes(lines):
        if any(word in line for word in _WORDS) and _MESSAGE.search(line, 0, 2**16):
            _read(reader, stamped(line))
    return tuple(kill for kill in reader.kills if kill is not _NONE)


#: A kill that turned out not to be one: its place stays, so that the others keep theirs.
_NONE = KernelKill(None, "", "")


def _read(reader: _Reader, found: Stamped) -> None:
    if found.by_kernel and _kernel_line(reader, found):
        return
    if _daemon_line(reader, found):
        return
    _platform_line(reader, found)


def _kernel_line(reader: _Reader, found: Stamped) -> bool:
    text = found.text
    if constraint := _constraint(found):
        reader.open[constraint.pid or 0] = reader.last_open = len(reader.kills)
        reader.kills.append(constraint)
        reader.task_in = reader.group = reader.chosen = None
    elif match := _KILLED.match(text) or _KILLED_SHORT.match(text):
        _add_killed(reader, _kill(found, match[2], match[3], match[1]))
    elif match := _SHARING.match(text):
        last = reader.kills[-1] if reader.kills else _NONE
        kill = _kill(found, match[1], match[2], None)
        reader.kills.append(replace(kill, oom_memcg=last.oom_memcg, for_cgroup=last.for_cgroup))
    elif match := _CHOSEN.match(text):
        reader.chosen = int(match[2])
    elif match := _SKIPPED.match(text):
        _drop(reader, int(match[2]))
    elif match := _TASK_IN.match(text):
        reader.task_in = match[1], match[2]
        reader.group = None
    elif match := _GROUP.match(text):
        reader.group = _cgroup_kill(found, match[1], "kernel")
        reader.kills.append(reader.group)
    else:
        return False
    return True


def _kill(found: Stamped, pid: str, name: str, cause: str | None) -> KernelKill:
    return KernelKill(
        pid=int(pid),
        name=name,
        text=found.text,
        boot_seconds=found.boot_seconds,
        wall=found.wall,
        for_cgroup=None if cause is None else cause.startswith("Memory cgroup"),
    )


def _cgroup_kill(found: Stamped, path: str, killer: str) -> KernelKill:
    return KernelKill(
        pid=None,
        name="",
        text=found.text,
        task_memcg=path if path.startswith("/") else f"/{path}",
        boot_seconds=found.boot_seconds,
        wall=found.wall,
        killer=killer,
        whole_cgroup=True,
    )


def _add_killed(reader: _Reader, kill: KernelKill) -> None:
    """Joins a `Killed process` line with what was said of it before.

    The lines before are rationed (10 in 5 s), this one isn't: it may stand alone behind another's, and then nothing of
    that is true of it.
    """
    place = reader.open.pop(kill.pid or 0, None)
    if place is not None and reader.kills[place] is not _NONE:
        about = reader.kills[place]
        reader.kills[place] = replace(about, name=kill.name, text=kill.text, for_cgroup=_either(kill, about))
        reader.last_open = None if reader.last_open == place else reader.last_open
        return
    if reader.chosen is not None and reader.chosen != kill.pid and reader.last_open is not None:
        about = reader.kills[reader.last_open]  # 5.0: chosen, but its child was killed
        if about.pid == reader.chosen:
            _drop(reader, reader.chosen)
            kill = replace(kill, constraint=about.constraint, oom_memcg=about.oom_memcg)
    elif reader.task_in:
        kill = replace(kill, task_memcg=reader.task_in[0], oom_memcg=reader.task_in[1], for_cgroup=True)
    elif reader.group and _soon(reader.group, kill):
        kill = replace(kill, task_memcg=reader.group.task_memcg)
    reader.task_in = reader.chosen = None
    reader.kills.append(kill)


def _either(kill: KernelKill, about: KernelKill) -> bool | None:
    return kill.for_cgroup if kill.for_cgroup is not None else about.for_cgroup


def _soon(group: KernelKill, kill: KernelKill) -> bool:
    if group.boot_seconds is None or kill.boot_seconds is None:
        return True
    return kill.boot_seconds - group.boot_seconds < 5.0


def _drop(reader: _Reader, pid: int) -> None:
    place = reader.open.pop(pid, None)
    if place is not None:
        reader.kills[place] = _NONE
        reader.last_open = None


def _constraint(found: Stamped) -> KernelKill | None:
    match = _CONSTRAINT.match(found.text)
    if not match:
        return None
    text = found.text
    keys = list(_KEY.finditer(text))
    values = {
        key[1]: text[key.end() : keys[index + 1].start() if index + 1 < len(keys) else len(text)]
        for index, key in enumerate(keys)
    }
    pid = values.get("pid", "")
    if not (pid.isascii() and pid.isdigit() and len(pid) <= 10):
        return None
    return KernelKill(
        pid=int(pid),
        name=values.get("task", ""),
        text=text,
        constraint=match[1],
        oom_memcg=values.get("oom_memcg"),
        task_memcg=values.get("task_memcg"),
        boot_seconds=found.boot_seconds,
        wall=found.wall,
        for_cgroup=True if "oom_memcg" in values else False if ",global_oom" in text else None,
    )


def _daemon_line(reader: _Reader, found: Stamped) -> bool:
    text, tag = found.text, found.tag
    if tag in ("", "systemd-oomd") and (match := _SYSTEMD_OOMD.match(text)):
        reader.kills.append(_cgroup_kill(found, match[1], "systemd-oomd"))
    elif tag in ("", "kernel", "oomd") and (match := _OOMD.match(text)):
        if not match[2]:
            reader.kills.append(_cgroup_kill(found, match[1], "oomd"))
    elif tag in ("", "kernel", "earlyoom") and (match := _EARLYOOM.match(text)):
        reader.kills.append(replace(_kill(found, match[1], match[2], None), killer="earlyoom", for_cgroup=False))
    elif tag in ("", "kernel", "earlyoom") and _EARLYOOM_FAILED.match(text):
        if reader.kills and reader.kills[-1].killer == "earlyoom":
            reader.kills[-1] = _NONE
    elif tag in ("", "nohang") and (match := _NOHANG_VICTIM.match(text)):
        reader.nohang, reader.nohang_sending = (int(match[1]), match[2]), False
    elif tag in ("", "nohang") and _NOHANG_SENDING.match(text):
        reader.nohang_sending = True
    elif tag in ("", "nohang") and _NOHANG_DONE.match(text):
        if reader.nohang and reader.nohang_sending:
            pid, name = reader.nohang
            kill = replace(_kill(found, str(pid), name, None), killer="nohang", for_cgroup=False)
            reader.kills.append(replace(kill, text=f"nohang sent a signal to process {pid} ({name})"))
        reader.nohang, reader.nohang_sending = None, False
    else:
        return False
    return True


def _platform_line(reader: _Reader, found: Stamped) -> None:
    """What systemd, kubelet and containerd say of a kill that the kernel made."""
    text = found.text
    if found.tag in ("", "systemd") and (match := _UNIT_KILLED.match(text)):
        reader.kills.append(_unit_kill(found, match[1], "systemd"))
    elif match := _CONTAINERD.search(text):
        reader.kills.append(_unit_kill(found, match[1], "containerd"))
    elif match := _KUBELET.search(text):
        reader.kills.append(replace(_kill(found, match[2], match[1], None), killer="kubelet"))
    elif match := _KUBELET_LOG.search(text):
        reader.kills.append(replace(_kill(found, match[1], match[2], None), killer="kubelet"))


def _unit_kill(found: Stamped, unit: str, killer: str) -> KernelKill:
    return KernelKill(None, "", found.text, boot_seconds=found.boot_seconds, wall=found.wall, killer=killer, unit=unit)


# -- the sources


def read_kernel_log(
    roots: Roots, since_boot_seconds: float, since_sequence: int | None = None
) -> tuple[str, ...] | None:
    """The kernel's lines at or after that time on its clock, as dmesg writes them: `[ 2220.604174] text`.

    None: it can't be read (no right, no /dev/kmsg): that is not the same as nothing. Lines after the record
    `since_sequence` (`last_sequence`) count whatever their time: the log's clock isn't set by NTP and drifts from the
    others by seconds a week. What a program wrote into it keeps its facility (dmesg -r): `<14>[ 2220.604174] text`.
    """
    try:
        descriptor = os.open(roots.kmsg, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    lines: list[str] = []
    try:
        for record in _kmsg_records(descriptor):
            match = _KMSG.match(record)
            if match is None:
                continue
            microseconds = int(match[3])
            late = since_sequence is not None and int(match[2]) > since_sequence
            if late or microseconds / 1e6 >= since_boot_seconds:
                facility = f"<{match[1]}>" if int(match[1]) >= 8 else ""
                text = record[match.end() :].split("\n", 1)[0]
                lines.append(f"{facility}[{microseconds // 10**6:5d}.{microseconds % 10**6:06d}] {text}")
    except OSError:
        return tuple(lines) or None
    finally:
        os.close(descriptor)
    return tuple(lines)


def last_sequence(roots: Roots) -> int | None:
    """The number of the newest record of the kernel's log. None: it can't be read, or is empty."""
    try:
        descriptor = os.open(roots.kmsg, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    newest = None
    try:
        for record in _kmsg_records(descriptor):
            if match := _KMSG.match(record):
                newest = int(match[2])
    except OSError:
        pass
    finally:
        os.close(descriptor)
    return newest


_KMSG = lazy(r"(\d{1,4}),(\d{1,20}),(\d{1,20}),[^;]{0,80};")


def _kmsg_records(descriptor: int) -> Iterator[str]:
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


#: Of something larger, the end is what matters.
KERNEL_FILE_MAX_BYTES = 64 * 2**20
_HUMAN_DELTA = re.compile(rb"^\[ {1,8}\+\d{1,9}\.\d{1,9}\] ", re.MULTILINE)


def read_kernel_file(path: str, *, max_bytes: int = KERNEL_FILE_MAX_BYTES) -> tuple[str, ...]:
    """The lines of a kernel log in a file that may matter, in order; .gz, .bz2 and .xz as logrotate leaves them.

    OSError (EOFError and the like are turned into it): it can't be read. Of a file cut while it was compressed, what is
    there counts.
    """
    data = _last_bytes(path, max_bytes)
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):  # a redirect of PowerShell's
        data = data.decode("utf-16", errors="replace").encode()
    text = data.decode("utf-8", errors="replace")
    lines = text.splitlines()
    if _HUMAN_DELTA.search(data[: 2**20]):  # dmesg -H: times are known by the lines between, too
        lines = list(with_minutes(lines))
    words = (*_WORDS, *_DEVICE_WORDS)
    return tuple(line for line in lines if any(word in line for word in words))


def _last_bytes(path: str, max_bytes: int) -> bytes:
    with open(path, "rb") as file:
        magic = file.read(6)
        stream = _unpacking(path, magic)
        if stream is None:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - max_bytes))
            return file.read()
    with stream:
        return _unpacked(stream, max_bytes)


def _unpacking(path: str, magic: bytes) -> io.BufferedIOBase | None:
    if magic[:2] not in (b"\x1f\x8b", b"BZ", b"\xfd7"):
        return None
    import bz2
    import gzip
    import lzma

    if magic.startswith(b"\x1f\x8b"):
        return cast(io.BufferedIOBase, gzip.open(path))
    if magic.startswith(b"BZh"):
        return cast(io.BufferedIOBase, bz2.open(path))
    if magic.startswith(b"\xfd7zXZ"):
        return cast(io.BufferedIOBase, lzma.open(path))
    return None


def _unpacked(stream: io.BufferedIOBase, max_bytes: int) -> bytes:
    """The end of it, holding no more than twice that in memory."""
    kept = io.BytesIO()
    try:
        while chunk := stream.read1(2**20):  # read() would lose what stands before a cut
            kept.write(chunk)
            if kept.tell() > 2 * max_bytes:
                kept = io.BytesIO(kept.getvalue()[-max_bytes:])
                kept.seek(0, os.SEEK_END)
    except Exception as error:  # each of the three has its own
        if not kept.tell():
            raise OSError(f"not a whole archive: {error}") from None
    return kept.getvalue()[-max_bytes:]
