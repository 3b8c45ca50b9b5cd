"""`supervisor-vllm plan`: does it fit, which memory goes where, before any death."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from supervisor_vllm.cli import main
from supervisor_vllm.forecast import Forecast, forecast
from supervisor_vllm.settings import Settings

GIB = 2**30
QWEN_7B = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "vocab_size": 152064,
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 131072,
}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(QWEN_7B))
    return path


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    status = main(["plan", "--json", "--vllm-version", "0.32.0", *arguments])
    return status, json.loads(capsys.readouterr().out)


def test_the_contract(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = "vllm serve Qwen/Qwen2.5-7B-Instruct"
    given = ("--gpu-total", str(24 * GIB), "--model-config", str(config))
    status, data = plan(capsys, "--command", f"{command} --max-model-len 16384", *given)
    assert (status, data["fits"], data["plan"]["action"], data["plan"]["changes"]) == (0, True, "none", [])
    memory = data["memory"]
    assert {"total", "weights", "activations", "graphs", "kv_cache", "free"} <= memory.keys()
    assert sum(memory.values()) - memory["total"] == pytest.approx(memory["total"], abs=64)
    assert memory["weights"] / GIB == pytest.approx(14.2, rel=0.02)  # vLLM: "Model loading took 14.2487 GiB"
    assert data["concurrency"] > 1 and 16384 < data["longest_max_model_len"] <= 131072

    status, data = plan(capsys, "--command", command, *given)
    assert (status, data["fits"], data["kind"]) == (1, False, "gpu_kv_small")
    (change,) = data["plan"]["changes"]
    assert (change["flag"], change["from"]) == ("--max-model-len", None)
    assert data["plan"]["command"] == f"{command} --max-model-len {change['to']}"
    assert plan(capsys, "--command", data["plan"]["command"], *given)[1]["fits"]


@pytest.mark.parametrize(
    ("total", "free", "flags", "kind", "flag"),
    [
        (8, 8, "", "gpu_weights", None),
        (24, 12, "", "gpu_weights", None),
        (24, 20, "", "gpu_neighbour", "--gpu-memory-utilization"),
        (24, 24, "--gpu-memory-utilization 0.55", "gpu_kv_none", "--gpu-memory-utilization"),
        (24, 24, "--max-num-batched-tokens 262144", "gpu_profile", "--max-num-batched-tokens"),
        (80, 80, "--gpu-memory-utilization 0.9", None, None),
    ],
)
def test_each_check_in_vllms_order(
    total: int,
    free: int,
    flags: str,
    kind: str | None,
    flag: str | None,
    config: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = f"vllm serve m {flags}".strip()
    sizes = ("--gpu-total", str(total * GIB), "--gpu-free", str(free * GIB), "--model-config", str(config))
    status, data = plan(capsys, "--command", command, *sizes)
    if kind == "gpu_weights" and free < total:  # the neighbour is the reason: without it the weights fit
        assert data["kind"] in ("gpu_weights", "gpu_neighbour")
    else:
        assert data["kind"] == kind
    assert status == (1 if kind else 0)
    changed = [change["flag"] for change in data["plan"]["changes"]]
    assert flag in changed if flag else changed == []
    if changed:
        assert plan(capsys, "--command", data["plan"]["command"], *sizes)[1]["fits"], data["plan"]["command"]


def test_nothing_can_fit_says_the_arithmetic(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("--gpu-total", str(8 * GIB), "--model-config", str(config))
    _, data = plan(capsys, "--command", "vllm serve m", *sizes)
    assert data["plan"]["action"] == "hold"
    assert "weights 14.18 GiB, device 8.00 GiB: needs --tensor-parallel-size 4" in data["problem"]


def test_settings_are_kept(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("--gpu-total", str(24 * GIB), "--model-config", str(config), "--command", "vllm serve m")
    _, data = plan(capsys, *sizes, "--set", "prefer=context")
    assert [change["flag"] for change in data["plan"]["changes"]] == ["--gpu-memory-utilization"]
    _, data = plan(capsys, *sizes, "--set", "pin=--max-model-len")
    assert "--max-model-len" not in [change["flag"] for change in data["plan"]["changes"]]


def test_the_size_of_the_files_counts(tmp_path: Path, config: Path) -> None:
    header = json.dumps({"__metadata__": {"format": "pt"}}).encode()
    shard = tmp_path / "model-00001-of-00001.safetensors"
    with shard.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(10 * GIB)  # sparse
    (tmp_path / "consolidated.safetensors").write_bytes(b"x" * 100)
    found = _forecast(str(tmp_path))
    assert found.weights == 10 * GIB
    index = {"weight_map": {"a": shard.name, "b": "model-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert _forecast(str(tmp_path)).weights != 10 * GIB  # a shard is missing: the shape decides


def _forecast(model: str) -> Forecast:
    return forecast(f"vllm serve {model}", Settings(), gpu_total=24 * GIB, vllm_version="0.32.0")


def test_a_name_of_the_hub_is_found_in_the_cache(
    tmp_path: Path, config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    repository = tmp_path / "hub" / "models--Qwen--Qwen2.5-7B-Instruct"
    for revision, commit in (("main", "abc"), ("v2", "def")):
        snapshot = repository / "snapshots" / commit
        snapshot.mkdir(parents=True)
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / revision).write_text(commit)
        layers = 28 if revision == "main" else 56
        (snapshot / "config.json").write_text(json.dumps({**QWEN_7B, "num_hidden_layers": layers}))
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    small = _forecast("Qwen/Qwen2.5-7B-Instruct").weights
    assert _forecast("Qwen/Qwen2.5-7B-Instruct --revision v2").weights > small * 1.7
    assert main(["plan", "--gpu-total", "1", "--command", "vllm serve Qwen/Other"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--command", "vllm serve nowhere/model", "--gpu-total", "1"], "--model-config"),
        (["--command", "vllm serve m", "--gpu-free", "1"], "--gpu-total"),
        (["--command", "vllm serve m", "--gpu-total", "5", "--gpu-free", "6"], "free"),
        (["--command", "vllm serve m", "--gpu-total", "5", "--model-config", "/nonexistent"], "config.json"),
        (["--command", "vllm serve m", "--gpu-total", "5", "--set", "prefer"], "NAME=VALUE"),
    ],
)
def test_wrong_use_is_one_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and words in error


def test_for_people(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--gpu-total", str(23 * GIB), "--model-config", str(config)]
    assert main(["plan", "--command", "vllm serve m", *sizes]) == 1
    shown = capsys.readouterr().out
    for words in ("it does not fit: one request of 131072 tokens needs", "weights", "KV cache", "--max-model-len", "█"):
        assert words in shown
