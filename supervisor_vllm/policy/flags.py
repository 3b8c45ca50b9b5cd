"""The flags that we may write, by version of vLLM. Data, from the sources of 28 releases (0.6.0 to 0.32.0)."""

from __future__ import annotations

import re

UTILIZATION = "--gpu-memory-utilization"
LENGTH = "--max-model-len"
SEQS = "--max-num-seqs"
TOKENS = "--max-num-batched-tokens"
EAGER = "--enforce-eager"
CAPTURE_SIZE = "--max-cudagraph-capture-size"
CPU_OFFLOAD = "--cpu-offload-gb"
SWAP_SPACE = "--swap-space"
KV_BYTES = "--kv-cache-memory-bytes"

#: All that is ever written.
LEARNABLE = frozenset(
    {
        UTILIZATION,
        LENGTH,
        SEQS,
        TOKENS,
        EAGER,
        CAPTURE_SIZE,
        CPU_OFFLOAD,
        SWAP_SPACE,
        KV_BYTES,
        "--kv-offloading-size",
        "--mm-processor-cache-gb",
        "--api-server-count",
    }
)

Version = tuple[int, ...]

#: First and last version that knows the flag; None: still there, or always was. What isn't listed is in all of them.
_KNOWN: dict[str, tuple[Version | None, Version | None]] = {
    CAPTURE_SIZE: ((0, 11, 2), None),
    SWAP_SPACE: (None, (0, 17, 99)),
    "--mm-processor-cache-gb": ((0, 10, 1), None),
    "--kv-offloading-size": ((0, 11, 2), None),
    "--api-server-count": ((0, 9, 0), None),
    KV_BYTES: ((0, 10, 2), None),
}

#: An engine with weights in host memory fails by itself there (vLLM #18298).
_OFFLOAD_BROKEN = ((0, 9, 2), (0, 19, 0))


def parse_version(text: str | None) -> Version | None:
    """`0.8.5.post1`, `v0.15.2rc1.dev93+g1234` → (0, 8, 5); None where it can't be read."""
    match = re.match(r"v?(\d+)\.(\d+)(?:\.(\d+))?", text or "")
    return tuple(int(part or 0) for part in match.groups()) if match else None


def knows(version: str | None, flag: str) -> bool:
    """Does this version know the flag? For an unknown version: do all of them?"""
    first, last = _KNOWN.get(flag, (None, None))
    parsed = parse_version(version)
    if parsed is None:
        return first is None and last is None
    return (first is None or parsed >= first) and (last is None or parsed <= last)


def offload_works(version: str | None) -> bool:
    parsed = parse_version(version)
    return parsed is not None and not _OFFLOAD_BROKEN[0] <= parsed <= _OFFLOAD_BROKEN[1]


def default_utilization(version: str | None) -> float:
    """0.9, from 0.20 on 0.92 (config/cache.py)."""
    parsed = parse_version(version)
    return 0.92 if parsed is None or parsed >= (0, 20) else 0.9


def default_seqs(version: str | None, total_bytes: int | None) -> int:
    """0.32 engine/arg_utils.py: 1024 from 70 GiB on, else 256; V1 of 0.8 always 1024."""
    parsed = parse_version(version)
    if parsed and (0, 8) <= parsed < (0, 9):
        return 1024
    return 1024 if (total_bytes or 0) >= 70 * 2**30 else 256


def default_tokens(total_bytes: int | None) -> int:
    """0.32 engine/arg_utils.py: 16384 from 160 GiB on, 8192 from 70 GiB on, else 2048."""
    if (total_bytes or 0) >= 160 * 2**30:
        return 16384
    return 8192 if (total_bytes or 0) >= 70 * 2**30 else 2048
