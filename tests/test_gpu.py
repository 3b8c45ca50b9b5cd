"""NVML in a child process, against the stand-in library."""

from __future__ import annotations

import pytest
from world import GIB, Gpus

from supervisor_vllm.evidence.gpu import read_gpus_in_child, visible_gpus
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
