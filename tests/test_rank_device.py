"""Which rank died, on which device: as the message says it, as the program sees it, as the driver numbers it."""

from __future__ import annotations

from typing import Any

import pytest

from supervisor_vllm.classify import classify
from supervisor_vllm.classify.numbers import with_device_numbers
from supervisor_vllm.classify.summary import summary_of
from supervisor_vllm.explanation import ruled_out
from supervisor_vllm.incident import GpuHolder, GpuMemory, Incident, LogLine, ProcessRef
from supervisor_vllm.policy.launch_command import parse_launch

GIB = 2**30
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU {said} has a total capacity of"
#: Pids 902 to 905 hold the driver's GPUs 2 to 5.
GPUS = tuple(
    GpuMemory(index, f"GPU-{index}", "x", 80 * GIB, index * GIB, (GpuHolder(900 + index, GIB),))
    for index in range(2, 6)
)


def death(
    process: str, *, said: int = 0, command: str = "vllm serve m -tp 4", text: str = OOM, **facts: Any
) -> Incident:
    line = f"({process} pid=77) ERROR 05-01 12:00:00 [a.py:1] {text.format(said=said)}"
    facts = {"gpus": GPUS, "exit_status": 1} | facts
    return Incident("v", "2026-05-01T12:00:00+00:00", command=command, log=(LogLine(1, line),), **facts)


@pytest.mark.parametrize(
    ("process", "said", "command", "gpu", "device"),
    [
        # one process of several that see all devices: the message counts as the program does
        ("Worker_TP1", 1, "vllm serve m -tp 4", 3, 1),
        ("Worker", 3, "vllm serve m", 5, 3),
        ("EngineCore_DP0", 0, "vllm serve m", 2, 0),
        # Ray: each worker sees its own device alone
        ("Worker_TP3", 0, "vllm serve m -tp 4", 5, 3),
        ("VllmWorker rank=2", 0, "vllm serve m -tp 4", 4, 2),
        ("VllmWorker rank=3", 0, "vllm serve m -tp 2 -pp 2", 5, 3),
        ("Worker_PP1_TP0", 2, "vllm serve m -tp 2 -pp 2", 4, 2),
        ("Worker_PP1_TP1", 0, "vllm serve m -tp 2 --pipeline-parallel-size 2", 5, 3),
        # data parallel: the engine's place is in the message, or (before) it isn't
        ("Worker_DP1_TP1_EP3", 3, "vllm serve m -tp 2 -dp 2", 5, 3),
        ("Worker_DP1_TP1_EP3", 1, "vllm serve m -tp 2 -dp 2", 5, 3),
        ("EngineCore_DP1", 0, "vllm serve m -dp 4", 3, 1),
        # a second machine: its first data-parallel rank is its first device; its tensor ranks are not its own
        ("Worker_DP2_TP1", 1, "vllm serve m -tp 2 -dp 4 --data-parallel-start-rank 2", 3, 1),
        ("Worker_TP9", 1, "vllm serve m -tp 16", 3, 1),
    ],
)
def test_the_drivers_number_of_the_device(process: str, said: int, command: str, gpu: int, device: int) -> None:
    verdict = classify(death(process, said=said, command=command))
    assert (verdict.numbers["gpu_index"], verdict.numbers["device"]) == (gpu, device)
    assert [holder["pid"] for holder in verdict.numbers["holders"]] == [900 + gpu]


def test_a_person_reads_the_physical_device() -> None:
    verdict = classify(death("Worker_TP1", said=1))
    assert " on GPU 3 (device 1 of those it sees, rank 1): " in verdict.summary


def test_without_the_driver_the_message_stands_as_it_is() -> None:
    verdict = classify(death("Worker_TP1", said=0, gpus=()))
    assert "gpu_index" not in verdict.numbers
    assert " (device 0, rank 1): " in verdict.summary


def test_the_device_of_the_start_check() -> None:
    text = (
        "ValueError: Free memory on device cuda:{said} (3.0/79.1 GiB) on startup is less than desired GPU memory "
        "utilization (0.9, 71.19 GiB)."
    )
    verdict = classify(death("Worker_TP1", said=1, text=text))
    assert (verdict.kind, verdict.numbers["gpu_index"], verdict.numbers["rank"]) == ("gpu_neighbour", 3, 1)
    assert [holder["pid"] for holder in verdict.numbers["holders"]] == [903]
    assert "were free at the start on GPU 3 (device 1 of those it sees, rank 1), " in verdict.summary


