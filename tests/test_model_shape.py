"""What a config.json says of a model's weights and KV cache: against published parameter counts and figures."""

from __future__ import annotations

from typing import Any

import pytest

from supervisor_vllm.policy.model_shape import kv_bytes, longest_request, model_shape

KIB, GIB = 2**10, 2**30


def llama(hidden: int, layers: int, heads: int, kv: int, inner: int, vocab: int, **more: Any) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "intermediate_size": inner,
        "vocab_size": vocab,
        "torch_dtype": "bfloat16",
        "max_position_embeddings": 131072,
        **more,
    }


DEEPSEEK_V3 = llama(7168, 61, 128, 128, 18432, 129280, model_type="deepseek_v3") | {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
    "quantization_config": {"quant_method": "fp8"},
}
GEMMA_3_27B = {
    "model_type": "gemma3",
    "torch_dtype": "bfloat16",
    "text_config": llama(5376, 62, 32, 16, 21504, 262208, model_type="gemma3_text", head_dim=128)
    | {"sliding_window": 1024, "sliding_window_pattern": 6},
}

#: name → (config, published parameters in 10⁹, KV bytes a token on one device at 16 bit)
PUBLISHED: dict[str, tuple[dict[str, Any], float, int | None]] = {
    "Qwen2.5-0.5B": (llama(896, 24, 14, 2, 4864, 151936, tie_word_embeddings=True), 0.494, 12 * KIB),
    "Qwen2.5-7B": (llama(3584, 28, 28, 4, 18944, 152064, model_type="qwen2", sliding_window=131072), 7.62, 56 * KIB),
    "Qwen2.5-72B": (llama(8192, 80, 64, 8, 29568, 152064), 72.7, 320 * KIB),
    "Qwen3-8B": (llama(4096, 36, 32, 8, 12288, 151936, head_dim=128), 8.19, 144 * KIB),
    "Qwen3-30B-A3B": (
        llama(2048, 48, 32, 4, 6144, 151936, head_dim=128, num_experts=128, moe_intermediate_size=768),
        30.5,
        96 * KIB,
    ),
    "Llama-2-7B": (llama(4096, 32, 32, 32, 11008, 32000), 6.74, 512 * KIB),
    "Llama-3.1-8B": (llama(4096, 32, 32, 8, 14336, 128256), 8.03, 128 * KIB),
    "Llama-3.1-70B": (llama(8192, 80, 64, 8, 28672, 128256), 70.6, 320 * KIB),
    "Mistral-7B-v0.1": (llama(4096, 32, 32, 8, 14336, 32000, model_type="mistral", sliding_window=4096), 7.24, None),
    "Mixtral-8x7B": (llama(4096, 32, 32, 8, 14336, 32000, num_local_experts=8), 46.7, 128 * KIB),
    "Phi-3-mini": (llama(3072, 32, 32, 32, 8192, 32064), 3.82, 384 * KIB),
    "DeepSeek-V3": (DEEPSEEK_V3, 671.0, (512 + 64) * 2 * 61),
    "Gemma-2-9b": (llama(3584, 42, 16, 8, 14336, 256000, model_type="gemma2", head_dim=256), 9.24, 336 * KIB),
    "Gemma-3-27b": (GEMMA_3_27B, 27.0, None),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_figures(name: str) -> None:
    config, billions, per_token = PUBLISHED[name]
    shape = model_shape(config)
    assert shape
    assert shape.parameters / 1e9 == pytest.approx(billions, rel=0.03)
    if per_token:
        assert kv_bytes(shape, 16000, 2048) == per_token * 16000


def test_weights() -> None:
    config = PUBLISHED["Llama-3.1-8B"][0]
    shape = model_shape(config)
    assert shape and shape.weights_bytes / GIB == pytest.approx(
        14.96, rel=0.02
    )  # vLLM: "Model loading took 14.9596 GiB"
    awq = model_shape({**config, "quantization_config": {"quant_method": "awq", "bits": 4}})
    assert awq and awq.weights_bytes / GIB == pytest.approx(5.34, rel=0.05)  # the published checkpoint's files
    fp8 = model_shape(DEEPSEEK_V3)
    assert fp8 and fp8.weights_bytes / 1e9 == pytest.approx(688, rel=0.03)  # the published checkpoint's files
    packed = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 4}}}}
    four = model_shape({**config, "quantization_config": packed})
    assert four and four.weights_bytes == pytest.approx(awq.weights_bytes, rel=0.01)
    assert model_shape({**config, "torch_dtype": "float32"}) == model_shape({**config, "torch_dtype": "bfloat16"})


def test_tensor_parallel_and_cache_dtype() -> None:
    shape = model_shape(PUBLISHED["Qwen2.5-7B"][0])
    assert shape
    whole = kv_bytes(shape, 1600, 2048)
    assert kv_bytes(shape, 1600, 2048, ranks=4) * 4 == whole
    assert kv_bytes(shape, 1600, 2048, ranks=8) * 4 == whole  # a KV head isn't split: each is on two ranks
    assert kv_bytes(shape, 1600, 2048, value_bytes=1) * 2 == whole
    latent = model_shape(DEEPSEEK_V3)
    assert latent and kv_bytes(latent, 1600, 2048, ranks=8) == kv_bytes(latent, 1600, 2048)


def test_windows_hold_no_more_than_they_need() -> None:
    shape = model_shape(GEMMA_3_27B)
    assert shape and (shape.full_layers, shape.window_layers) == (10, 52)
    short, long = kv_bytes(shape, 2**10, 2048), kv_bytes(shape, 2**17, 2048)
    assert long < short * 128 / 4
    types = ["sliding_attention", "full_attention"] * 12
    listed = model_shape(llama(2880, 24, 64, 8, 2880, 201088, head_dim=64, layer_types=types, sliding_window=128))
    assert listed and (listed.full_layers, listed.window_layers) == (12, 12)
    switched_off = model_shape(llama(3584, 28, 28, 4, 18944, 152064, sliding_window=4096, use_sliding_window=False))
    assert switched_off and switched_off.window_layers == 0


def test_layers_with_a_state_have_no_kv_a_token() -> None:
    types = ["linear_attention"] * 3 + ["full_attention"]
    shape = model_shape(llama(2048, 48, 16, 2, 5120, 151936, head_dim=256, layer_types=types * 12))
    assert shape and shape.full_layers == 12 and not shape.kv_is_exact
    every = model_shape(llama(2048, 48, 16, 2, 5120, 151936, head_dim=256, full_attention_interval=4))
    assert every and every.full_layers == 12 and not every.kv_is_exact


def test_longest_request_is_the_longest() -> None:
    for name, (config, _, _) in PUBLISHED.items():
        shape = model_shape(config)
        assert shape
        for size in (0, GIB // 3, 5 * GIB):
            longest = longest_request(shape, size, 2048)
            assert kv_bytes(shape, longest, 2048) <= size, name
            assert longest >= 131072 or kv_bytes(shape, longest + 1, 2048) > size, name


@pytest.mark.parametrize("config", [{}, {"hidden_size": "a"}, {"hidden_size": -1, "n_layer": True}, {"text_config": 3}])
def test_what_is_no_decoder(config: dict[str, Any]) -> None:
    assert model_shape(config) is None


def test_yarn_is_counted() -> None:
    scaled = {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}}
    shape = model_shape(llama(3584, 28, 28, 4, 18944, 152064) | scaled)
    assert shape and shape.max_position == 131072
