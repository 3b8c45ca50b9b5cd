"""Which device a worker's message is about: its place among those that the program sees, and the driver's own number.

A worker of the multiprocessing executor sees all devices of the program and counts as it does: `GPU 1` of
`Worker_TP1` is the second of CUDA_VISIBLE_DEVICES. Others see fewer, and then all of them say `GPU 0` or count within
their engine: Ray's workers have a CUDA_VISIBLE_DEVICES of their own, as each data-parallel engine had before vLLM
added its place to the device (0.32 v1/worker/gpu_worker.py). There the ranks in the prefix decide.
"""

from __future__ import annotations

import re

from ..incident import Incident, Numbers
from ..lazy import lazy
from ..policy.launch_command import LaunchCommand, parse_launch, whole_number

#: `VllmWorker rank=1` (until 0.10.0), `VllmWorker TP1` (0.10.1), `Worker_TP1`, `Worker_DP0_PP1_TP1_EP1`.
_RANK = lazy(r"(?:rank=|TP)(\d{1,4})")
_WHOLE_RANK = lazy(r"rank=(\d{1,4})")
_PIPELINE = lazy(r"_PP(\d{1,4})")
_ENGINE = lazy(r"DP(\d{1,4})")


def rank_of(process: str) -> int | None:
    """The tensor-parallel rank in a worker's prefix. None: a single worker, or not a worker."""
    match = _RANK.search(process)
    return int(match[1]) if match else None


def device_numbers(process: str, said: int | None, incident: Incident) -> Numbers:
    """`rank`, `device` and, where the driver could be asked, `gpu_index` (and `gpu_uuid` of a MIG device). `process`:
    the prefix of the line; `said`: the device that the message names."""
    found: Numbers = {}
    if (rank := rank_of(process)) is not None:
        found["rank"] = rank
    if said is not None:
        found["device"] = said
    place = _place(process, said, incident)
    if place is None:
        return found
    found["device"] = place
    gpu = incident.gpus[place]
    if gpu.uuid and not gpu.uuid.startswith("node"):
        found["gpu_index"] = gpu.index
        if gpu.uuid.startswith("MIG-"):
            found["gpu_uuid"] = gpu.uuid
    return found


def _place(process: str, said: int | None, incident: Incident) -> int | None:
    """Index in `incident.gpus`, which are the program's, in its order. None where the devices aren't known, or none of
    them can be meant (a worker on another machine)."""
    by_rank, within_engine = _places_by_rank(process, parse_launch(incident.command))
    if said is None:
        place = by_rank if rank_of(process) is not None or _PIPELINE.search(process) else None
    elif said in (0, within_engine) and by_rank is not None and by_rank < len(incident.gpus):
        place = by_rank
    else:
        place = said
    return place if place is not None and place < len(incident.gpus) else None


def _places_by_rank(process: str, launch: LaunchCommand) -> tuple[int | None, int | None]:
    """The worker's place on this machine, and within its engine; none where its prefix tells nothing."""
    if "_PCP" in process:  # one more dimension, whose size would have to be known
        return None, None
    sizes = [whole_number(launch.get(f"--{name}-parallel-size")) or 1 for name in ("tensor", "pipeline")]
    engine, pipeline, rank = _number(_ENGINE, process), _number(_PIPELINE, process), rank_of(process)
    if engine is None and pipeline is None and rank is None:
        return None, None
    within = (pipeline or 0) * sizes[0] + (rank or 0)
    if _WHOLE_RANK.search(process):
        within = rank or 0
    first = whole_number(launch.get("--data-parallel-start-rank")) or 0
    return max(0, (engine or 0) - first) * sizes[0] * sizes[1] + within, within


def _number(expression: re.Pattern[str], text: str) -> int | None:
    match = expression.search(text)
    return int(match[1]) if match else None
