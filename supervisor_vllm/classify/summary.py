"""The one sentence for a person."""

from __future__ import annotations

from collections.abc import Callable

from ..incident import Numbers
from ..kinds import KINDS
from ..units import gib


def _sentence(text: str) -> str:
    """With a capital letter, as a sentence begins; vLLM keeps its name."""
    return text if text.startswith("vLLM") else text[0].upper() + text[1:]


def summary_of(kind: str, numbers: Numbers, detail: str) -> str:
    """What happened, with the numbers in people's units. `detail` is what only the deciding step knew."""
    detail = detail.rstrip(". ")
    sentence = _SENTENCES[kind](numbers, detail) if kind in _SENTENCES else ""
    if sentence:
        return sentence
    means = KINDS[kind].means
    means = _sentence(means)
    return f"{means}: {detail}." if detail else f"{means}."


def _allocation(numbers: Numbers) -> str:
    parts = []
    if "tried_bytes" in numbers:
        parts.append(f"{gib(numbers['tried_bytes'])} were asked for")
    if "free_bytes" in numbers and "total_bytes" in numbers:
        parts.append(f"{gib(numbers['free_bytes'])} of {gib(numbers['total_bytes'])} were free")
    return ", ".join(parts)


def _device(kind: str, numbers: Numbers) -> str:
    means = KINDS[kind].means
    allocation = _allocation(numbers)
    return f"{_sentence(means)}{_where(numbers)}{': ' + allocation if allocation else ''}."


def _where(numbers: Numbers) -> str:
    """The device as the driver numbers it, where that is known: people look there. ` (device 1, rank 1)` otherwise."""
    index, device = numbers.get("gpu_index"), numbers.get("device")
    places = [numbers["gpu_uuid"]] if "gpu_uuid" in numbers else []
    if device is not None and device != index:
        places.append(f"device {device}" + (" of those it sees" if index is not None else ""))
    if "rank" in numbers:
        places.append(f"rank {numbers['rank']}")
    said = f" ({', '.join(places)})" if places else ""
    return said if index is None else f" on GPU {index}{said}"


def _kv_small(numbers: Numbers, detail: str) -> str:
    if not {"max_model_len", "kv_needed_bytes", "kv_available_bytes"} <= numbers.keys():
        if {"max_model_len", "estimated_max_model_len"} <= numbers.keys():
            return (
                f"The KV cache holds {numbers['estimated_max_model_len']} tokens, fewer than one request of "
                f"{numbers['max_model_len']} tokens needs."
            )
        return ""
    estimate = numbers.get("estimated_max_model_len")
    return (
        f"One request of {numbers['max_model_len']} tokens needs {gib(numbers['kv_needed_bytes'])} of KV cache, "
        f"{gib(numbers['kv_available_bytes'])} are there"
        + (f"; about {estimate} tokens would fit." if estimate else ".")
    )


def _kv_none(numbers: Numbers, detail: str) -> str:
    available = numbers.get("kv_available_bytes")
    if available is None or available > 0:
        return ""
    return f"Weights and activations leave nothing for the KV cache: {gib(available)} of its budget are left."


def _neighbour(numbers: Numbers, detail: str) -> str:
    if "free_bytes" not in numbers or "requested_bytes" not in numbers:
        return _device("gpu_neighbour", numbers) + _holders(numbers)
    return (
        f"{gib(numbers['free_bytes'])} of {gib(numbers['total_bytes'])} were free at the start{_where(numbers)}, "
        f"{gib(numbers['requested_bytes'])} were wanted (utilisation {numbers['utilization']:g})." + _holders(numbers)
    )


def _holders(numbers: Numbers) -> str:
    others = [holder for holder in numbers.get("holders", ()) if holder["owner"] != "own"]
    if not others:
        return ""
    named = ", ".join(
        f"{'own leftover ' if holder['owner'] == 'orphan' else ''}pid {holder['pid']}"
        + (f" ({holder['name']})" if holder["name"] else "")
        + (" (not visible from here)" if holder.get("elsewhere") else "")
        + (f" with {gib(holder['bytes'])}" if isinstance(holder["bytes"], int) else "")
        for holder in others[:4]
    )
    return f" Holding memory: {named}."


def _unstable(numbers: Numbers, detail: str) -> str:
    if "initial_free_bytes" not in numbers:
        return ""
    return (
        f"Free device memory moved while vLLM was profiling: {gib(numbers['initial_free_bytes'])} before, "
        f"{gib(numbers['current_free_bytes'])} after."
    )


def _host_kill(numbers: Numbers, detail: str) -> str:
    limit = f" at the limit of {gib(numbers['limit_bytes'])}" if "limit_bytes" in numbers else ""
    process = detail if detail and len(detail) < 60 else "a process of the server"
    return f"Host memory ran out{limit}: {process} was killed for it."


def _host_alloc(numbers: Numbers, detail: str) -> str:
    if "swap_space_bytes" in numbers:
        return f"--swap-space asks for {gib(numbers['swap_space_bytes'])} of host memory, more than there is to give."
    if "tried_bytes" in numbers:
        return f"Host memory ran out: an allocation of {gib(numbers['tried_bytes'])} failed."
    return ""


def _shm(numbers: Numbers, detail: str) -> str:
    if "shm_required_bytes" not in numbers:
        return ""
    return (
        f"/dev/shm is full: {gib(numbers['shm_required_bytes'])} are needed, {gib(numbers['shm_free_bytes'])} are free."
    )


def _warmup(numbers: Numbers, detail: str) -> str:
    if "mamba_blocks" in numbers:
        return f"There are cache blocks for {numbers['mamba_blocks']} sequences, fewer than --max-num-seqs."
    if "dummy_requests" in numbers:
        return f"The warm-up with {numbers['dummy_requests']} sequences ran out of device memory."
    return _device("gpu_warmup", numbers)


def _killed(numbers: Numbers, detail: str) -> str:
    return f"Killed ({detail}), with no proof that memory was the reason." if detail else ""


def _unknown(numbers: Numbers, detail: str) -> str:
    return f"{_sentence(detail)}." if detail else ""


_SENTENCES: dict[str, Callable[[Numbers, str], str]] = {
    "gpu_weights": lambda numbers, detail: _device("gpu_weights", numbers),
    "gpu_profile": lambda numbers, detail: _device("gpu_profile", numbers),
    "gpu_kv_alloc": lambda numbers, detail: _device("gpu_kv_alloc", numbers),
    "gpu_graph": lambda numbers, detail: _device("gpu_graph", numbers),
    "gpu_runtime": lambda numbers, detail: _device("gpu_runtime", numbers),
    "gpu_oom": lambda numbers, detail: _device("gpu_oom", numbers),
    "gpu_warmup": _warmup,
    "gpu_kv_small": _kv_small,
    "gpu_kv_none": _kv_none,
    "gpu_neighbour": _neighbour,
    "gpu_unstable": _unstable,
    "host_oom_kill": _host_kill,
    "host_alloc": _host_alloc,
    "shm_full": _shm,
    "killed": _killed,
    "unknown": _unknown,
    "stopped": lambda numbers, detail: "",
}
