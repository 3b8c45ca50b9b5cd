"""A tiny real model for real vLLM. Run by the interpreter that has vLLM (it needs transformers and tokenizers):

python tests/real_vllm.py DIRECTORY [CONFIG]        CONFIG: values of config.json that differ, as JSON
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

#: The CPU backend's attention knows head sizes such as 64 = hidden_size / num_attention_heads (vLLM 0.32).
MAX_MODEL_LEN = 4096

_LINES = [
    "The quick brown fox jumps over the lazy dog.",
    "A supervisor restarts what has died, and finds out why.",
    "你好，世界。今天天气很好。",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.",
    "0123456789 + - * / = ( ) [ ] { } < >",
]

_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tiny_model(directory: Path, different: dict[str, Any] | None = None) -> None:
    """A Qwen2 with random weights (about 2.7 MB), a byte-level BPE tokenizer and a chat template."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(_LINES, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=MAX_MODEL_LEN,
    )
    fast.chat_template = _CHAT_TEMPLATE
    fast.save_pretrained(directory)
    torch.manual_seed(0)
    shape = {
        "vocab_size": len(fast) + 8,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": MAX_MODEL_LEN,
    }
    config = Qwen2Config(**{**shape, **(different or {})}, bos_token_id=None, eos_token_id=fast.eos_token_id)
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        raise SystemExit(f"usage: {sys.argv[0]} DIRECTORY [CONFIG]")
    make_tiny_model(Path(sys.argv[1]), json.loads(sys.argv[2]) if len(sys.argv) == 3 else None)
