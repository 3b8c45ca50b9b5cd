"""No secret reaches the journal, and a log stays readable."""

import pytest

from supervisor_vllm.redaction import redact_text

CANARY = "c4nary-S3cret_value"


@pytest.mark.parametrize(
    "text",
    [
        f"vllm serve m --api-key {CANARY} --port 8000",
        f"vllm serve m --api_key={CANARY}",
        f"non-default args: {{'model': 'm', 'api_key': ['{CANARY}'], 'port': 8000}}",
        f"VLLM_API_KEY={CANARY} vllm serve m",
        f'environment=HF_TOKEN="{CANARY}",A="b"',
        f"Authorization: Bearer {CANARY}",
        f"http://user:{CANARY}@127.0.0.1:9001/RPC2",
        f"password = {CANARY}",
        "token hf_" + "a" * 34,
    ],
)
def test_a_secret_goes(text):
    redacted = redact_text(text)
    assert CANARY not in redacted
    assert "a" * 34 not in redacted
    assert "***" in redacted


@pytest.mark.parametrize(
    "text",
    [
        "Avg prompt throughput: 2.0 tokens/s, Avg generation throughput: 1.5 tokens/s",
        "--max-num-batched-tokens 8192 --max-num-seqs 256",
        "max_num_batched_tokens=8192, tokenizer='/srv/models/tiny', tokenizer_mode=auto, tokenizer_revision=None",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.82 GiB.",
        "http://127.0.0.1:8000/v1/models",
    ],
)
def test_the_rest_stays(text):
    assert redact_text(text) == text
