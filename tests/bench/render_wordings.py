"""The wordings of released vLLM versions, taken from their own source: no message is from memory.

    python tests/bench/render_wordings.py [--cache DIR]

Fetches the source distributions of the versions below from PyPI, finds the messages in the .py files (strings and
f-strings in raise, assert and logger calls), renders their placeholders with values, and writes
tests/corpus/rendered/cases.json. What a message means stands in MEANINGS: by vLLM's documentation and source.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import requests

OUT = Path(__file__).resolve().parent.parent / "corpus" / "rendered" / "cases.json"
VERSIONS = (
    "0.6.0", "0.6.6.post1", "0.7.3", "0.8.0", "0.8.5.post1", "0.9.0.1", "0.9.2", "0.10.0", "0.10.2", "0.11.0", "0.11.2",
    "0.12.0", "0.13.0", "0.14.1", "0.15.1", "0.16.0", "0.17.0", "0.18.1", "0.19.0", "0.20.2", "0.21.0", "0.22.1", "0.25.1",
    "0.27.0", "0.28.0", "0.30.0", "0.32.0", "0.33.0",
)  # fmt: skip


@dataclass(frozen=True)
class Meaning:
    """`words` find the message in its template. `kind` None: healthy, a wrapper, or no cause at all."""

    name: str
    words: str
    kind: str | None
    files: str = r"\.py$"


MEANINGS = (
    Meaning("free_check", r"on startup is less than", "gpu_neighbour"),
    Meaning("kv_none", r"No available memory for the cache blocks", "gpu_kv_none"),
    Meaning("kv_autofit", r"Cannot auto-fit max_model_len", "gpu_kv_none"),
    Meaning("kv_small", r"To serve at least one request with the model", "gpu_kv_small"),
    Meaning("kv_small_v0", r"is larger than the maximum number of tokens that can be stored in KV cache", "gpu_kv_small"),
    Meaning("mem_profiling", r"Error in memory profiling", "gpu_unstable"),
    Meaning("warm_up", r"out of memory occurred when warming up", "gpu_warmup"),
    Meaning("mamba", r"exceeds available Mamba cache blocks", "gpu_warmup"),
    Meaning("load_fail", r"Failed to load model - not enough", "gpu_weights"),
    Meaning("load_fail_0_11", r"may be caused by insufficient memory", "gpu_weights"),
    Meaning("ext_weights", r"Externally held weights on device .* exceed", "gpu_kv_none"),
    Meaning("cpu_budget", r"The worker already uses", "gpu_kv_none"),
    Meaning("cpu_kv", r"on kv cache allocation is less than requested memory", "gpu_kv_alloc"),
    Meaning("swap_space", r"^Too large swap space", "host_alloc"),
    Meaning("shm_space", r"Insufficient space in /dev/shm", "shm_full"),
    Meaning("length_derived", r"User-specified max_model_len .* is greater than the derived", "bad_arguments"),
    Meaning("batched_tokens", r"^max_num_batched_tokens \(.*(?:is smaller than|must be greater)", "bad_arguments"),
    Meaning("heads", r"^Total number of attention heads", "bad_arguments"),
    Meaning("quantization", r"^Unknown quantization method", "bad_arguments"),
    Meaning("architecture", r"^Model architectures .* (?:are not supported|failed to be inspected)", "bad_model"),
    Meaning("no_weights", r"^Cannot find any model weights with", "bad_model"),
    Meaning("device_type", r"^Failed to infer device type", "gpu_unavailable"),
    Meaning("worker_failed", r"WorkerProc initialization failed|^WorkerProc failed to start", None),
    Meaning("engine_failed", r"^Engine core initialization failed|^Engine process failed to start", None),
    Meaning("engine_dead", r"^EngineCore encountered an issue|^EngineCore failed to start|encountered a fatal error", None),
    Meaning("block_hint", r"out-of-memory error occurs|running out of memory, consider", None),
    Meaning("actual_usage", r"^Free memory on device .*Actual usage", None),
    Meaning("graph_hint", r"CUDA graph memory profiling is", None),
    Meaning("swap_warning", r"^Possibly too large swap space", None),
    Meaning("preempted", r"because there is not enough KV cache space", None),
    Meaning("shm_wait", r"No available (?:shared memory broadcast )?block found in", None),
    Meaning("kv_size", r"KV cache size: ", None),
    Meaning("kv_available", r"^Available KV cache memory", None),
    Meaning("loading_took", r"^(?:Model loading took|Loading model weights took)", None),
)  # fmt: skip

# A file without any of these says none of them.
_WORDS = re.compile(r"emory|KV [cC]ache|max_model_len|attention heads|quantization method|architectures|Engine|weights")

# By what stands in a placeholder's expression, first match first; the rest are counts.
_VALUES = (
    (r"gpu_memory_utilization|utilization", "0.9"),
    (r"\bdevice\b|device_name", "cuda:0"),
    (r"total", "79.1"),
    (r"requested|required", "71.19"),
    (r"free|available|current|initial", "41.25"),
    (r"GiB|gib|GB|_gb|memory|needed|bytes", "12.5"),
    (r"arch", "['FooForCausalLM']"),
    (r"quant|name|path|method|model_config|task|processor|url|suffix|msg|reason|err|_e\b", "x"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "vllm-sources")
    options = parser.parse_args()
    options.cache.mkdir(parents=True, exist_ok=True)
    found: dict[tuple[str, str], dict[str, object]] = {}
    for version in VERSIONS:
        sources = list(_sources(version, options.cache))
        if not sources:
            print(f"{version}: no source", file=sys.stderr)
            continue
        for name, text in sources:
            for meaning, line, level, message in _messages(name, text):
                case = found.setdefault(
                    (meaning.name, message),
                    {
                        "id": f"{version}/{meaning.name}",
                        "versions": [],
                        "file": name,
                        "line": line,
                        "level": level,
                        "text": message,
                        "kind": meaning.kind,
                    },
                )
                versions = case["versions"]
                assert isinstance(versions, list)
                if version not in versions:
                    versions.append(version)
        print(f"{version}: {len(found)} wordings so far", flush=True)
        OUT.parent.mkdir(parents=True, exist_ok=True)
        OUT.write_text(json.dumps(list(found.values()), indent=1, ensure_ascii=False) + "\n")


def _sources(version: str, cache: Path) -> Iterator[tuple[str, str]]:
    """(path below the package, text) of each .py file of the released version."""
    archive = next(iter(cache.glob(f"vllm-{version}.*")), None) or _download(version, cache)
    if archive is None:
        return
    with tarfile.open(archive) as source:
        for member in source:
            parts = member.name.split("/")
            if len(parts) > 2 and parts[1] == "vllm" and member.name.endswith(".py"):
                file = source.extractfile(member)
                if file:
                    yield "/".join(parts[2:]), file.read().decode()


def _download(version: str, cache: Path) -> Path | None:
    """The source distribution, as PyPI's index names it (PEP 691)."""
    accepted = {"Accept": "application/vnd.pypi.simple.v1+json"}
    files = requests.get("https://pypi.org/simple/vllm/", headers=accepted, timeout=60).json()["files"]
    url = next((file["url"] for file in files if file["filename"] == f"vllm-{version}.tar.gz"), None)
    if url is None:
        return None
    path = cache / f"vllm-{version}.tar.gz"
    path.write_bytes(requests.get(url, timeout=60).content)
    return path


