"""The stand-in GPUs: a directory that nvml.c reads too (its head says what lies where)."""

from __future__ import annotations

import os
from pathlib import Path

DIRECTORY_VARIABLE = "SUPERVISOR_VLLM_TEST_GPUS"

#: Fields of /proc/<pid>/stat, counted after the name's closing bracket (proc(5): 3 is state, 22 is starttime).
_STATE, _START_TIME = 0, 19


def start_time(pid: int) -> int:
    """Clock ticks since boot; 0 for a dead process or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if fields[_STATE] in "ZX" else int(fields[_START_TIME])


def visible_index(rank: int) -> int:
    """The device that vLLM's rank uses: the rank-th of CUDA_VISIBLE_DEVICES, the rank itself without it."""
    visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    return int(visible[rank]) if rank < len(visible) and visible[rank].isdigit() else rank


class Device:
    """One device: `path` is gpu<N> below the directory. Sizes in bytes."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def total_bytes(self) -> int:
        return int((self.path / "total").read_text())

    @property
    def free_bytes(self) -> int:
        return max(0, self.total_bytes - sum(self.holders().values()) - sum(self.elsewhere().values()))

    def holders(self) -> dict[int, int]:
        """Bytes by pid, of living processes."""
        found = {}
        for file in (self.path / "holders").iterdir():
            if not file.name.isdigit():
                continue
            try:
                held, *started = file.read_text().split()
            except (OSError, ValueError):
                continue
            living = start_time(int(file.name))
            if held == "-":  # the driver can't say how much
                continue
            if living and (not started or int(started[0]) == living):
                found[int(file.name)] = int(held)
        return found

    def elsewhere(self) -> dict[int, int]:
        """Bytes by pid, of processes in another pid namespace."""
        return {int(file.name): int(file.read_text()) for file in (self.path / "elsewhere").glob("*")}

    def hold_elsewhere(self, pid: int, held_bytes: int) -> None:
        """A process of another pid namespace holds so much: as the driver says it in a container."""
        (self.path / "elsewhere").mkdir(exist_ok=True)
        (self.path / "elsewhere" / str(pid)).write_text(str(held_bytes))

    def list_as(self, kind: str, pid: int, held_bytes: int) -> None:
        """The process is in NVML's list of `graphics` processes or of `mps` clients."""
        (self.path / kind).mkdir(exist_ok=True)
        (self.path / kind / str(pid)).write_text(f"{held_bytes} {start_time(pid)}")

    def add_mig(self, place: int, *, uuid: str, total_bytes: int, gi: int, ci: int = 0) -> Device:
        """Turn MIG mode on, with one more MIG device."""
        device = Device(self.path / "mig" / str(place))
        (device.path / "holders").mkdir(parents=True)
        for name, text in (("uuid", uuid), ("total", total_bytes), ("gi", gi), ("ci", ci), ("name", "NVIDIA MIG")):
            (device.path / name).write_text(str(text))
        return device

    def hold(self, pid: int, held_bytes: int) -> None:
        """Say that `pid` holds so much now. Renamed into place: a reader never sees half a number."""
        draft = self.path / "holders" / f".{pid}"
        draft.write_text(f"{held_bytes} {start_time(pid)}")
        draft.rename(self.path / "holders" / str(pid))

    def release(self, pid: int) -> None:
        (self.path / "holders" / str(pid)).unlink(missing_ok=True)


def create(directory: Path, *, index: int, total_bytes: int, name: str = "NVIDIA H100 80GB HBM3") -> Device:
    device = Device(directory / f"gpu{index}")
    (device.path / "holders").mkdir(parents=True, exist_ok=True)
    (device.path / "total").write_text(str(total_bytes))
    (device.path / "name").write_text(name)
    (device.path / "uuid").write_text(f"GPU-5a4e0000-0000-4000-8000-{index:012d}")
    return device


def own_device(rank: int = 0) -> Device:
    return Device(Path(os.environ[DIRECTORY_VARIABLE]) / f"gpu{visible_index(rank)}")
