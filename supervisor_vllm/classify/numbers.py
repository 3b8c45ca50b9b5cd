"""The numbers of torch's sentence, in all its forms, and who holds the device's memory.

torch c10/cuda/CUDACachingAllocator.cpp: up to 2.0 "(GPU 0; Y total capacity; Z already allocated; F free; …)",
2.1 and 2.2 with "capacty", since then as in 2.13; ROCm says nothing of "this process".
"""

from __future__ import annotations

from ..incident import Incident, Numbers
from ..lazy import lazy
from .pattern import numbers_of, pattern, size_bytes

_TORCH = tuple(
    pattern(source)
    for source in (
        r"Tried to allocate <tried_bytes:size>",
        r"\bGPU <device:device>(?: has|;| \()",
        r"total capaci?ty of <total_bytes:size>",
        r"; <total_bytes:size> total capacity",
        r"of which <free_bytes:size> is free",
        r"; <free_bytes:size> free;",
        r"this process has <process_bytes:size> memory in use",
        r"<pytorch_bytes:size> (?:is allocated by PyTorch|already allocated)",
        r"<reserved_unallocated_bytes:size> is reserved by PyTorch but unallocated",
    )
)
_RESERVED_TOTAL = lazy(r"(\d{1,12}(?:\.\d{1,6})? [KMGT]iB) reserved in total by PyTorch")
_PROCESS = lazy(r"Process (\d{1,10}) has (\d{1,12}(?:\.\d{1,6})? (?:bytes|[KMGT]iB)) memory in use")


def torch_numbers(text: str) -> Numbers:
    """Everything in torch's sentence but the holders."""
    found: Numbers = {}
    for expression in _TORCH:
        if match := expression.search(text):
            for name, value in numbers_of(match).items():
                found.setdefault(name, value)
    if (total := _RESERVED_TOTAL.search(text)) and "pytorch_bytes" in found:
        found["reserved_unallocated_bytes"] = max(0, size_bytes(total[1]) - found["pytorch_bytes"])
    return found


_RANK = lazy(r"(?:rank=|TP)(\d{1,4})")


def rank_of(process: str) -> int | None:
    """The tensor-parallel rank in a worker's prefix: `VllmWorker rank=1` (until 0.10.0), `VllmWorker TP1` (0.10.1),
    `Worker_TP1`, `Worker_DP0_TP1_EP1`. None: a single worker, or not a worker."""
    match = _RANK.search(process)
    return int(match[1]) if match else None


def torch_holders(text: str, incident: Incident, own_pids: frozenset[int]) -> list[dict[str, object]]:
    """Processes that torch's sentence names. A single one without "this process" is the process itself: in a
    container torch can't know its own pid on the host (pid namespaces, #31273)."""
    named = _PROCESS.findall(text)
    alone = len(named) == 1 and "this process has" not in text
    return [
        {
            "pid": int(pid),
            "bytes": size_bytes(size),
            "name": "",
            "owner": "own" if alone else owner_of(int(pid), incident, own_pids),
        }
        for pid, size in named
    ]


def device_holders(incident: Incident, own_pids: frozenset[int], device: int | None) -> list[dict[str, object]]:
    """Processes that the driver names, on the device of the message or on all. A message counts the devices that the
    program sees (CUDA_VISIBLE_DEVICES), in its order: so are `incident.gpus`."""
    return [
        {"pid": holder.pid, "bytes": holder.bytes, "name": holder.name, "owner": owner}
        for place, gpu in enumerate(incident.gpus)
        if device is None or place == device or len(incident.gpus) == 1
        for holder in gpu.holders
        for owner in (_owner_of_holder(holder.owner, holder.pid, incident, own_pids),)
    ]


def _owner_of_holder(said: str, pid: int, incident: Incident, own_pids: frozenset[int]) -> str:
    return said if said != "neighbour" else owner_of(pid, incident, own_pids)


def owner_of(pid: int, incident: Incident, own_pids: frozenset[int]) -> str:
    if any(orphan.pid == pid for orphan in incident.orphans):
        return "orphan"
    return "own" if pid in own_pids else "neighbour"


def neighbour_bytes(holders: list[dict[str, object]]) -> int:
    return sum(size for holder in holders if holder["owner"] != "own" and isinstance(size := holder["bytes"], int))
