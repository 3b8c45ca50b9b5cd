"""The model of a launch: its config.json and its weights' size, from a directory or the Hugging Face cache. Offline."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..policy.launch_command import LaunchCommand
from ..policy.model_shape import ModelShape, model_shape

#: A config.json is a few KiB; an index of shards of the largest models some MiB.
_MAX_JSON_BYTES = 64 * 2**20


def launched_shape(launch: LaunchCommand, environment: Mapping[str, str], directory: str = "/") -> ModelShape | None:
    """None: the model isn't here, or its config.json isn't one that is understood. `directory`: of relative names."""
    folder = model_directory(launch, environment, directory)
    return shape_in(folder, launch) if folder else None


def shape_in(path: Path, launch: LaunchCommand) -> ModelShape | None:
    """From a model's directory, or a config.json alone."""
    config = _json(path / "config.json" if path.is_dir() else path)
    shape = model_shape(config) if config else None
    if shape is None:
        return None
    size = weights_on_disk(path) if path.is_dir() else None
    if size:
        halved = config.get("torch_dtype") == "float32" and shape.value_bytes == 2.0
        shape = shape.with_weights(size // 2 if halved else size)
    if launch.get("--dtype") in ("float32", "float"):
        shape = dataclasses.replace(shape, value_bytes=4.0)
    # a draft model has weights and a cache of its own, which config.json doesn't tell of
    if launch.get("--speculative-config") or launch.get("--speculative-model") or launch.get("--spec-model"):
        shape = dataclasses.replace(shape, kv_is_exact=False, weights_are_exact=False)
    return shape


def model_directory(launch: LaunchCommand, environment: Mapping[str, str], directory: str) -> Path | None:
    name = launch.model
    if not name or "%(" in name or "$" in name:
        return None
    local = Path(directory, os.path.expanduser(name))
    if local.is_dir():
        return local
    return _cached(name, launch.get("--revision") or "main", environment)


def _cached(name: str, revision: str, environment: Mapping[str, str]) -> Path | None:
    """huggingface_hub's layout: models--ORG--NAME/refs/REVISION holds the commit, snapshots/COMMIT the files."""
    if name.count("/") > 1 or name.startswith((".", "/")) or ".." in revision:
        return None
    repository = _hub_cache(environment) / f"models--{name.replace('/', '--')}"
    try:
        commit = (repository / "refs" / revision).read_text().strip()
    except OSError:
        commit = revision
    snapshot = repository / "snapshots" / commit
    return snapshot if snapshot.is_dir() else None


def _hub_cache(environment: Mapping[str, str]) -> Path:
    """As huggingface_hub's constants.py has it."""
    if cache := environment.get("HF_HUB_CACHE") or environment.get("HUGGINGFACE_HUB_CACHE"):
        return Path(cache)
    if home := environment.get("HF_HOME"):
        return Path(home, "hub")
    cache = environment.get("XDG_CACHE_HOME") or os.path.join(environment.get("HOME") or str(Path.home()), ".cache")
    return Path(cache, "huggingface", "hub")


def weights_on_disk(folder: Path) -> int | None:
    """Bytes of the safetensors files that vLLM loads: those of the index where there is one. None: there are none."""
    index = _json(folder / "model.safetensors.index.json")
    shards = index.get("weight_map") if index else None
    if isinstance(shards, Mapping):
        names = {str(name) for name in shards.values()}
    else:
        names = {path.name for path in folder.glob("*.safetensors") if not path.name.startswith("consolidated")}
    try:
        return sum((folder / name).stat().st_size for name in names) or None
    except OSError:  # not all are there: check-model's business
        return None


def _json(path: Path) -> dict[str, Any]:
    """Empty where there is no such object."""
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            return {}
        value = json.loads(path.read_text(errors="replace"))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