def test_an_error_that_names_no_device() -> None:
    text = "RuntimeError: CUDA error: out of memory"
    assert classify(death("Worker_TP2", text=text)).numbers["gpu_index"] == 4
    assert "gpu_index" not in classify(death("EngineCore_DP0", text=text)).numbers


def test_a_mig_device_is_named_by_its_uuid() -> None:
    mig = GpuMemory(0, "MIG-1f00", "m", 20 * GIB, GIB, parent_uuid="GPU-a", gpu_instance=1, compute_instance=0)
    verdict = classify(death("EngineCore_DP0", gpus=(mig,), command="vllm serve m"))
    assert (verdict.numbers["gpu_index"], verdict.numbers["gpu_uuid"]) == (0, "MIG-1f00")
    assert " on GPU 0 (MIG-1f00): " in verdict.summary


def test_a_memory_node_has_no_drivers_number() -> None:
    verdict = classify(death("Worker_TP1", said=0, gpus=(GpuMemory(0, "node0", "CPU memory node0", 1, 1),)))
    assert "gpu_index" not in verdict.numbers


def test_the_numbers_are_of_the_device_that_failed() -> None:
    """GPU 2 is tighter; it isn't the one."""
    incident = death("Worker_TP2", text="RuntimeError: CUDA error: out of memory")
    verdict = with_device_numbers(classify(incident), incident)
    assert verdict.numbers["free_bytes"] == 4 * GIB


@pytest.mark.parametrize(
    ("flags", "count"),
    [("", 1), ("-tp 2 -pp 2", 4), ("-tp 2 -dp 2", 4), ("-tp 2 -dp 8 --data-parallel-size-local 2", 4)],
)
def test_the_devices_that_a_launch_takes(flags: str, count: int) -> None:
    assert parse_launch(f"vllm serve m {flags}").local_ranks == count


def test_which_worker_died_without_a_word() -> None:
    text = "Worker proc VllmWorker-3 died unexpectedly (exit code: -9), shutting down executor."
    verdict = classify(death("EngineCore_DP0", text=text))
    assert (verdict.kind, verdict.numbers["rank"]) == ("killed", 3)
    assert "its worker of rank 3 died" in verdict.summary


def test_a_holder_of_elsewhere_is_not_ours_by_its_pid() -> None:
    """In a container: the driver's 900 is another process than our 900."""
    gpu = GpuMemory(0, "GPU-a", "x", 80 * GIB, GIB, (GpuHolder(900, 60 * GIB, elsewhere=True),))
    tree, orphans = (ProcessRef(900, 1.0),), (ProcessRef(900, 1.0),)
    verdict = classify(death("EngineCore_DP0", gpus=(gpu,), tree=tree, orphans=orphans))
    (holder,) = verdict.numbers["holders"]
    assert (holder["owner"], holder["elsewhere"]) == ("neighbour", True)
    said = summary_of("gpu_neighbour", verdict.numbers, "")
    assert "pid 900 (not visible from here) with 60.00 GiB" in said


def test_what_torch_says_of_itself_stands() -> None:
    """In a container torch names its own process by the host's pid, and has no other to name."""
    gpu = GpuMemory(0, "GPU-a", "x", 80 * GIB, GIB, (GpuHolder(301234, 60 * GIB, elsewhere=True),))
    text = OOM + " 79.00 GiB of which 1.00 GiB is free. Process 301234 has 60.00 GiB memory in use."
    (holder,) = classify(death("EngineCore_DP0", gpus=(gpu,), text=text)).numbers["holders"]
    assert (holder["owner"], holder["bytes"]) == ("own", 60 * GIB)


def test_nobody_holds_it_is_not_claimed_where_it_is_not_known() -> None:
    for known, sentence in ((True, "gpu_none_left"), (False, "gpu_unknown")):
        gpu = GpuMemory(0, "GPU-a", "x", 80 * GIB, GIB, holders_known=known)
        incident = death("EngineCore_DP0", gpus=(gpu,))
        assert sentence in dict(ruled_out(classify(incident), incident))
