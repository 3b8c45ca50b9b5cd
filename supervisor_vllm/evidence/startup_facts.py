"""What vLLM says of a start that goes well: the model, the shards, and the memory that it measured.

Patterns for vLLM 0.6 to 0.33; where a wording changed the versions stand beside it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..incident import LogLine, Numbers
from ..lazy import lazy
from .log_records import Record, parse_records

GIB = 2**30

# v1/engine/core.py (V1: "a V1 LLM engine"), engine/llm_engine.py (V0: "an LLM engine")
_ENGINE = lazy(r"Initializing an? (?:V[01] )?LLM engine \(v([^)\s]+)\) with config: ")
_CONFIG_MODEL = lazy(r"\bmodel='([^']{1,4096})'")
_CONFIG_MAX_LEN = lazy(r"\bmax_seq_len=(\d{1,12})\b")
_API_VERSION = lazy(r"vLLM API server version (\d\S{0,60})")
_BANNER_VERSION = lazy(r"[█▀▄ ]{6,80}version (\d\S{0,60})")
_LOADING_MODEL = lazy(r"Starting to load model (\S{1,4096}?)\.{3}")
# tqdm of model_loader/weight_utils.py
_SHARDS = lazy(r"Loading [\w ]{1,40} checkpoint shards: {1,3}\d{1,3}% Completed \| (\d{1,6})/(\d{1,6}) ")
_LOADING_TOOK = lazy(r"Loading weights took (\d{1,9}(?:\.\d{1,9})?) seconds")  # default_loader.py, 0.8.0 on
# gpu_model_runner.py; "Loading model weights took X GB" until 0.7.3 (GB means GiB there)
_WEIGHTS = lazy(
    r"(?:Model loading|Loading model weights) took (\d{1,9}(?:\.\d{1,9})?) Gi?B"
    r"(?:(?: memory)? and (\d{1,9}(?:\.\d{1,9})?) seconds)?"
)
_KV_TOKENS = lazy(r"(?:GPU|CPU|XPU|[A-Z]{2,6}) KV cache size: (\d[\d,]{0,20}) tokens")  # 0.8.0 on
_KV_AVAILABLE = lazy(r"Available KV cache memory: (-?\d{1,9}(?:\.\d{1,9})?) Gi?B")  # 0.9.2 on; may be negative
# worker/worker.py of V0, 0.6.4 to 0.10.2
_V0_BUDGET = lazy(
    r"total_gpu_memory \((\d{1,9}\.\d{1,9})Gi?B\) x gpu_memory_utilization \((\d\.\d{1,9})\) = (\d{1,9}\.\d{1,9})Gi?B"
)
_V0_PROFILE = lazy(
    r"model weights take (-?\d{1,9}\.\d{1,9})Gi?B; non_torch_memory takes (-?\d{1,9}\.\d{1,9})Gi?B; "
    r"PyTorch activation peak memory takes (-?\d{1,9}\.\d{1,9})Gi?B; "
    r"the rest of the memory reserved for KV Cache is (-?\d{1,9}\.\d{1,9})Gi?B"
)
# gpu_worker.py after the capture, 0.10.2 on ("for weight" and "for non-torch memory" became one sum later)
_ACTUAL_USAGE = lazy(r"Free memory on device .{1,200}Actual usage is ")
_ACTUAL_PARTS = (
    ("weights_bytes", lazy(r"(\d{1,9}(?:\.\d{1,9})?) GiB for weight,")),
    ("activation_bytes", lazy(r"(\d{1,9}(?:\.\d{1,9})?) GiB for peak activation")),
    ("non_torch_bytes", lazy(r"(\d{1,9}(?:\.\d{1,9})?) GiB for non-torch memory")),
    ("graph_bytes", lazy(r"(\d{1,9}(?:\.\d{1,9})?) GiB for CUDAGraph memory")),
)
# cpu_worker.py, 0.20 on
_CPU_BUDGET = lazy(
    r"Auto set \((\d{1,9}(?:\.\d{1,9})?)/(\d{1,9}(?:\.\d{1,9})?)\) GiB for KV cache on node \d+, with "
    r"(\d{1,9}(?:\.\d{1,9})?) GiB requested memory"
)
_GRAPH = lazy(r"Graph capturing finished in \d{1,9}(?:\.\d{1,9})? secs?, took (-?\d{1,9}(?:\.\d{1,9})?) Gi?B")
_GRAPH_ESTIMATE = lazy(r"Estimated CUDA graph memory: (-?\d{1,9}(?:\.\d{1,9})?) Gi?B")
_AUTO_FIT = lazy(r"Auto-fit max_model_len: reduced from \d{1,12} to (\d{1,12})")  # 0.14.1 on
_FULL_FIT = lazy(r"Auto-fit max_model_len: full model context length (\d{1,12}) fits")
_SERVED = lazy(
    r"(?:Starting vLLM (?:API )?server(?: \d+)? on|Uvicorn running on) ((?:http://|https://|unix:)\S{1,300})"
)
_STARTED = lazy(r"Application startup complete\.")


@dataclass(frozen=True)
class StartupFacts:
    """The proof of the weights, and what is served. None: the log doesn't say (another version, a short log).

    `weights_bytes` is of the rank that took most. `loading_seconds`: reading the shards, of the slowest rank.
    `max_model_len` is the engine's (`max_seq_len=`), `autofit_max_model_len` what vLLM made of it.
    """

    application_startup_complete: bool = False
    model_path: str | None = None
    shards_loaded: int | None = None
    shards_total: int | None = None
    weights_bytes: int | None = None
    loading_seconds: float | None = None
    kv_tokens: int | None = None
    max_model_len: int | None = None
    autofit_max_model_len: int | None = None
    served_url: str | None = None
    vllm_version: str | None = None


def gib_to_bytes(gib: str) -> int:
    return round(float(gib) * GIB)


def startup_facts(lines: Iterable[LogLine]) -> StartupFacts:
    return startup_facts_of(parse_records(lines))


def startup_facts_of(records: Iterable[Record]) -> StartupFacts:
    seen: dict[str, object] = {}
    weights: list[int] = []
    seconds: list[float] = []
    for record in records:
        if record.level not in (None, "INFO", "WARNING"):
            continue
        _note_fact(record.body, seen, weights, seconds)
    return StartupFacts(
        weights_bytes=max(weights, default=None),
        loading_seconds=max(seconds, default=None),
        **seen,  # type: ignore[arg-type]
    )


def _note_fact(body: str, seen: dict[str, object], weights: list[int], seconds: list[float]) -> None:
    if "engine (v" in body and (match := _ENGINE.match(body)):
        seen["vllm_version"] = match[1]
        if model := _CONFIG_MODEL.search(body):
            seen["model_path"] = model[1]
        if length := _CONFIG_MAX_LEN.search(body):
            seen["max_model_len"] = int(length[1])
    elif "version" in body and (match := _API_VERSION.match(body) or _BANNER_VERSION.match(body)):
        seen.setdefault("vllm_version", match[1])
    elif "load model" in body and (match := _LOADING_MODEL.match(body)):
        seen.setdefault("model_path", match[1])
    elif "checkpoint shards" in body and (match := _SHARDS.match(body)):
        seen["shards_loaded"], seen["shards_total"] = int(match[1]), int(match[2])
    elif "took" in body and (match := _LOADING_TOOK.match(body)):
        seconds.append(float(match[1]))
    elif "took" in body and (match := _WEIGHTS.match(body)):
        weights.append(gib_to_bytes(match[1]))
    elif "KV cache size" in body and (match := _KV_TOKENS.match(body)):
        seen["kv_tokens"] = int(match[1].replace(",", ""))
    elif body.startswith("Auto-fit") and (match := _AUTO_FIT.match(body) or _FULL_FIT.match(body)):
        seen["autofit_max_model_len"] = int(match[1])
    elif " on " in body and (match := _SERVED.match(body)):
        seen["served_url"] = match[1]
    elif _STARTED.match(body):
        seen["application_startup_complete"] = True


def vllm_version(lines: Iterable[LogLine]) -> str | None:
    return startup_facts(lines).vllm_version


def measurements(records: Iterable[Record]) -> Numbers:
    """What vLLM measured in this life, in the names of `incident.Numbers`. Of several ranks: the tightest."""
    found: Numbers = {}
    for record in records:
        if record.level in (None, "INFO"):
            _note_measurement(record.body, found)
    return found


def _note_measurement(body: str, found: Numbers) -> None:
    if "took" in body and (match := _WEIGHTS.match(body)):
        _keep(found, "weights_bytes", match[1], max)
    elif "raph" in body and (match := _GRAPH.match(body) or _GRAPH_ESTIMATE.match(body)):
        _keep(found, "graph_bytes", match[1], max)
    elif "KV cache memory" in body and (match := _KV_AVAILABLE.match(body)):
        _keep(found, "kv_available_bytes", match[1], min)
    elif "KV cache size" in body and (match := _KV_TOKENS.match(body)):
        found["kv_tokens"] = int(match[1].replace(",", ""))
    elif "total_gpu_memory" in body and (match := _V0_BUDGET.search(body)):
        found["total_bytes"] = gib_to_bytes(match[1])
        found["utilization"] = float(match[2])
        found["requested_bytes"] = gib_to_bytes(match[3])
    elif body.startswith("Auto set") and (match := _CPU_BUDGET.match(body)):
        found["kv_available_bytes"] = gib_to_bytes(match[1])
        found["total_bytes"] = gib_to_bytes(match[2])
        found["requested_bytes"] = gib_to_bytes(match[3])
    elif "Actual usage" in body and _ACTUAL_USAGE.match(body):
        for name, part in _ACTUAL_PARTS:
            if match := part.search(body):
                _keep(found, name, match[1], max)
    if "model weights take" in body and (match := _V0_PROFILE.search(body)):
        _keep(found, "weights_bytes", match[1], max)
        _keep(found, "non_torch_bytes", match[2], max)
        _keep(found, "activation_bytes", match[3], max)
        _keep(found, "kv_available_bytes", match[4], min)


def _keep(found: Numbers, name: str, gib: str, choose: object) -> None:
    value = gib_to_bytes(gib)
    found[name] = choose(found[name], value) if name in found else value  # type: ignore[operator]