def _messages(name: str, text: str) -> Iterator[tuple[Meaning, int, str, str]]:
    if not _WORDS.search(text):
        return
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return
    for node in ast.walk(tree):
        level, argument = _said(node)
        if argument is None:
            continue
        message = _rendered(argument)
        for meaning in MEANINGS:
            if re.search(meaning.words, message):
                yield meaning, getattr(node, "lineno", 0), level, " ".join(message.split())
                break


def _said(node: ast.AST) -> tuple[str, ast.expr | None]:
    """(error, warning or info; the message's expression) of a statement that says something."""
    if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
        return f"raise {ast.unparse(node.exc.func)}", node.exc.args[0]
    if isinstance(node, ast.Assert) and node.msg is not None:
        return "raise AssertionError", node.msg
    if isinstance(node, ast.Assign) and isinstance(node.value, (ast.JoinedStr, ast.BinOp, ast.Constant)):
        return "raise ValueError", node.value  # msg = (…); raise ValueError(msg)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
        level = node.func.attr.removesuffix("_once")
        if level in ("info", "warning", "error", "exception", "critical"):
            arguments = node.args
            if isinstance(arguments[0], ast.Constant) and isinstance(arguments[0].value, str) and len(arguments) > 1:
                return level, ast.BinOp(arguments[0], ast.Mod(), ast.Tuple(list(arguments[1:]), ast.Load()))
            return level, arguments[0]
    return "", None


def _rendered(node: ast.expr) -> str:
    """The text with values in its placeholders."""
    if isinstance(node, ast.Constant):
        return str(node.value) if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(_rendered(part) if isinstance(part, ast.Constant) else _value(part) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _rendered(node.left) + _rendered(node.right)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
        values = node.right.elts if isinstance(node.right, ast.Tuple) else [node.right]
        texts = iter([_value(value) for value in values])
        return re.sub(r"%[-.\d]*[sdfrg]", lambda _: next(texts, "7"), _rendered(node.left)).replace("%%", "%")
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "format":
        return re.sub(r"\{[^{}]*\}", "7", _rendered(node.func.value))
    return ""


def _value(node: ast.AST) -> str:
    expression = ast.unparse(node)
    if re.search(r"max_model_len|max_seq_len|num_seqs|num_reqs|tokens|_heads|blocks|len\(", expression):
        return "4096"
    return next((value for words, value in _VALUES if re.search(words, expression)), "7")


if __name__ == "__main__":
    main()
