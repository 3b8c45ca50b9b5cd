"""AMD's GPUs through amdsmi, against the stand-in module (its head says what is in its state)."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from world import GIB, TESTS, Gpus

from supervisor_vllm.evidence.amd import read_amd_gpus
from supervisor_vllm.evidence.device import read_devices
from supervisor_vllm.evidence.gpu import GpuReading, read_gpus_in_child

MI300 = {"total": 192 * GIB, "used": 20 * GIB, "name": "AMD Instinct MI300X"}


@pytest.fixture
def amd(gpus: Gpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """amd([{…}, …]): these devices, and no NVIDIA driver."""

    def provide(state: Any) -> None:
        (gpus.directory / "init_error").write_text("9")
        file = tmp_path / "amd.json"
        file.write_text(json.dumps(state))
        path = f"{TESTS / 'standin' / 'amd'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        for name, value in {**gpus.environment, "PYTHONPATH": path, "SUPERVISOR_VLLM_TEST_AMD": str(file)}.items():
            monkeypatch.setenv(name, value)

    return provide


def test_devices_and_who_holds_them(amd: Any) -> None:
    amd([MI300 | {"serial": "0xEA5A7F2900000001", "processes": [[os.getpid(), 18 * GIB, "N/A"]]}])
    reading = read_gpus_in_child()
    assert (reading.problem, reading.vendor) == (None, "amd")
    (device,) = reading.gpus
    assert (device.index, device.uuid, device.name) == (0, "GPU-ea5a7f2900000001", "AMD Instinct MI300X")
    assert (device.total_bytes, device.free_bytes) == (192 * GIB, 172 * GIB)
    assert device.driver == "6.14.14"
    (holder,) = device.holders
    assert (holder.pid, holder.bytes) == (os.getpid(), 18 * GIB)
    assert holder.name == Path("/proc/self/comm").read_text().strip()


def test_an_amdsmi_that_counts_in_mib(amd: Any) -> None:
    amd([MI300 | {"only_mib": True}])
    (device,) = read_gpus_in_child().gpus
    assert (device.total_bytes, device.free_bytes) == (192 * GIB, 172 * GIB)


def test_hips_own_numbers(amd: Any) -> None:
    amd([MI300 | {"hip_id": 1, "name": "b"}, MI300 | {"hip_id": 0, "name": "a"}])
    assert [(gpu.index, gpu.name) for gpu in read_gpus_in_child().gpus] == [(0, "a"), (1, "b")]


def test_before_rocm_64_they_count_as_they_come(amd: Any) -> None:
    amd([MI300 | {"name": "a"}, MI300 | {"name": "b"}])
    assert [(gpu.index, gpu.name) for gpu in read_gpus_in_child().gpus] == [(0, "a"), (1, "b")]


def seen(environment: dict[str, str]) -> GpuReading:
    return read_devices(cpu_backend=False, environment=environment)


def test_the_devices_of_a_programs_environment(amd: Any) -> None:
    amd([MI300 | {"serial": f"0x{number:016X}"} for number in range(4)])
    assert [gpu.index for gpu in seen({"ROCR_VISIBLE_DEVICES": "3,1", "HIP_VISIBLE_DEVICES": "1"}).gpus] == [1]
    assert [gpu.index for gpu in seen({"CUDA_VISIBLE_DEVICES": "2"}).gpus] == [2]
    assert [gpu.index for gpu in seen({"HIP_VISIBLE_DEVICES": "GPU-0000000000000003"}).gpus] == [3]
    reading = seen({"ROCR_VISIBLE_DEVICES": "9"})
    assert reading.problem == "ROCR_VISIBLE_DEVICES=9 names none of the 4 devices of this machine"


def test_who_holds_the_memory_can_not_be_read(amd: Any) -> None:
    amd([MI300 | {"processes": 10}])
    reading = read_gpus_in_child()
    assert reading.gpus[0].free_bytes == 172 * GIB
    assert not reading.gpus[0].holders_known
    assert reading.problem == (
        "GPU 0: who holds its memory can't be read (Error code: 10 | AMDSMI_STATUS_NO_PERM - Permission Denied)"
    )


def test_a_driver_that_is_gone(amd: Any) -> None:
    amd({"init_error": 34})
    reading = read_gpus_in_child()
    assert reading.gpus == ()
    assert reading.problem == "NVML: Driver Not Loaded; amdsmi: Error code: 34 | AMDSMI_STATUS_DRIVER_NOT_LOADED"


def test_with_an_nvidia_gpu_amdsmi_is_not_asked(amd: Any, gpus: Gpus) -> None:
    amd([MI300])
    (gpus.directory / "init_error").unlink()
    assert [gpu.name for gpu in read_gpus_in_child().gpus] == ["NVIDIA H100 80GB HBM3"]


def test_without_amdsmi_an_amd_machine_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "amdsmi", None)
    (tmp_path / "kfd").touch()
    gpus, problem = read_amd_gpus(tmp_path / "kfd")
    assert gpus == ()
    assert "log alone" in (problem or "")
    assert read_amd_gpus(tmp_path / "nothing") == ((), None)
