"""NVML in a child process, against the stand-in library."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil
import pytest
from world import GIB, Gpus

from supervisor_vllm.evidence.device import read_devices
from supervisor_vllm.evidence.gpu import GpuReading, read_gpus_in_child
from supervisor_vllm.evidence.visible import visible_gpus


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
    assert device.driver == "580.95.05"


def seen(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> GpuReading:
    for name, value in gpus.environment.items():
        monkeypatch.setenv(name, value)
    return read_gpus_in_child()


def test_mig_devices_instead_of_their_gpu(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus.provide(count=2, total_bytes=80 * GIB)
    for place, size, gi, ci in ((0, 20, 3, 0), (2, 40, 1, 1)):
        uuid = f"MIG-{place}0000000-0000-4000-8000-000000000000"
        gpus.devices[0].add_mig(place, uuid=uuid, total_bytes=size * GIB, gi=gi, ci=ci)
    reading = seen(gpus, monkeypatch)
    assert reading.problem is None
    gpu = "GPU-5a4e0000-0000-4000-8000-000000000000"
    assert [
        (device.index, device.total_bytes // GIB, device.parent_uuid, device.gpu_instance, device.compute_instance)
        for device in reading.gpus
    ] == [(0, 20, gpu, 3, 0), (0, 40, gpu, 1, 1), (1, 80, "", None, None)]
    assert [device.total_bytes // GIB for device in visible_gpus(reading.gpus, "MIG-2")] == [40]
    assert [device.total_bytes // GIB for device in visible_gpus(reading.gpus, f"MIG-{gpu}/1/1")] == [40]
    assert [device.total_bytes // GIB for device in visible_gpus(reading.gpus, "0")] == [20]


def test_who_holds_a_mig_device(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    first = gpus.devices[0].add_mig(0, uuid="MIG-a", total_bytes=20 * GIB, gi=1)
    gpus.devices[0].add_mig(1, uuid="MIG-b", total_bytes=20 * GIB, gi=2)
    with gpus.neighbour(1) as process:
        first.hold(process.pid, 18 * GIB)
        reading = seen(gpus, monkeypatch)
    assert [[holder.pid for holder in device.holders] for device in reading.gpus] == [[process.pid], []]
    assert [device.free_bytes // GIB for device in reading.gpus] == [2, 20]


def test_mig_numbers_that_can_not_be_read(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    mig = gpus.devices[0].add_mig(0, uuid="MIG-a", total_bytes=20 * GIB, gi=1)
    (mig.path / "error.gi").write_text("3")
    (device,) = seen(gpus, monkeypatch).gpus
    assert (device.gpu_instance, device.compute_instance, device.free_bytes) == (None, 0, 20 * GIB)


def test_mig_mode_without_a_mig_device(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    (gpus.directory / "gpu0" / "mig").mkdir()
    reading = seen(gpus, monkeypatch)
    assert reading.gpus == ()
    assert "no MIG device" in (reading.problem or "")


@pytest.mark.parametrize(("code", "says"), [(4, "Insufficient Permissions"), (3, "Not Supported")])
def test_who_holds_the_memory_can_not_be_read(
    code: int, says: str, gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    (gpus.directory / "gpu0" / "error.processes").write_text(str(code))
    reading = seen(gpus, monkeypatch)
    assert reading.gpus[0].total_bytes
    assert reading.gpus[0].holders == ()
    assert not reading.gpus[0].holders_known
    assert reading.problem == f"GPU 0: who holds its memory can't be read ({says})"


def test_nobody_holds_it_is_known(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    (device,) = seen(gpus, monkeypatch).gpus
    assert device.holders == ()
    assert device.holders_known


def test_processes_that_draw_and_clients_of_mps_hold_memory_too(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    with gpus.neighbour(5 * GIB) as both, gpus.neighbour(1) as drawing, gpus.neighbour(1) as client:
        device = gpus.devices[0]
        device.release(drawing.pid)
        device.release(client.pid)
        device.list_as("graphics", drawing.pid, 2 * GIB)
        device.list_as("graphics", both.pid, 5 * GIB)
        device.list_as("mps", client.pid, GIB)
        (read,) = seen(gpus, monkeypatch).gpus
    assert {holder.pid: holder.bytes for holder in read.holders} == {
        both.pid: 5 * GIB,
        drawing.pid: 2 * GIB,
        client.pid: GIB,
    }


def test_a_driver_without_the_other_lists(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    for call in ("graphics", "mps"):
        (gpus.directory / "gpu0" / f"error.{call}").write_text("3")
    with gpus.neighbour(5 * GIB) as process:
        reading = seen(gpus, monkeypatch)
    assert [holder.pid for holder in reading.gpus[0].holders] == [process.pid]
    assert (reading.gpus[0].holders_known, reading.problem) == (True, None)


def test_a_holder_whose_size_the_driver_does_not_say(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    with gpus.neighbour(GIB) as process:
        (gpus.devices[0].path / "holders" / str(process.pid)).write_text("-")
        (device,) = seen(gpus, monkeypatch).gpus
    assert [(holder.pid, holder.bytes) for holder in device.holders] == [(process.pid, None)]


def test_unified_memory_is_the_hosts(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jetson: neither memory nor processes nor a UUID."""
    for call in ("memory", "processes", "uuid", "mig"):
        (gpus.directory / "gpu0" / f"error.{call}").write_text("3")
    (device,) = seen(gpus, monkeypatch).gpus
    assert device.unified
    assert not device.holders_known
    assert device.total_bytes == psutil.virtual_memory().total
    assert 0 < device.free_bytes <= device.total_bytes
    assert visible_gpus((device,), "0") == (device,)


