"""In which phase of its life a vLLM was: from the lines that prove a phase, and from a traceback's frames.

The order of a start, vLLM 0.6 to 0.33: weights → profile → kv_cache → graph → warmup → runtime. Several processes
write into one log, so the phase is the furthest that was proven, not the last line.
"""

from __future__ import annotations

import re

from ..lazy import lazy

PHASES = ("startup", "weights", "profile", "kv_cache", "graph", "warmup", "runtime")

#: What running out of device memory in a phase is called.
KIND_BY_PHASE = {
    "weights": "gpu_weights",
    "profile": "gpu_profile",
    "kv_cache": "gpu_kv_alloc",
    "graph": "gpu_graph",
    "warmup": "gpu_warmup",
    "runtime": "gpu_runtime",
}

# A line that proves that the phase has begun. gpu_model_runner.py, gpu_worker.py, kv_cache_utils.py, core.py of V1;
# model_runner.py, worker.py, executor_base.py of V0.
# After the capture the sampler warms up, and has vLLM's own sentence where it runs out (0.8.0 on).
_PROOFS: tuple[tuple[str, re.Pattern[str]], ...] = (
    (
        "startup",
        lazy(
            r"(?:vLLM API server version|non-default args: |Initializing an? (?:V[01] )?LLM engine"
            r"|Resolved architecture:)"
        ),
    ),
    (
        "weights",
        lazy(
            r"(?:Starting to load model|Loading model from scratch|Loading [\w ]{1,40} checkpoint shards:"
            r"|Loading weights (?:took|with)|Time spent downloading weights|Using model weights format)"
        ),
    ),
    (
        "profile",
        lazy(
            r"(?:Model loading took|Loading model weights took|Encoder cache will be initialized"
            r"|Dynamo bytecode transform time|torch\.compile takes|Start loading torch\.compile"
            r"|Profiling CUDA graph memory|Starting profile run for |The sequence length used for profiling \()"
        ),
    ),
    (
        "kv_cache",
        lazy(
            r"(?:Available KV cache memory:|Memory profiling (?:takes|results)"
            r"|the current vLLM instance can use total_gpu_memory|# (?:GPU|[a-z]{3,8}) blocks:)"
        ),
    ),
    ("graph", lazy(r"(?:[A-Z]{2,6} KV cache size:|Capturing .{0,32}(?:graph|capture)|Graph capturing finished)")),
    (
        "runtime",
        lazy(
            r"(?:Application startup complete|init engine \(profile, create kv cache, warmup model\) took"
            r"|(?:Engine \d{1,4}: )?Avg prompt throughput:|Uvicorn running on)"
        ),
    ),
)
_PROOF_WORDS = lazy(
    r"load|Load|engine|args|Resolved|weights|Encoder|Dynamo|torch|Profiling|profiling|Available|current|# |KV|"
    r"apturing|Application|throughput|Uvicorn|Starting|vLLM"
)

# Functions that only run in one phase, most special first: a frame of the profile run lies above the model's forward.
_FRAMES: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("warmup", lazy(r"_dummy_sampler_run|_dummy_pooler_run|warmup_sampler|_warm_up_sampler")),
    (
        "graph",
        lazy(
            r"\b_?capture_model\b|\bcapture_end\b|register_graph_buffers|capture_cudagraphs|profile_cudagraph_memory"
            r"|\bcapture_graphs?\b|torch\.cuda\.graph\(|CUDAGraphRunner|graph_capture"
        ),
    ),
    (
        "profile",
        lazy(
            r"determine_available_memory|determine_num_available_blocks|\bprofile_run\b|profile_multimodal"
            r"|profile_encoder|_profile_mm"
        ),
    ),
    (
        "kv_cache",
        lazy(
            r"_allocate_kv_cache|allocate_kv_cache|\binitialize_kv_cache(?:_tensors)?\b|\binitialize_cache\b"
            r"|_init_cache_engine|cache_engine\.py|CacheEngine\("
        ),
    ),
    (
        "warmup",
        lazy(r"compile_or_warm_up_model|kernel_warmup|warming_up_model|\bwarm_up_model\b"),
    ),
    ("profile", lazy(r"\b_dummy_run\b")),
    (
        "weights",
        lazy(
            r"\bload_model\b|\bcreate_weights\b|process_weights_after_loading|\bload_weights\b|model_loader/"
            r"|\binitialize_model\b|maybe_offload_to_cpu|\bmake_layers\b|weight_loader\b|\bload_state_dict\b"
            r"|safetensors_weights_iterator"
        ),
    ),
    (
        "runtime",
        lazy(
            r"run_busy_loop|_process_engine_step|step_with_batch_queue|\bsample_tokens\b|_get_prompt_logprobs"
            r"|run_engine_loop|\bengine_step\b|run_output_handler|compute_logprobs|_run_engine\b|\bllm\.generate\b"
        ),
    ),
)
_MODEL_INIT = lazy(r"/models/\w{1,60}\.py$")
# Runs in the profile run, in warm-up and while serving: says something only where nothing else does.
_FORWARD = lazy(r"\bexecute_model\b|\b_?execute_mm_encoder\b|embed_multimodal|get_multimodal_embeddings|forward")
# The sampler's warm-up has vLLM's own sentence (0.8.0 on), so that a sampler without it samples for requests.
_EXECUTE = lazy(r"\bexecute_model\b|\b_?execute_mm_encoder\b|topk_topp_sampler|apply_top_k_top_p|logits\.sort\(")


def proven_phase(body: str) -> str | None:
    """The latest phase that this line proves to have begun."""
    if not _PROOF_WORDS.search(body[:200]):
        return None
    return next((name for name, pattern in reversed(_PROOFS) if pattern.match(body)), None)


def later(first: str | None, second: str | None) -> str | None:
    if first is None or second is None:
        return first or second
    return max(first, second, key=PHASES.index)


def phase_of_frames(frames: tuple[str, ...]) -> str | None:
    """From the lines of one traceback (frames and their source lines)."""
    for name, pattern in _FRAMES:
        if any(pattern.search(text) for text in frames):
            return name
    if any(_is_model_init(text) for text in frames):
        return "weights"
    return None


def runs_forward(frames: tuple[str, ...]) -> bool:
    """The model runs: in the profile run, in warm-up or while serving."""
    return any(_FORWARD.search(text) for text in frames)


def executes(frames: tuple[str, ...]) -> bool:
    """V1 calls it for requests only, V0 in the profile run too (whose own frames say so)."""
    return any(_EXECUTE.search(text) for text in frames)


def _is_model_init(text: str) -> bool:
    path, _, function = text.rpartition(" ")
    return function == "__init__" and bool(_MODEL_INIT.search(path))
