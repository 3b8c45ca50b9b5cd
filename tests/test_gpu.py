"""NVML in a child process, against the stand-in library."""

from __future__ import annotations

import psutil
import pytest
from standin import gpu as standin_gpu
from world import GIB, Gpus

from supervisor_vllm.evidence.gpu import GpuReading, read_gpus_in_child, visible_gpus
from supervisor_vllm.incident import GpuMemory


def test_devices_and_who_holds_them(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in gpus.environment.items():
        monkeypatch.setenv(name, value)
    with gpus.neighbour(18 * GIB) as process:
        reading = read_gpus_in_child()
    assert reading.problem is None
    (device,) = reading.gpus
    (holder,) = device.holders
    assert (holder.pid, holder.bytes, holder.name) == (process.pid, 18 * GIB, "sleep")
    assert device.free_bytes <= device.total_bytes - 18 * GIB


def test_visible_devices_keep_cudas_order_and_end() -> None:
    gpus = tuple(GpuMemory(index, f"GPU-{index}abc", "x", 1, 1) for index in range(3))
    assert [gpu.index for gpu in visible_gpus(gpus, "2,GPU-0,9,1")] == [2, 0]
    assert visible_gpus(gpus, None) == gpus
    assert visible_gpus(gpus, "") == ()


def seen(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> GpuReading:
    for name, value in gpus.environment.items():
        monkeypatch.setenv(name, value)
    return read_gpus_in_child()


def test_mig_devices_instead_of_their_gpu(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus.provide(count=2, total_bytes=80 * GIB)
    (gpus.directory / "gpu0" / "mig").write_text("1")
    for place, size in ((1000, 20 * GIB), (1002, 40 * GIB)):
        standin_gpu.create(gpus.directory, index=place, total_bytes=size)
        (gpus.directory / f"gpu{place}" / "uuid").write_text(f"MIG-{place}0000-0000-4000-8000-000000000000")
    reading = seen(gpus, monkeypatch)
    assert reading.problem is None
    assert [(device.index, device.total_bytes // GIB, device.uuid[:4]) for device in reading.gpus] == [
        (0, 20, "MIG-"),
        (0, 40, "MIG-"),
        (1, 80, "GPU-"),
    ]
    assert [device.total_bytes // GIB for device in visible_gpus(reading.gpus, "MIG-1002,1")] == [40, 80]
    assert [device.total_bytes // GIB for device in visible_gpus(reading.gpus, "0")] == [20]


def test_mig_mode_without_a_mig_device(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    (gpus.directory / "gpu0" / "mig").write_text("1")
    reading = seen(gpus, monkeypatch)
    assert reading.gpus == ()
    assert "no MIG device" in (reading.problem or "")


def test_who_holds_the_memory_can_not_be_read(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    (gpus.directory / "gpu0" / "error.processes").write_text("4")
    reading = seen(gpus, monkeypatch)
    assert reading.gpus[0].total_bytes
    assert reading.gpus[0].holders == ()
    assert reading.problem == "GPU 0: who holds its memory can't be read (Insufficient Permissions)"


def test_unified_memory_is_the_hosts(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    (gpus.directory / "gpu0" / "error.memory").write_text("3")
    (device,) = seen(gpus, monkeypatch).gpus
    assert device.unified
    assert device.total_bytes == psutil.virtual_memory().total
    assert 0 < device.free_bytes <= device.total_bytes


@pytest.mark.parametrize(("code", "says"), [(18, "mismatch"), (15, "lost")])
def test_a_driver_that_is_gone(code: int, says: str, gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus.set_error(code)
    reading = seen(gpus, monkeypatch)
    assert reading.gpus == ()
    assert says in (reading.problem or "")


@pytest.mark.parametrize(
    ("words", "indices"),
    [("-1", []), ("0,0", []), ("GPU-", []), ("GPU-1a,0", [1, 0]), (" 2 , 1 ", [2, 1]), ("x,0", []), ("0,7,1", [0])],
)
def test_words_of_cuda_visible_devices(words: str, indices: list[int]) -> None:
    gpus = tuple(GpuMemory(index, f"GPU-{index}abc", "x", 1, 1) for index in range(3))
    assert [gpu.index for gpu in visible_gpus(gpus, words)] == indices
