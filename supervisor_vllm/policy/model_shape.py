"""What a model takes of a device, from its Hugging Face config.json: weights, and KV cache a token.

Names are config.json's own (transformers) and vLLM's (config/model.py, v1/kv_cache_interface.py, 0.32). Pure.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Config = Mapping[str, Any]

#: vLLM's block of KV cache on CUDA (config/cache.py).
BLOCK_TOKENS = 16

_DTYPE_BYTES = {"float32": 4.0, "float": 4.0, "float16": 2.0, "half": 2.0, "bfloat16": 2.0}
#: Feed-forward layers of two matrices; of all others three (gated).
_UNGATED = frozenset({"opt", "gpt2", "gpt_neox", "gptj", "gpt_bigcode", "bloom", "falcon", "mpt", "phi", "starcoder2"})
#: The kinds of layers (config.json `layer_types`) that keep a state of fixed size in place of KV a token.
_STATE_LAYERS = frozenset({"linear_attention", "mamba", "mamba2", "recurrent", "conv", "gdn"})


@dataclass(frozen=True)
class ModelShape:
    """`full_layers` keep KV of all tokens, `window_layers` of the last `window` ones, all others none. `kv_heads` 0:
    one latent of `head_size` values a token (MLA), the same on each rank. `weights_bytes`: of the whole model;
    `weights_are_exact`: measured from its files. `kv_is_exact`: no layer whose cache isn't known from here."""

    full_layers: int
    window_layers: int
    window: int
    kv_heads: int
    head_size: int
    hidden_size: int
    intermediate_size: int
    vocabulary: int
    max_position: int
    parameters: int
    weights_bytes: int
    value_bytes: float
    weights_are_exact: bool = False
    kv_is_exact: bool = True

    @property
    def rotary_bytes(self) -> int:
        """The table of the rotary embedding, made when the model is loaded (layers/rotary_embedding)."""
        return int(self.max_position * min(self.head_size, 128) * self.value_bytes)

    def with_weights(self, size_bytes: int) -> ModelShape:
        return dataclasses.replace(self, weights_bytes=size_bytes, weights_are_exact=True)


