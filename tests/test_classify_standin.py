"""From a process's death to its verdict: the stand-in vLLM dies, its log and exit status are explained."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from world import GIB, MIB, Gpus, chat, free_port, http, wait_until

from supervisor_vllm.classify import classify
from supervisor_vllm.explain import incident_from_log
from supervisor_vllm.incident import Verdict

Serve = Callable[..., subprocess.Popen[bytes]]
ModelDir = Callable[..., Path]


def explain(tmp_path: Path, process: subprocess.Popen[bytes]) -> Verdict:
    status = process.wait(timeout=20)
    log = str(tmp_path / "vllm.log")
    if status < 0:
        return classify(incident_from_log(log, signal=str(-status)))
    return classify(incident_from_log(log, exit_status=status))


@pytest.mark.parametrize(
    ("kind", "figures", "arguments", "neighbour_bytes", "numbers"),
    [
        ("gpu_neighbour", {}, [], 30 * GIB, {"free_bytes": 50 * GIB, "total_bytes": 80 * GIB}),
        ("gpu_weights", {"weights_bytes": 90 * GIB}, [], 0, {"total_bytes": 80 * GIB}),
        ("gpu_profile", {"activation_bytes_per_token": 10 * MIB}, [], 0, {"weights_bytes": 14 * GIB}),
        ("gpu_warmup", {"sampler_bytes_per_seq": 300 * MIB}, [], 0, {"dummy_requests": 256}),
        ("gpu_kv_none", {"weights_bytes": 74 * GIB}, [], 0, {"weights_bytes": 74 * GIB}),
        ("gpu_kv_small", {"kv_bytes_per_token": 4 * MIB}, [], 0, {"estimated_max_model_len": 14608}),
        ("gpu_kv_alloc", {}, ["--kv-cache-memory-bytes", "70G"], 0, {"total_bytes": 80 * GIB}),
        ("gpu_graph", {"graph_bytes": 9 * GIB, "graph_estimate_bytes": MIB}, [], 0, {"total_bytes": 80 * GIB}),
    ],
)
def test_death_at_start(
    kind: str,
    figures: dict[str, int],
    arguments: list[str],
    neighbour_bytes: int,
    numbers: dict[str, int],
    tmp_path: Path,
    gpus: Gpus,
    model_dir: ModelDir,
    vllm_serve: Serve,
) -> None:
    with gpus.neighbour(neighbour_bytes):
        verdict = explain(tmp_path, vllm_serve(model_dir(**figures), "--port", str(free_port()), *arguments))
    assert (verdict.kind, verdict.confidence) == (kind, "proven")
    assert {name: verdict.numbers.get(name) for name in numbers} == numbers


@pytest.mark.parametrize(
    ("where", "what", "kind"),
    [
        ("startup", "port", "port_in_use"),
        ("startup", "bad_model", "bad_model"),
        ("startup", "shm_full", "shm_full"),
        ("loading", "host_alloc", "host_alloc"),
        ("loading", "sigkill_engine", "killed"),
        ("loading", "sigkill_self", "killed"),
        ("profile", "illegal_memory_access", "engine_crash"),
        ("kv_cache", "sigkill_worker", "killed"),
        ("graph", "out_of_memory", "gpu_graph"),
        ("first_completion", "engine_exception", "engine_crash"),
        ("first_completion", "out_of_memory", "gpu_runtime"),
        ("first_completion", "sigkill_engine", "killed"),
        ("first_completion", "sigkill_group", "killed"),
    ],
)
def test_fault(where: str, what: str, kind: str, tmp_path: Path, model_dir: ModelDir, vllm_serve: Serve) -> None:
    port, fault = free_port(), {"where": where, "what": what}
    process = vllm_serve(model_dir(fault=fault), "--port", str(port))
    if where == "first_completion":
        _healthy(port)
        chat(port)
    assert explain(tmp_path, process).kind == kind


def test_out_of_memory_while_serving(tmp_path: Path, model_dir: ModelDir, vllm_serve: Serve) -> None:
    port = free_port()
    process = vllm_serve(model_dir(runtime_peak_bytes=7 * GIB), "--port", str(port))
    _healthy(port)
    chat(port)
    verdict = explain(tmp_path, process)
    assert (verdict.kind, verdict.phase) == ("gpu_runtime", "runtime")
    assert verdict.numbers["tried_bytes"] == 9 * GIB


def test_a_stop_and_wrong_arguments(tmp_path: Path, model_dir: ModelDir, vllm_serve: Serve) -> None:
    port: Any = free_port()
    process = vllm_serve(model_dir(), "--port", str(port))
    _healthy(port)
    process.terminate()
    assert explain(tmp_path, process).kind == "stopped"
    # the same log file: only its last life counts
    assert explain(tmp_path, vllm_serve(model_dir(), "--no-such-flag", "3")).kind == "bad_arguments"


def _healthy(port: int) -> None:
    wait_until(lambda: http(f"http://127.0.0.1:{port}/health")[0] == 200, 20, "the server to be healthy")
