"""The numbers of torch's sentence, in all its forms, and who holds the device's memory.

torch c10/cuda/CUDACachingAllocator.cpp: up to 2.0 "(GPU 0; Y total capacity; Z already allocated; F free; …)",
2.1 and 2.2 with "capacty", since then as in 2.13; ROCm says nothing of "this process".
"""

from __future__ import annotations

import dataclasses

from ..incident import GpuHolder, GpuMemory, Incident, Numbers, Verdict
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
        {
            "pid": holder.pid,
            "bytes": holder.bytes,
            "name": holder.name,
            "owner": _owner_of_holder(holder, incident, own_pids),
            "elsewhere": holder.elsewhere,
        }
        for place, gpu in enumerate(incident.gpus)
        if device is None or place == device or len(incident.gpus) == 1
        for holder in gpu.holders
    ]


def _owner_of_holder(holder: GpuHolder, incident: Incident, own_pids: frozenset[int]) -> str:
    if holder.elsewhere:  # a pid of ours that is the same is another process
        return "neighbour"
    return holder.owner if holder.owner != "neighbour" else owner_of(holder.pid, incident, own_pids)


def unique_holders(by_torch: list[dict[str, object]], by_driver: list[dict[str, object]]) -> list[dict[str, object]]:
    """Once each; the driver's word (it knows the name) over torch's, which only knows better what it is itself."""
    itself = {holder["pid"] for holder in by_torch if holder["owner"] == "own"}
    found: dict[object, dict[str, object]] = {holder["pid"]: holder for holder in by_torch}
    for number, holder in enumerate(by_driver):
        if holder["elsewhere"] and holder["pid"] in itself:
            holder = {**holder, "owner": "own"}
        found[holder["pid"] or f"unnamed {number}"] = holder
    return list(found.values())


def owner_of(pid: int, incident: Incident, own_pids: frozenset[int]) -> str:
    if any(orphan.pid == pid for orphan in incident.orphans):
        return "orphan"
    return "own" if pid in own_pids else "neighbour"


def neighbour_bytes(holders: list[dict[str, object]]) -> int:
    return sum(size for holder in holders if holder["owner"] != "own" and isinstance(size := holder["bytes"], int))


def with_host_numbers(verdict: Verdict, incident: Incident) -> Verdict:
    """The verdict with what the host, or its cgroup, had to give, and what of that the server held."""
    numbers: Numbers = {}
    if incident.host_before and incident.host_before.available_bytes:
        numbers["host_available_bytes"] = incident.host_before.available_bytes
        numbers["host_total_bytes"] = incident.host_before.total_bytes
    if incident.host_use:
        numbers["host_anonymous_bytes"] = incident.host_use.anonymous_bytes
        numbers["host_shared_bytes"] = incident.host_use.shared_bytes
    return dataclasses.replace(verdict, numbers={**numbers, **verdict.numbers})


def with_device_numbers(verdict: Verdict, incident: Incident) -> Verdict:
    """The verdict with total and free memory of its device, or of the tightest, where its own evidence has none. What
    the dead server and its orphans hold counts as free: they are ended before the next launch."""
    if not incident.gpus or "total_bytes" in verdict.numbers or not verdict.kind.startswith("gpu_"):
        return verdict

    def free_bytes(memory: GpuMemory) -> int:
        return memory.free_bytes + sum(holder.bytes or 0 for holder in memory.holders if holder.owner != "neighbour")

    place = verdict.numbers.get("device", len(incident.gpus))
    failed = incident.gpus[place : place + 1]
    tightest = min(failed or incident.gpus, key=free_bytes)
    numbers = {"total_bytes": tightest.total_bytes, "free_bytes": free_bytes(tightest), **verdict.numbers}
    return dataclasses.replace(verdict, numbers=numbers)
