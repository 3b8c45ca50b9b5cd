"""Whose the pids of a driver are: in the host's own pid namespace, and in a container's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from world import GIB, REPOSITORY, Gpus

from supervisor_vllm.evidence.device import name_holders
from supervisor_vllm.evidence.gpu import read_gpus_in_child
from supervisor_vllm.evidence.holders import located
from supervisor_vllm.evidence.roots import Roots
from supervisor_vllm.incident import GpuHolder, GpuMemory, ProcessRef

INITIAL, CONTAINER = 4026531836, 4026532176


def proc(directory: Path, namespace: int, processes: dict[int, tuple[str, tuple[str, ...]]]) -> Roots:
    """The kernel's files: our own pid namespace, and each process's name and open files."""
    (directory / "self" / "ns").mkdir(parents=True)
    (directory / "self" / "ns" / "pid").symlink_to(f"pid:[{namespace}]")
    for pid, (name, files) in processes.items():
        fds = directory / str(pid) / "fd"
        fds.mkdir(parents=True)
        (fds.parent / "comm").write_text(f"{name}\n")
        for number, target in enumerate(files):
            (fds / str(number)).symlink_to(target)
    return Roots(proc=directory)


def holding(*pids: int) -> tuple[GpuMemory, ...]:
    return (GpuMemory(0, "GPU-a", "x", 80 * GIB, 8 * GIB, tuple(GpuHolder(pid, GIB) for pid in pids)),)


WORKER = ("VLLM::Worker_TP0", ("/dev/null", "socket:[9]", "/dev/nvidiactl", "/dev/nvidia0"))
STRANGER = ("nginx", ("/dev/null", "/var/log/nginx.log"))


def test_on_the_host_every_living_pid_counts(tmp_path: Path) -> None:
    (device,) = located(holding(7, 8, 9), proc(tmp_path, INITIAL, {7: WORKER, 8: STRANGER}))
    assert [(holder.pid, holder.name, holder.elsewhere) for holder in device.holders] == [
        (7, "VLLM::Worker_TP0", False),
        (8, "nginx", False),
        (9, "", True),
    ]
    assert device.holders_known


def test_in_a_container_a_pid_counts_only_where_its_process_has_the_device_open(tmp_path: Path) -> None:
    (device,) = located(holding(7, 8, 301234), proc(tmp_path, CONTAINER, {7: WORKER, 8: STRANGER}))
    assert [(holder.pid, holder.name, holder.elsewhere) for holder in device.holders] == [
        (7, "VLLM::Worker_TP0", False),
        (8, "", True),
        (301234, "", True),
    ]
    assert device.holders_known


def test_a_pid_of_elsewhere_is_never_named_ours(tmp_path: Path) -> None:
    gpus = located(holding(7, 8), proc(tmp_path, CONTAINER, {7: STRANGER, 8: STRANGER}))
    (device,) = name_holders(gpus, own=(ProcessRef(7, 1.0),), orphans=(ProcessRef(8, 1.0),))
    assert [holder.owner for holder in device.holders] == ["neighbour", "neighbour"]


def test_an_empty_list_in_a_container_says_nothing(tmp_path: Path) -> None:
    (device,) = located(holding(), proc(tmp_path, CONTAINER, {}))
    assert not device.holders_known
    (device,) = located(holding(), proc(tmp_path / "host", INITIAL, {}))
    assert device.holders_known


def test_a_driver_that_says_pid_0(tmp_path: Path) -> None:
    (device,) = located(holding(0), proc(tmp_path, INITIAL, {}))
    assert device.holders[0].elsewhere


def test_a_namespace_that_can_not_be_read_counts_as_a_container(tmp_path: Path) -> None:
    roots = proc(tmp_path, INITIAL, {7: STRANGER})
    (tmp_path / "self" / "ns" / "pid").unlink()
    (device,) = located(holding(7), roots)
    assert device.holders[0].elsewhere


def _can_unshare() -> bool:
    command = ["unshare", "--user", "--map-root-user", "--fork", "--pid", "--mount-proc", "true"]
    try:
        return subprocess.run(command, capture_output=True, timeout=20).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def test_in_a_real_pid_namespace(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver names 1 (here it is the listener's own shell) and a pid of the host; memory is read all the same."""
    if not _can_unshare():
        pytest.skip("no new pid namespace can be made here (unshare)")
    gpus.devices[0].hold_elsewhere(1, 60 * GIB)
    gpus.devices[0].hold_elsewhere(301234, 10 * GIB)
    program = (
        "import json\n"
        "from supervisor_vllm.evidence.gpu import read_gpus_in_child, to_json\n"
        "print(json.dumps(to_json(read_gpus_in_child().gpus[0])))"
    )
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--fork", "--pid", "--mount-proc", sys.executable, "-c", program],
        env=os.environ | gpus.environment | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    device = json.loads(done.stdout)
    assert (device["free_bytes"], device["holders_known"]) == (10 * GIB, True)
    holders = [(holder["pid"], holder["bytes"], holder["name"], holder["elsewhere"]) for holder in device["holders"]]
    assert sorted(holders) == [(1, 60 * GIB, "", True), (301234, 10 * GIB, "", True)]
    for name, value in gpus.environment.items():
        monkeypatch.setenv(name, value)
    first = next(holder for holder in read_gpus_in_child().gpus[0].holders if holder.pid == 1)
    assert not first.elsewhere