@pytest.mark.parametrize(("code", "says"), [(18, "mismatch"), (15, "lost")])
def test_a_driver_that_is_gone(code: int, says: str, gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus.set_error(code)
    reading = seen(gpus, monkeypatch)
    assert reading.gpus == ()
    assert says in (reading.problem or "")


def test_one_gpu_of_several_is_lost(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus.provide(count=3)
    gpus.set_error(15, index=1)
    reading = seen(gpus, monkeypatch)
    assert [device.index for device in reading.gpus] == [0, 2]
    assert reading.problem == "GPU 1: GPU is lost"


def test_a_driver_that_was_never_there(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    (gpus.directory / "init_error").write_text("9")
    reading = seen(gpus, monkeypatch)
    assert (reading.gpus, reading.problem) == ((), "NVML: Driver Not Loaded")


@pytest.mark.parametrize("place", ["", "gpu0"])
def test_a_driver_that_hangs_is_given_up(place: str, gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in gpus.environment.items():
        monkeypatch.setenv(name, value)
    (gpus.directory / place / "hang").touch()
    begin = time.monotonic()
    reading = read_gpus_in_child(timeout_sec=2.0)
    assert time.monotonic() - begin < 5
    assert (reading.gpus, reading.problem) == ((), "the driver did not answer within 2 s")
    me = psutil.Process()
    assert not [child for child in me.children() if "supervisor_vllm.evidence.gpu" in " ".join(child.cmdline())]


def test_a_driver_that_crashes_takes_only_its_reader(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    (gpus.directory / "crash").touch()
    reading = seen(gpus, monkeypatch)
    assert (reading.gpus, reading.problem) == ((), "the driver's library ended its reader with signal 11")


def test_a_reader_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pynvml.py").write_text("raise RuntimeError('half an installation')")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    reading = read_gpus_in_child()
    assert reading == GpuReading(problem="the driver could not be asked: RuntimeError: half an installation")


def test_the_devices_of_a_programs_environment(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus.provide(count=4)
    for name, value in gpus.environment.items():
        monkeypatch.setenv(name, value)
    reading = read_devices(cpu_backend=False, environment={"CUDA_VISIBLE_DEVICES": "3,1"})
    assert ([device.index for device in reading.gpus], reading.problem) == ([3, 1], None)
    reading = read_devices(cpu_backend=False, environment={"CUDA_VISIBLE_DEVICES": "$GPUS"})
    assert (reading.gpus, reading.problem) == (
        (),
        "CUDA_VISIBLE_DEVICES=$GPUS names none of the 4 devices of this machine",
    )
