"""`vllm serve` arguments as vLLM 0.32 parses them: dashes or underscores, unique prefixes, the last one wins."""

from __future__ import annotations

import argparse
import re
import sys
from typing import NoReturn

_USAGE = """usage: vllm [-h] [-v]
            {chat,complete,serve,launch,bench,collect-env,download-kernels,preload,run-batch,snapshot}
            ..."""

_DECIMAL = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        print(_USAGE, file=sys.stderr)
        print(f"vllm: error: {message}", file=sys.stderr, flush=True)
        raise SystemExit(2)


def human_int(text: str) -> int:
    """32k is 32000 and 32K is 32768 (0.32 engine/arg_utils.py human_readable_int); 1e4 and 2GiB are no numbers."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgGtT])", text)
    if not match:
        return int(text)
    number, unit = match.groups()
    if unit in _DECIMAL:
        return int(float(number) * _DECIMAL[unit])
    return int(number) * _BINARY[unit]


def _max_model_len(text: str) -> int:
    return -1 if text == "auto" else human_int(text)


def parse(argv: list[str]) -> tuple[argparse.Namespace, dict[str, object]]:
    """`argv` after `serve`. Also the arguments that aren't at their default, as vLLM logs them."""
    parser = _Parser(prog="vllm", add_help=False)
    add = parser.add_argument
    add("model_tag", nargs="?")
    add("--model")
    add("--host")
    add("--port", type=int, default=8000)
    add("--uds")
    add("--root-path", default="")
    add("--api-key", nargs="*", default=None)
    add("--served-model-name", nargs="+", default=None)
    add("--gpu-memory-utilization", type=float, default=0.92)
    add("--max-model-len", type=_max_model_len)
    add("--max-num-seqs", type=human_int)
    add("--max-num-batched-tokens", type=human_int)
    add("--enforce-eager", action=argparse.BooleanOptionalAction, default=False)
    add("--kv-cache-dtype", default="auto")
    add("--kv-cache-memory-bytes", type=human_int)
    add("--cpu-offload-gb", type=float, default=0.0)
    add("--cudagraph-capture-sizes", type=human_int, nargs="+")
    add("--max-cudagraph-capture-size", type=human_int)
    add("--compilation-config", "-cc")
    add("--tensor-parallel-size", "-tp", type=int, default=1)
    add("--pipeline-parallel-size", "-pp", type=int, default=1)
    add("--api-server-count", "-asc", type=int, default=1)
    add("--dtype", default="auto")
    add("--quantization", "-q")
    add("--load-format", default="auto")
    add("--block-size", type=int, default=16)
    add("--num-gpu-blocks-override", type=int)
    add("--max-logprobs", type=int, default=20)
    add("--limit-mm-per-prompt")
    add("--mm-processor-kwargs")
    add("--mm-processor-cache-gb", type=float, default=4.0)
    add("--skip-mm-profiling", action=argparse.BooleanOptionalAction, default=False)
    add("--kv-offloading-size", type=float)
    add("--enable-chunked-prefill", action=argparse.BooleanOptionalAction)
    add("--enable-prefix-caching", action=argparse.BooleanOptionalAction)
    add("--trust-remote-code", action=argparse.BooleanOptionalAction, default=False)
    add("--enable-log-requests", action=argparse.BooleanOptionalAction, default=False)
    add("--disable-log-stats", action="store_true")
    add("--chat-template")
    add("--shutdown-timeout", type=int, default=0)
    add("--seed", type=int, default=0)
    add("--speculative-config")
    add("--uvicorn-log-level", default="info")
    args, unknown = parser.parse_known_args([_dashes(word) for word in argv])
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    given = {name: value for name, value in vars(args).items() if value != parser.get_default(name)}
    args.model = args.model_tag or args.model or "Qwen/Qwen3-0.6B"
    if args.model_tag:
        given["model"] = args.model_tag
    if "api_key" in given:
        given["api_key"] = ["***"]
    return args, given


def _dashes(word: str) -> str:
    """--max_model_len=1 → --max-model-len=1 (0.32 utils/argparse_utils.py)."""
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value
