"""The hidden world of a stand-in model: what it really needs. From MODEL/standin.json; sizes in bytes."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

GIB, MIB = 1 << 30, 1 << 20
FILE_NAME = "standin.json"


@dataclass(frozen=True)
class Fault:
    """`where`: startup, loading, profile, kv_cache, graph, ready, first_completion, nth_completion, after_seconds.
    `what`: engine_exception, illegal_memory_access, sigkill_worker, sigkill_engine, sigkill_self, sigkill_group, segv,
    shm_full, host_alloc, bad_model, exit0, hang, out_of_memory (the driver's own words).
    It strikes `times` times over all lives of the model directory (-1: always), then never again."""

    where: str
    what: str
    times: int = -1
    after_seconds: float = 0.0
    completion: int = 1


@dataclass(frozen=True)
class Figures:
    weights_bytes: int = 14 * GIB
    context_bytes: int = 0
    kv_bytes_per_token: int = 128 * 1024
    activation_bytes_per_token: int = 256 * 1024
    activation_bytes_per_seq: int = 0
    sampler_bytes_per_seq: int = MIB
    graph_bytes: int = GIB // 2
    graph_estimate_bytes: int | None = None  # None: as much as they take
    runtime_peak_bytes: int = 0
    runtime_bytes_per_token: int = 0
    max_position_embeddings: int = 32768
    load_seconds: float = 0.1
    health_seconds: float = 0.0  # from the engine's being ready to the port's being open
    completion_seconds: float = 0.0
    watchdog_seconds: float = 0.5  # vLLM's own is 5 (0.32 entrypoints/launchers/launcher.py watchdog_loop)
    touch_bytes_on_load: int = 0
    touch_bytes_on_completion: int = 0
    vocabulary: int = 151936
    faults: tuple[Fault, ...] = field(default=())

    @property
    def graph_estimate(self) -> int:
        return self.graph_bytes if self.graph_estimate_bytes is None else self.graph_estimate_bytes


def read(model: Path) -> Figures:
    values = json.loads((model / FILE_NAME).read_text()) if (model / FILE_NAME).is_file() else {}
    faults = values.pop("fault", values.pop("faults", ()))
    faults = [faults] if isinstance(faults, dict) else faults
    return Figures(**values, faults=tuple(Fault(**fault) for fault in faults))


def claim(model: Path, fault: Fault) -> bool:
    """Whether the fault strikes this time. The count outlives the process: one file a fault in the model directory."""
    if fault.times < 0:
        return True
    counter = model / f"standin.fault.{fault.where}.{fault.what}"
    struck = int(counter.read_text()) if counter.is_file() else 0
    if struck >= fault.times:
        return False
    counter.write_text(str(struck + 1))
    return True
