"""GPUs in a process of its own: `python -m supervisor_vllm.evidence.gpu` prints what it finds, a JSON record a line.

So the listener never loads the driver's library, and a driver that hangs hangs a child: what that had said until then
counts, and so does the name of what it was asking. Through NVML; where that finds no device, through AMD's amdsmi.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from ..incident import GpuMemory, from_json, to_json

#: gpu: a GpuMemory; asking: what is asked next; problem: a sentence; driver_version, vendor: text; done: nothing is left
Record = dict[str, Any]


@dataclass(frozen=True)
class GpuReading:
    """`problem`: what could not be read, and why, for a person; the rest may still be known. None: all was read."""

    gpus: tuple[GpuMemory, ...] = ()
    problem: str | None = None
    driver_version: str | None = None
    vendor: Literal["nvidia", "amd"] = "nvidia"


#: Children that even SIGKILL didn't end: they sleep in the driver. As long as one is there, asking again only adds one.
_stuck: list[subprocess.Popen[bytes]] = []


def read_gpus_in_child(timeout_sec: float = 10.0) -> GpuReading:
    _stuck[:] = [child for child in _stuck if child.poll() is None]
    if _stuck:
        return GpuReading(
            problem=f"the GPU driver hangs: it holds process {_stuck[0].pid}, which can't be ended (dmesg)"
        )
    try:
        # in `/`: `python -m` looks for modules in its working directory first, and ours may be anybody's
        child = subprocess.Popen(
            [sys.executable, "-m", "supervisor_vllm.evidence.gpu"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd="/",
        )
    except OSError as why:
        return GpuReading(problem=f"the GPUs could not be asked ({why})")
    try:
        output, _ = child.communicate(timeout=timeout_sec)
    except subprocess.TimeoutExpired as late:
        _end(child)
        return _reading(late.output or b"", f"the GPU driver did not answer within {timeout_sec:g} s")
    return _reading(output, f"the process that asked the GPU driver ended with {_ending(child.returncode)}")


def _end(child: subprocess.Popen[bytes]) -> None:
    """Never waits for long: in the driver, a process may sleep through a SIGKILL."""
    child.kill()
    try:
        child.wait(timeout=1.0)
    except subprocess.TimeoutExpired:
        _stuck.append(child)
    if child.stdout:
        child.stdout.close()


def _ending(returncode: int) -> str:
    if returncode >= 0:
        return f"status {returncode}"
    with contextlib.suppress(ValueError):
        return signal.Signals(-returncode).name
    return f"signal {-returncode}"


def _reading(output: bytes, ended_early: str) -> GpuReading:
    """`ended_early`: the problem where the records don't come to their end."""
    gpus, problems = [], []
    last: Record = {}
    known: dict[str, str] = {}
    asking = None
    for line in output.splitlines():
        try:
            last = json.loads(line)
        except ValueError:  # the last one, cut
            continue
        if "gpu" in last:
            gpus.append(from_json(GpuMemory, last["gpu"]))
        elif "problem" in last:
            problems.append(last["problem"])
        elif "asking" in last:
            asking = last["asking"]
        else:
            known.update({name: last[name] for name in ("driver_version", "vendor") if name in last})
    if "done" not in last:
        problems.append(f"{ended_early} (asked about {asking})" if asking else ended_early)
    vendor: Literal["nvidia", "amd"] = "amd" if known.get("vendor") == "amd" else "nvidia"
    return GpuReading(tuple(gpus), "; ".join(problems) or None, known.get("driver_version"), vendor)


def read_gpus() -> Iterator[Record]:
    """Only in the child: it loads the drivers' libraries."""
    from . import amd, nvml

    no_device: list[Record] = []
    found = False
    for record in nvml.read():
        found = found or "gpu" in record or "asking" in record
        if "problem" in record and not found:
            no_device.append(record)  # that there's no NVIDIA driver is no problem where the GPUs are AMD's
        else:
            yield record
    if not found:
        for record in amd.read():
            no_device = [] if "gpu" in record or "asking" in record else no_device
            yield record
    yield from no_device
    yield {"done": True}


def main() -> int:
    # libraries print to stdout what isn't ours (amdsmi does when it finds no driver): the records go elsewhere
    with os.fdopen(os.dup(1), "w") as records:
        os.dup2(2, 1)
        for record in read_gpus():
            print(json.dumps(to_json(record)), file=records, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
