"""The devices that a program sees: CUDA_VISIBLE_DEVICES, and what AMD's runtimes make of theirs.

As torch reads them (2.13 torch/cuda/__init__.py, _parse_visible_devices and _transform_uuid_to_ordinals), which is what
decides what vLLM uses.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from ..incident import GpuMemory

_LEADING_INTEGER = re.compile(r"[+-]?\d+", re.ASCII)
#: MIG devices before R470: MIG-<uuid of the GPU>/<GPU instance>/<compute instance>. CUDA still takes it.
_OLD_MIG = re.compile(r"MIG-(GPU-[^/]*)(?:/(\d+))?(?:/(\d+))?", re.ASCII)

_Names = Callable[[GpuMemory, str], bool]


def visible_gpus(gpus: Sequence[GpuMemory], cuda_visible_devices: str | None) -> tuple[GpuMemory, ...]:
    """In the program's order. The first word says what all are: UUIDs (GPU-…, MIG-…, or beginnings of one) or indices.
    The first that is of another kind, or names no device or more than one, ends the list; a device named twice empties
    it. Indices are NVML's (CUDA_DEVICE_ORDER=PCI_BUS_ID; on hosts with one kind of GPU the default order is the same).
    """
    if cuda_visible_devices is None:
        return _enumerated(gpus)
    for prefix, names in (("GPU-", _has_uuid), ("MIG-", _has_mig_name)):
        if cuda_visible_devices.startswith(prefix):
            return _by_uuid(gpus, cuda_visible_devices, prefix, names)
    return _enumerated(_by_index(gpus, cuda_visible_devices))


def visible_amd_gpus(gpus: Sequence[GpuMemory], environment: Mapping[str, str]) -> tuple[GpuMemory, ...]:
    """ROCR_VISIBLE_DEVICES leaves some devices and counts them anew, out of which HIP_VISIBLE_DEVICES chooses; HIP
    takes CUDA_VISIBLE_DEVICES where that isn't set (or is empty: vLLM 0.32 platforms/rocm.py)."""
    left = tuple(gpus)
    if (rocr := environment.get("ROCR_VISIBLE_DEVICES")) is not None:
        left = _rocr(left, rocr)
    chosen = environment.get("HIP_VISIBLE_DEVICES") or environment.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return left
    if chosen.startswith("GPU-"):
        return _by_uuid(left, chosen, "GPU-", _has_uuid)
    return _by_place(left, chosen)


def _enumerated(gpus: Sequence[GpuMemory]) -> tuple[GpuMemory, ...]:
    """A CUDA process sees one MIG device at most, and beside it no whole GPU (NVIDIA's MIG user guide)."""
    mig = [gpu for gpu in gpus if _is_mig(gpu)]
    return tuple(mig[:1] or gpus)


def _by_uuid(gpus: Sequence[GpuMemory], text: str, prefix: str, names: _Names) -> tuple[GpuMemory, ...]:
    words: list[str] = []
    for word in text.split(","):
        if word in words:
            return ()
        if not word.startswith(prefix):
            break
        words.append(word)
    visible: list[GpuMemory] = []
    for word in words:
        matches = [gpu for gpu in gpus if names(gpu, word)]
        if len(matches) != 1:
            break
        if matches[0] in visible:
            return ()
        visible += matches
    return tuple(visible)


def _is_mig(gpu: GpuMemory) -> bool:
    return bool(gpu.parent_uuid) or gpu.uuid.startswith("MIG-")


def _has_uuid(gpu: GpuMemory, word: str) -> bool:
    return not _is_mig(gpu) and gpu.uuid.startswith(word)


def _has_mig_name(gpu: GpuMemory, word: str) -> bool:
    """By a beginning of its own UUID, or of its GPU's with the numbers of the instances."""
    if not _is_mig(gpu):
        return False
    if gpu.uuid.startswith(word):
        return True
    old = _OLD_MIG.fullmatch(word)
    if old is None or not gpu.parent_uuid.startswith(old[1]):
        return False
    numbers = (gpu.gpu_instance, gpu.compute_instance)
    return all(said is None or int(said) == number for said, number in zip(old.groups()[1:], numbers, strict=True))


def _indices(text: str) -> list[int]:
    """Like strtoul: `1gpu` is 1. A word that is no number, or a negative one, ends them; one said twice leaves none."""
    found: list[int] = []
    for word in text.split(","):
        number = _LEADING_INTEGER.match(word.strip())
        index = int(number[0]) if number else -1
        if index in found:
            return []
        if index < 0:
            break
        found.append(index)
    return found


def _by_index(gpus: Sequence[GpuMemory], text: str) -> tuple[GpuMemory, ...]:
    """By the driver's index, up to the first that no device has. A GPU in MIG mode: its first MIG device."""
    visible: list[GpuMemory] = []
    for index in _indices(text):
        gpu = next((gpu for gpu in gpus if gpu.index == index), None)
        if gpu is None:
            break
        visible.append(gpu)
    return tuple(visible)


def _by_place(gpus: Sequence[GpuMemory], text: str) -> tuple[GpuMemory, ...]:
    """By the place among these: HIP counts what ROCR_VISIBLE_DEVICES has left."""
    visible: list[GpuMemory] = []
    for place in _indices(text):
        if place >= len(gpus):
            break
        visible.append(gpus[place])
    return tuple(visible)


def _rocr(gpus: Sequence[GpuMemory], text: str) -> tuple[GpuMemory, ...]:
    """Here indices and UUIDs may mix; what names no device, or one that was named, ends the list."""
    visible: list[GpuMemory] = []
    for word in (part.strip() for part in text.split(",")):
        if word.startswith("GPU-"):
            matches = [gpu for gpu in gpus if gpu.uuid.lower() == word.lower()]
        else:
            matches = [gpu for place, gpu in enumerate(gpus) if word == str(place)]
        if len(matches) != 1 or matches[0] in visible:
            break
        visible += matches
    return tuple(visible)
