"""A stand-in for AMD's amdsmi (ROCm 6.1 to 7.0), as far as it is asked: its names, units and exceptions.

In PYTHONPATH it stands for hardware that isn't here. SUPERVISOR_VLLM_TEST_AMD is a JSON file with one object a device:
    total, used      bytes
    serial, name     of amdsmi_get_gpu_asic_info
    hip_id           of amdsmi_get_gpu_enumeration_info; without it the call isn't supported (before ROCm 6.4)
    processes        [[pid, bytes, name]], or an error's code
    only_mib         the calls that answer in bytes aren't supported
or with {"init_error": code}.
"""

from __future__ import annotations

import enum
import json
import os
from pathlib import Path
from typing import Any

print("the real one prints on stdout when it doesn't find its library")


class AmdSmiException(Exception):
    pass


class AmdSmiLibraryException(AmdSmiException):
    def __init__(self, code: int) -> None:
        self.err_code = code
        self.err_info = {2: "AMDSMI_STATUS_NOT_SUPPORTED - Feature not supported"}.get(
            code, "AMDSMI_STATUS_NO_PERM - Permission Denied" if code == 10 else "AMDSMI_STATUS_DRIVER_NOT_LOADED"
        )

    def __str__(self) -> str:
        return f"Error code:\n\t{self.err_code} | {self.err_info}"


class AmdSmiMemoryType(enum.IntEnum):
    VRAM = 0


_STATE: Any = json.loads(Path(os.environ["SUPERVISOR_VLLM_TEST_AMD"]).read_text())


def amdsmi_init() -> None:
    if isinstance(_STATE, dict):
        raise AmdSmiLibraryException(_STATE["init_error"])


def amdsmi_shut_down() -> None:
    pass


def amdsmi_get_processor_handles() -> list[int]:
    return list(range(len(_STATE)))


def _bytes_of(handle: int, key: str) -> int:
    if _STATE[handle].get("only_mib"):
        raise AmdSmiLibraryException(2)
    return int(_STATE[handle][key])


def amdsmi_get_gpu_memory_total(handle: int, kind: AmdSmiMemoryType) -> int:
    return _bytes_of(handle, "total")


def amdsmi_get_gpu_memory_usage(handle: int, kind: AmdSmiMemoryType) -> int:
    return _bytes_of(handle, "used")


def amdsmi_get_gpu_vram_usage(handle: int) -> dict[str, int]:
    return {"vram_total": _STATE[handle]["total"] // 2**20, "vram_used": _STATE[handle]["used"] // 2**20}


def amdsmi_get_gpu_asic_info(handle: int) -> dict[str, Any]:
    device = _STATE[handle]
    return {"market_name": device.get("name", "N/A"), "asic_serial": device.get("serial", "N/A")}


def amdsmi_get_gpu_driver_info(handle: int) -> dict[str, str]:
    return {"driver_name": "amdgpu", "driver_version": "6.14.14", "driver_date": "2026/01/01"}


def amdsmi_get_gpu_device_uuid(handle: int) -> str:
    return f"{handle:08x}-0000-1000-8000-000000000000"


def amdsmi_get_gpu_enumeration_info(handle: int) -> dict[str, Any]:
    if "hip_id" not in _STATE[handle]:
        raise AmdSmiLibraryException(2)
    return {"hip_id": _STATE[handle]["hip_id"], "hip_uuid": ""}


def amdsmi_get_gpu_process_list(handle: int) -> list[dict[str, Any]]:
    found = _STATE[handle].get("processes", [])
    if isinstance(found, int):
        raise AmdSmiLibraryException(found)
    return [
        {
            "name": name,
            "pid": pid,
            "mem": held + 4096,
            "memory_usage": {"gtt_mem": 4096, "cpu_mem": 0, "vram_mem": held},
            "cu_occupancy": "N/A",
        }
        for pid, held, name in found
    ]