def model_shape(config: Config) -> ModelShape | None:
    """None: not a decoder that is described here."""
    text = _text_config(config)
    hidden, layers = (
        _number(text, "hidden_size", "n_embd", "d_model"),
        _number(text, "num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    )
    heads = _number(text, "num_attention_heads", "n_head", "n_heads")
    if not hidden or not layers or not heads:
        return None
    full, windowed, window, known = _attention_layers(text, layers)
    latent = _number(text, "kv_lora_rank")
    head_size = _number(text, "head_dim") or hidden // heads
    kv_heads = _kv_heads(text, heads)
    if latent:
        kv_heads, head_size = 0, latent + (_number(text, "qk_rope_head_dim") or 0)
    vocabulary = _number(text, "vocab_size") or 0
    parameters, embedded = _parameters(text, hidden, layers, heads, vocabulary)
    value_bytes = _DTYPE_BYTES.get(str(text.get("torch_dtype") or text.get("dtype") or config.get("torch_dtype")), 2.0)
    if value_bytes == 4.0 and "dtype" not in text:  # vLLM loads float32 checkpoints as 16 bit (config/model.py)
        value_bytes = 2.0
    weights = int((parameters - embedded) * _weight_bytes(config, text, value_bytes) + embedded * value_bytes)
    return ModelShape(
        full_layers=full,
        window_layers=windowed,
        window=window,
        kv_heads=kv_heads,
        head_size=head_size,
        hidden_size=hidden,
        intermediate_size=_number(text, "intermediate_size", "n_inner", "ffn_dim") or 4 * hidden,
        vocabulary=vocabulary,
        max_position=_max_position(text),
        parameters=parameters,
        weights_bytes=weights,
        value_bytes=value_bytes,
        kv_is_exact=known,
    )


def kv_bytes(shape: ModelShape, tokens: int, launch_tokens: int, *, ranks: int = 1, value_bytes: float = 0.0) -> int:
    """KV cache that one request of so many tokens takes on one tensor-parallel rank, in whole blocks.

    Sliding windows hold no more than the window and one batch of `launch_tokens` (v1/kv_cache_interface.py,
    SlidingWindowSpec.max_memory_usage_bytes).
    """
    value = value_bytes or shape.value_bytes
    heads = max(1, shape.kv_heads // ranks)
    per_token = shape.head_size * value if not shape.kv_heads else 2 * heads * shape.head_size * value
    full = _blocks(tokens)
    windowed = min(full, _blocks(shape.window - 1 + launch_tokens) + BLOCK_TOKENS) if shape.window_layers else 0
    return int(per_token * (shape.full_layers * full + shape.window_layers * windowed))


def longest_request(
    shape: ModelShape, size_bytes: int, launch_tokens: int, *, ranks: int = 1, value_bytes: float = 0.0
) -> int:
    """The longest request whose KV cache fits, in tokens, up to what the model can."""
    low, high = 0, max(shape.max_position, 2**17)
    while low < high:
        middle = (low + high + 1) // 2
        fits = kv_bytes(shape, middle, launch_tokens, ranks=ranks, value_bytes=value_bytes) <= size_bytes
        low, high = (middle, high) if fits else (low, middle - 1)
    return low


def _blocks(tokens: int) -> int:
    return math.ceil(max(0, tokens) / BLOCK_TOKENS) * BLOCK_TOKENS


def _text_config(config: Config) -> Config:
    """Of a multimodal model, the language model in it."""
    for name in ("text_config", "llm_config", "language_config", "thinker_config"):
        inner = config.get(name)
        if isinstance(inner, Mapping):
            return _text_config({"torch_dtype": config.get("torch_dtype"), **inner})
    return config


def _number(config: Config, *names: str) -> int | None:
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def _kv_heads(text: Config, heads: int) -> int:
    """Falcon's `multi_query` and GPT-BigCode's mean one head."""
    if text.get("multi_query") and not text.get("new_decoder_architecture"):
        return 1
    return _number(text, "num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num") or heads


def _max_position(text: Config) -> int:
    """As vLLM derives it (config/model.py, _get_and_verify_max_len): YaRN's original length times its factor."""
    length = _number(text, "max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length")
    scaling = text.get("rope_scaling")
    if not isinstance(scaling, Mapping):
        return length or 0
    factor, original = scaling.get("factor"), _number(scaling, "original_max_position_embeddings")
    if scaling.get("rope_type", scaling.get("type")) == "yarn" and original and isinstance(factor, (int, float)):
        return int(original * factor)
    return length or 0


def _attention_layers(text: Config, layers: int) -> tuple[int, int, int, bool]:
    """(with KV of all tokens, with a window, the window in tokens, is it known for sure)."""
    window = _number(text, "sliding_window") or 0
    types = text.get("layer_types")
    if isinstance(types, list) and types:
        windowed = sum("sliding" in str(kind) for kind in types)
        stateful = sum(str(kind) in _STATE_LAYERS for kind in types)
        return len(types) - windowed - stateful, windowed if window else 0, window, not stateful
    for period in ("full_attention_interval", "attn_layer_period"):
        if every := _number(text, period):
            return max(1, layers // every), 0, 0, False
    pattern = text.get("hybrid_override_pattern")
    if isinstance(pattern, str) and pattern:
        return max(1, pattern.count("*")), 0, 0, False
    if window and text.get("use_sliding_window") is not False and text.get("model_type") != "qwen2":
        every = _number(text, "sliding_window_pattern") or (2 if text.get("model_type") == "gemma2" else 1)
        full = layers // every if every > 1 else 0
        return full, layers - full, window, True
    stateful_model = str(text.get("model_type", "")).startswith(("mamba", "falcon_mamba", "rwkv"))
    return (0 if stateful_model else layers), 0, 0, not stateful_model


def _parameters(text: Config, hidden: int, layers: int, heads: int, vocabulary: int) -> tuple[int, int]:
    """(all, of them in the embeddings and the head, which aren't quantised)."""
    tied = bool(text.get("tie_word_embeddings", str(text.get("model_type")).startswith("gemma")))
    embedded = vocabulary * hidden * (1 if tied else 2)
    matrices = 2 if text.get("model_type") in _UNGATED else 3
    inner = _number(text, "intermediate_size", "n_inner", "ffn_dim") or 4 * hidden
    dense = matrices * hidden * inner
    experts = _number(text, "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    sparse_layers = 0
    sparse = 0
    if experts:
        expert_inner = _number(text, "moe_intermediate_size") or inner
        shared = (_number(text, "n_shared_experts", "num_shared_experts") or 0) * expert_inner
        shared = _number(text, "shared_expert_intermediate_size") or shared
        sparse = 3 * hidden * (experts * expert_inner + shared) + hidden * experts
        step = _number(text, "decoder_sparse_step", "moe_layer_freq") or 1
        sparse_layers = (layers - (_number(text, "first_k_dense_replace") or 0)) // step
    feed_forward = sparse_layers * sparse + (layers - sparse_layers) * dense
    return embedded + layers * _attention_parameters(text, hidden, heads) + feed_forward, embedded


def _attention_parameters(text: Config, hidden: int, heads: int) -> int:
    if latent := _number(text, "kv_lora_rank"):
        nope, rope = _number(text, "qk_nope_head_dim") or 128, _number(text, "qk_rope_head_dim") or 64
        value, query = _number(text, "v_head_dim") or 128, _number(text, "q_lora_rank")
        queries = (hidden * query + query * heads * (nope + rope)) if query else hidden * heads * (nope + rope)
        return queries + hidden * (latent + rope) + latent * heads * (nope + value) + heads * value * hidden
    size = _number(text, "head_dim") or hidden // heads
    return 2 * hidden * size * (heads + _kv_heads(text, heads))


def _weight_bytes(config: Config, text: Config, plain: float) -> float:
    """Bytes of one weight of a linear layer; scales and zero points of groups of 128 included."""
    found = config.get("quantization_config") or text.get("quantization_config")
    if not isinstance(found, Mapping):
        return plain
    method = str(found.get("quant_method", "")).lower()
    bits = _number(found, "bits", "w_bit")
    if groups := found.get("config_groups"):
        weights = [group.get("weights") for group in groups.values() if isinstance(group, Mapping)]
        bits = next((_number(some, "num_bits") for some in weights if isinstance(some, Mapping)), bits)
    if method == "bitsandbytes":
        bits = 4 if found.get("load_in_4bit") else 8
    if method == "mxfp4":
        bits = 4
    if bits is None:
        bits = 8 if "fp8" in method or "int8" in method else 4 if method in ("gptq", "awq", "auto-round") else None
    if bits is None:
        return plain
    return bits / 8 * (1.06 if bits < 8 else 1.01)
