"""A verdict for people and programs: the contract's object, and what is ruled out and why."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from . import chinese
from .evidence.kernel_log import parse_kills
from .incident import Incident, Plan, Verdict, to_json
from .kinds import KINDS
from .units import gib

_HOST_KINDS = ("host_oom_kill", "host_alloc")
_SURE = ("proven", "likely")


def verdict_json(verdict: Verdict, plan: Plan | None) -> dict[str, Any]:
    """The object of `explain --json`; with `plan` None that key is left out."""
    data = {
        "kind": verdict.kind,
        "oom": KINDS[verdict.kind].oom,
        "confidence": verdict.confidence,
        "phase": verdict.phase,
        "summary": verdict.summary,
        "evidence": to_json(verdict.evidence),
        "numbers": to_json(verdict.numbers),
    }
    if plan is not None:
        data["plan"] = to_json(plan)
    return data


def explain_json(verdict: Verdict, plan: Plan, incident: Incident, language: str) -> dict[str, Any]:
    """The contract's object with `ruled_out`: sentences. `language`: en or zh."""
    data = verdict_json(verdict, plan)
    data["ruled_out"] = [_say(name, values, language) for name, values in ruled_out(verdict, incident)]
    if language == "zh":
        data["summary"] = chinese.summary(verdict)
        data["plan"]["reason"] = chinese.reason(plan, verdict)
        for change, shown in zip(plan.changes, data["plan"]["changes"], strict=True):
            shown["why"] = chinese.why(change, verdict)
    return data


_SENTENCES = {
    "host_no_kill": "not host memory: the kernel's log has no kill of its processes",
    "host_free": "not host memory: {available} of {total} were available",
    "host_stranger": "not host memory: the kernel killed {name} (pid {pid}), which is not one of its processes",
    "host_unknown": "host memory is not ruled out: no kernel log was given",
    "gpu_no_word": "not device memory: no allocation failed in the log",
    "gpu_none_left": "not a neighbour: no other process is known to hold device memory",
    "gpu_unknown": "a neighbour is not ruled out: who holds the device's memory can't be seen from here",
    "gpu_kv_built": "not the KV cache at the start: it was built, for {tokens} tokens",
    "gpu_weights_fit": "not the weights: they were loaded, {size}",
    "shm_free": "not /dev/shm: {free} of {total} were free",
    "no_log": "there was no log to read: only the end itself and the kernel speak",
}


def _say(name: str, values: dict[str, str], language: str) -> str:
    sentences = chinese.RULED_OUT if language == "zh" else _SENTENCES
    return sentences[name].format(**values)


def ruled_out(verdict: Verdict, incident: Incident) -> Iterator[tuple[str, dict[str, str]]]:
    """(sentence, its values) of each memory that it wasn't, where something speaks for that."""
    if not incident.log:
        yield "no_log", {}
    if verdict.kind not in (*_HOST_KINDS, "stopped", "exited"):
        yield from _host(verdict, incident)
    if verdict.kind != "shm_full" and incident.host_after and incident.host_after.shm_free_bytes:
        total = incident.host_after.shm_total_bytes or 0
        yield "shm_free", {"free": gib(incident.host_after.shm_free_bytes), "total": gib(total)}
    if verdict.kind.startswith("gpu_"):
        yield from _device(verdict, incident)
    elif incident.log and verdict.confidence in _SURE and verdict.kind not in ("stopped", "exited"):
        yield "gpu_no_word", {}


def _host(verdict: Verdict, incident: Incident) -> Iterator[tuple[str, dict[str, str]]]:
    kills = parse_kills(incident.kernel_log)
    stranger = next((kill for kill in kills if kill.pid is not None), None)
    if stranger:
        yield "host_stranger", {"name": stranger.name, "pid": str(stranger.pid)}
    elif incident.kernel_log:
        yield "host_no_kill", {}
    elif verdict.kind in ("killed", "unknown"):
        yield "host_unknown", {}
    if incident.host_after and incident.host_after.total_bytes:
        after = incident.host_after
        yield "host_free", {"available": gib(after.available_bytes), "total": gib(after.total_bytes)}


def _device(verdict: Verdict, incident: Incident) -> Iterator[tuple[str, dict[str, str]]]:
    numbers = verdict.numbers
    if verdict.kind not in ("gpu_neighbour", "gpu_unstable") and not any(
        holder["owner"] != "own" for holder in numbers.get("holders", ())
    ):
        known = all(gpu.holders_known for gpu in incident.gpus)
        yield "gpu_none_left" if known else "gpu_unknown", {}
    if verdict.kind != "gpu_weights" and "weights_bytes" in numbers:
        yield "gpu_weights_fit", {"size": gib(numbers["weights_bytes"])}
    if verdict.kind in ("gpu_runtime", "gpu_graph", "gpu_warmup") and "kv_tokens" in numbers:
        yield "gpu_kv_built", {"tokens": f"{numbers['kv_tokens']:,}"}
