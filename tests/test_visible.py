"""The devices that a program sees, as torch 2.13 and AMD's runtimes read their variables."""

from __future__ import annotations

import dataclasses

import pytest

from supervisor_vllm.evidence.visible import visible_amd_gpus, visible_gpus
from supervisor_vllm.incident import GpuMemory

GPUS = tuple(GpuMemory(index, f"GPU-{index}abc", "x", 1, 1) for index in range(3))
#: GPU 0 in MIG mode with three MIG devices, of which two share a GPU instance; GPU 1 as a whole.
MIG = (
    *(
        GpuMemory(0, f"MIG-{place}f00", "m", 1, 1, parent_uuid="GPU-5a4e01", gpu_instance=gi, compute_instance=ci)
        for place, (gi, ci) in enumerate(((1, 0), (2, 0), (2, 1)))
    ),
    GpuMemory(1, "GPU-5a4e02", "x", 1, 1),
)


@pytest.mark.parametrize(
    ("words", "indices"),
    [
        ("", []),
        ("-1", []),
        ("0,-1,1", [0]),
        (" 2 , 1 ", [2, 1]),
        ("0,7,1", [0]),
        ("0,0", []),
        ("0,9,0", []),
        ("0,9,9", []),
        ("1gpu2,2ampere", [1, 2]),
        ("+1", [1]),
        ("x,0", []),
        (",0", []),
        # a list is of indices or of UUIDs, and the first word says which
        ("GPU-1a,0", [1]),
        ("0,GPU-1a,2", [0]),
        ("2,GPU-0,9,1", [2]),
        ("GPU-1a,GPU-0,GPU-2a", [1, 0, 2]),
        ("GPU-1a, GPU-0", [1]),
        ("GPU-", []),
        ("GPU-1a,GPU-1a", []),
        ("GPU-1a,GPU-1ab", []),
        ("GPU-1a,GPU-9", [1]),
        ("GPU-1a,MIG-1", [1]),
    ],
)
def test_words_of_cuda_visible_devices(words: str, indices: list[int]) -> None:
    assert [gpu.index for gpu in visible_gpus(GPUS, words)] == indices


def test_without_the_variable_all_are_seen() -> None:
    assert visible_gpus(GPUS, None) == GPUS


@pytest.mark.parametrize(
    ("words", "places"),
    [
        ("MIG-1f", [1]),
        ("MIG-2f00,MIG-0f00", [2, 0]),
        ("MIG-1f,1", [1]),
        ("MIG-", []),
        ("MIG-GPU-5a4e01/1/0", [0]),
        ("MIG-GPU-5a4e01/2/1,MIG-GPU-5a4e01/1/0", [2, 0]),
        ("MIG-GPU-5a/2/0", [1]),
        ("MIG-GPU-5a4e01/2", []),  # two compute instances
        ("MIG-GPU-5a4e01/1", [0]),
        ("MIG-GPU-5a4e01", []),
        ("MIG-GPU-5a4e02/1/0", []),  # not in MIG mode
        ("MIG-GPU-5a4e01/1/0/3", []),
        ("MIG-GPU-5a4e01/x/0", []),
        ("GPU-5a4e01", []),  # a GPU in MIG mode is no device itself
        ("GPU-5a4e", [3]),
        ("0", [0]),
        ("1", [3]),
        ("0,1", [0]),  # beside a MIG device CUDA shows no whole GPU
        ("1,0", [0]),
    ],
)
def test_mig_devices_by_both_names(words: str, places: list[int]) -> None:
    assert [MIG.index(gpu) for gpu in visible_gpus(MIG, words)] == places


def test_a_cuda_process_sees_one_mig_device_by_itself() -> None:
    assert visible_gpus(MIG, None) == MIG[:1]


def test_a_mig_device_of_a_driver_before_r470() -> None:
    old = tuple(
        dataclasses.replace(gpu, uuid=f"MIG-{gpu.parent_uuid}/{gpu.gpu_instance}/{gpu.compute_instance}")
        for gpu in MIG[:3]
    )
    assert visible_gpus(old, "MIG-GPU-5a4e01/2/1") == old[2:]


@pytest.mark.parametrize(
    ("environment", "indices"),
    [
        ({}, [0, 1, 2]),
        ({"CUDA_VISIBLE_DEVICES": "2,0"}, [2, 0]),
        ({"HIP_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "2"}, [1]),
        ({"HIP_VISIBLE_DEVICES": "", "CUDA_VISIBLE_DEVICES": "2"}, [2]),
        ({"CUDA_VISIBLE_DEVICES": ""}, []),
        ({"ROCR_VISIBLE_DEVICES": "2,1"}, [2, 1]),
        ({"ROCR_VISIBLE_DEVICES": "2,GPU-1ABC"}, [2, 1]),
        ({"ROCR_VISIBLE_DEVICES": "2,x,1"}, [2]),
        ({"ROCR_VISIBLE_DEVICES": ""}, []),
        ({"ROCR_VISIBLE_DEVICES": "2,1", "HIP_VISIBLE_DEVICES": "1"}, [1]),
        ({"ROCR_VISIBLE_DEVICES": "2,1", "HIP_VISIBLE_DEVICES": "2"}, []),
        ({"ROCR_VISIBLE_DEVICES": "2,1", "HIP_VISIBLE_DEVICES": "GPU-1a"}, [1]),
    ],
)
def test_amds_variables(environment: dict[str, str], indices: list[int]) -> None:
    assert [gpu.index for gpu in visible_amd_gpus(GPUS, environment)] == indices
