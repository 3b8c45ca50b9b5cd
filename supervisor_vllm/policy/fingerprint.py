"""What learned arguments belong to: this model, vLLM, devices, driver and flags. Pure.

A launch of the same thing starts right the first time; another model or version never gets what was learned of this.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from ..incident import to_json
from .launch_command import LaunchCommand

#: Flags that decide how much memory a launch needs, apart from those that are learned themselves (flags.py).
_DECIDING = (
    *(
        "revision",
        "quantization",
        "dtype",
        "kv-cache-dtype",
        "load-format",
        "hf-overrides",
        "model-impl",
        "runner",
        "task",
    ),
    *("tensor-parallel-size", "pipeline-parallel-size", "data-parallel-size", "decode-context-parallel-size"),
    *("enable-lora", "max-loras", "max-lora-rank", "lora-modules", "speculative-config", "speculative-model"),
    *("block-size", "limit-mm-per-prompt", "mm-processor-kwargs", "language-model-only", "compilation-config"),
    *("enable-expert-parallel", "enable-prefix-caching", "enable-chunked-prefill", "device"),
)


@dataclass(frozen=True)
class Fingerprint:
    """None, or empty: not known here. `model_digest`: of its config.json; `weights_bytes`: of its files; `devices`:
    name and total bytes of each, as the driver has them; `driver`: its version; `flags`: name and value, sorted."""

    model: str
    flags: tuple[tuple[str, ...], ...] = ()
    model_digest: str | None = None
    weights_bytes: int | None = None
    vllm_version: str | None = None
    devices: tuple[str, ...] = ()
    driver: str = ""

    @property
    def key(self) -> str:
        return json.dumps(to_json(self), sort_keys=True, ensure_ascii=False)


def deciding_flags(launch: LaunchCommand) -> tuple[tuple[str, ...], ...]:
    return tuple((name, value) for name in sorted(_DECIDING) if (value := launch.get(f"--{name}")) is not None)


def difference(learned_of: Fingerprint, now: Fingerprint) -> str | None:
    """Why what was learned of the one isn't true of the other; None: nothing that is known of both differs."""
    if learned_of.model_digest and now.model_digest:
        if learned_of.model_digest != now.model_digest:
            return f"another model ({learned_of.model} → {now.model})"
    elif learned_of.model != now.model:
        return f"another model ({learned_of.model} → {now.model})"
    for name, before, after in (
        ("weights of another size", learned_of.weights_bytes, now.weights_bytes),
        ("another vLLM", learned_of.vllm_version, now.vllm_version),
        ("another driver", learned_of.driver, now.driver),
        ("other devices", ", ".join(learned_of.devices), ", ".join(now.devices)),
    ):
        if before and after and before != after:
            return f"{name} ({before} → {after})"
    if learned_of.flags != now.flags:
        changed = {name for name, *_ in set(learned_of.flags) ^ set(now.flags)}
        return f"other flags ({', '.join(f'--{name}' for name in sorted(changed))})"
    return None
