"""What the kernel's log says of the GPUs: NVIDIA's Xids and amdgpu's errors, and which of them are a broken device.

The table is NVIDIA's Xid catalog (docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html, October 2025) by its
"immediate action": what needs a reset of the GPU, of the machine or a person is a fault of the device; RESTART_APP is
the application's own error (an illegal address, a bad kernel); IGNORE and preemptive clean-up (43, 44, 45) are the echo
of something else: an Xid 45 follows every process that is killed with work on the device, by the OOM killer too.
`NV_ERR_NO_MEMORY` and other lines of the driver without an Xid say nothing (#56824).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from ..lazy import lazy
from .kernel_stamp import stamped

Meaning = Literal["fault", "application", "echo", "note"]

_RESET_XIDS = (46, 62, 64, 95, 109, 110, 119, 120, 136, 140, 143, 151, 155, 156, 158)
_REPAIR_XIDS = (48, 54, 74, 79, 167, 168, 169, 171, 172)
_FAULT_XIDS = frozenset(_RESET_XIDS + _REPAIR_XIDS)
_ECHO_XIDS = frozenset((14, 37, 38, 43, 44, 45))
#: NVLink of Blackwell: each of them is said with `Fatal` or `Nonfatal`.
_LINK_XIDS = frozenset(range(144, 151))
#: 63: a memory row will be remapped; 92: many corrected errors; 94 is the application's end, the device goes on.
_NOTE_XIDS = frozenset((61, 63, 65, 66, 67, 73, 81, 92, 93))
_RECOVERY_XID = 154

_XID = lazy(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]{4,20})[^)]{0,40}\): (\d{1,3})(?:,|$)")
_XID_PID = lazy(r"\bpid='?(\d{1,10})\b")
_OFF_THE_BUS = lazy(r"NVRM: .{0,80}fallen off the bus", re.IGNORECASE)
_DRAINED = lazy(r"GPU recovery action changed from .{1,60} to \w{1,10} \((?!None)")
_AMD = lazy(r"(?:amdgpu[ :]|\[drm:amdgpu|\[drm\] VRAM is lost)")
_AMD_PID = lazy(r"\b[Pp]rocess .{0,64}? ?pid (\d{1,10})\b")
_AMD_FAULT = lazy(
    r"GPU reset\(?\d*\)? failed|GPU Recovery Failed|device lost from bus|uncorrectable hardware error|"
    r"uncorrectable (?:hardware )?errors? detected|RAS poison|hw_init of IP block .{1,40} failed",
    re.IGNORECASE,
)
_AMD_HUNG = lazy(r"\bring \S{1,40} timeout|GPU reset(?:\(\d+\))? begin|VRAM is lost due to GPU reset")
_AMD_RECOVERED = lazy(r"GPU reset(?:\(\d+\))? succeeded", re.IGNORECASE)
_AMD_APPLICATION = lazy(r"page fault \(src_id|[Mm]emory access fault|VM fault|illegal (?:register|instruction)")


@dataclass(frozen=True)
class GpuEvent:
    """`code`: the Xid. `device`: its PCI address. `pid`: the process that the line names, as the host numbers it."""

    text: str
    meaning: Meaning
    code: int | None = None
    device: str = ""
    pid: int | None = None


def gpu_events(lines: Iterable[str]) -> tuple[GpuEvent, ...]:
    """Everything that the NVIDIA and AMD drivers say of errors, in order."""
    events: list[GpuEvent] = []
    hung: list[GpuEvent] = []  # AMD: resets that haven't succeeded yet
    for line in lines:
        if "NVRM" not in line and "amdgpu" not in line and "VRAM is lost" not in line:
            continue
        found = stamped(line)
        if not found.by_kernel:
            continue
        if event := _nvidia(found.text) or _amd(found.text):
            events.append(event)
            if _AMD_HUNG.search(event.text):
                hung.append(event)
        if _AMD_RECOVERED.search(found.text):  # what led to it is over: the device works again
            events = [_as_note(event) if event in hung else event for event in events]
            hung = []
    return tuple(events)


def gpu_faults(lines: Iterable[str]) -> tuple[str, ...]:
    """The kernel's lines of a broken GPU."""
    return tuple(event.text for event in gpu_events(lines) if event.meaning == "fault")


def _as_note(event: GpuEvent) -> GpuEvent:
    return GpuEvent(event.text, "note", event.code, event.device, event.pid)


def _nvidia(text: str) -> GpuEvent | None:
    if not text.startswith("NVRM:"):
        return None
    match = _XID.match(text)
    if match is None:
        return GpuEvent(text, "fault", 79) if _OFF_THE_BUS.match(text) else None
    code = int(match[2])
    pid = _XID_PID.search(text)
    return GpuEvent(text, _meaning(code, text), code, match[1], int(pid[1]) if pid else None)


def _meaning(code: int, text: str) -> Meaning:
    if code in _FAULT_XIDS:
        return "fault"
    if code in _LINK_XIDS:
        return "fault" if re.search(r"\bFatal\b", text) else "note"
    if code == _RECOVERY_XID:
        return "fault" if _DRAINED.search(text) else "note"
    if code in _ECHO_XIDS:
        return "echo"
    return "note" if code in _NOTE_XIDS else "application"


def _amd(text: str) -> GpuEvent | None:
    if not _AMD.match(text):
        return None
    pid = _AMD_PID.search(text)
    number = int(pid[1]) if pid and int(pid[1]) else None
    if _AMD_FAULT.search(text) or _AMD_HUNG.search(text):
        return GpuEvent(text, "fault", pid=number)
    if number or _AMD_APPLICATION.search(text):
        return GpuEvent(text, "application", pid=number)
    return None
