"""AMD's GPUs through amdsmi, where that is installed (it comes with ROCm and isn't a dependency). Only in the reading
child: it loads the driver's library, and prints to stdout when it doesn't find it.

What amdsmi answers, ROCm 6.1 to 7.0 (amdsmi_interface.py): memory in bytes, `amdsmi_get_gpu_vram_usage` in MiB; "N/A"
for what isn't known; every error is an AmdSmiException, with the code's text in lines.
"""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

from ..incident import GpuHolder, GpuMemory

_MIB = 2**20
#: The kernel's door to AMD's compute devices.
_KFD = Path("/dev/kfd")


def read_amd_gpus(kfd: Path = _KFD) -> tuple[tuple[GpuMemory, ...], str | None]:
    """The devices in HIP's order, and what couldn't be read. Nothing of both where there is no AMD GPU."""
    try:
        import amdsmi
    except Exception as why:  # not only ImportError: without its C library it raises what comes along
        problem = f"amdsmi can't be loaded ({why or type(why).__name__}): AMD's GPUs are understood from the log alone"
        return (), problem if kfd.exists() else None
    problems: list[str] = []
    gpus: list[GpuMemory] = []
    try:
        amdsmi.amdsmi_init()
        for place, handle in enumerate(amdsmi.amdsmi_get_processor_handles()):
            try:
                gpus.append(_memory_of(amdsmi, handle, place, problems))
            except amdsmi.AmdSmiException as why:
                problems.append(f"GPU {place}: {_text(why)}")
    except Exception as why:  # AmdSmiException, or what a half installation raises
        problems.append(f"amdsmi: {_text(why)}")
    finally:
        with contextlib.suppress(Exception):
            amdsmi.amdsmi_shut_down()
    return tuple(sorted(_counted(gpus), key=lambda gpu: gpu.index)), "; ".join(problems) or None


def _counted(gpus: list[GpuMemory]) -> list[GpuMemory]:
    """With HIP's own numbers, where each device has one (ROCm 6.4 and later); else they are counted as they come."""
    if len({gpu.index for gpu in gpus}) == len(gpus) and all(gpu.index >= 0 for gpu in gpus):
        return gpus
    return [dataclasses.replace(gpu, index=place) for place, gpu in enumerate(gpus)]


def _memory_of(amdsmi: Any, handle: Any, place: int, problems: list[str]) -> GpuMemory:
    total, used = _vram(amdsmi, handle)
    holders, unknown = _holders(amdsmi, handle)
    if unknown:
        problems.append(f"GPU {place}: who holds its memory can't be read ({unknown})")
    asic = _said(amdsmi, "amdsmi_get_gpu_asic_info", handle) or {}
    enumeration = _said(amdsmi, "amdsmi_get_gpu_enumeration_info", handle) or {}
    hip_id = enumeration.get("hip_id")
    return GpuMemory(
        index=hip_id if isinstance(hip_id, int) else -1,
        uuid=_uuid(asic, enumeration) or _said(amdsmi, "amdsmi_get_gpu_device_uuid", handle) or "",
        name=str(asic.get("market_name") or ""),
        total_bytes=total,
        free_bytes=max(0, total - used),
        holders=holders,
        holders_known=unknown is None,
        driver=str((_said(amdsmi, "amdsmi_get_gpu_driver_info", handle) or {}).get("driver_version") or ""),
    )


def _vram(amdsmi: Any, handle: Any) -> tuple[int, int]:
    """Total and used bytes."""
    try:
        kind = amdsmi.AmdSmiMemoryType.VRAM
        return (
            int(amdsmi.amdsmi_get_gpu_memory_total(handle, kind)),
            int(amdsmi.amdsmi_get_gpu_memory_usage(handle, kind)),
        )
    except (amdsmi.AmdSmiException, AttributeError):
        usage = amdsmi.amdsmi_get_gpu_vram_usage(handle)
        return usage["vram_total"] * _MIB, usage["vram_used"] * _MIB


def _uuid(asic: dict[str, Any], enumeration: dict[str, Any]) -> str:
    """As HIP_VISIBLE_DEVICES has it: GPU- and the serial number's 16 digits."""
    named = str(enumeration.get("hip_uuid") or "")
    if named.startswith("GPU-"):
        return named
    serial = str(asic.get("asic_serial") or "").removeprefix("0x")
    return f"GPU-{serial.lower()}" if serial and serial != "N/A" else ""


def _said(amdsmi: Any, call: str, handle: Any) -> Any:
    """What one call says; None where this GPU or version doesn't have it."""
    try:
        return getattr(amdsmi, call)(handle)
    except (amdsmi.AmdSmiException, AttributeError, ValueError):
        return None


def _holders(amdsmi: Any, handle: Any) -> tuple[tuple[GpuHolder, ...], str | None]:
    """Who holds memory, and why that isn't known."""
    try:
        found = amdsmi.amdsmi_get_gpu_process_list(handle)
    except amdsmi.AmdSmiException as why:
        return (), _text(why)
    if not all(isinstance(entry, dict) for entry in found):
        return (), "amdsmi is older than ROCm 6.1"
    return tuple(GpuHolder(int(entry["pid"]), _held(entry), _named(entry)) for entry in found), None


def _held(entry: dict[str, Any]) -> int | None:
    """Bytes of device memory: `mem` counts host memory that the GPU sees, too."""
    size = (entry.get("memory_usage") or {}).get("vram_mem", entry.get("mem"))
    return size if isinstance(size, int) and size > 0 else None


def _named(entry: dict[str, Any]) -> str:
    name = str(entry.get("name") or "")
    return "" if name == "N/A" else name


def _text(why: Exception) -> str:
    return " ".join(str(why).split()) or type(why).__name__
