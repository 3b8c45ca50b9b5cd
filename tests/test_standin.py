"""The stand-ins behave as the measured things do: what the end-to-end tests stand on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from world import (
    GIB,
    MIB,
    VLLM_SITE,
    Gpus,
    Supervisord,
    alive,
    chat,
    clean_environment,
    free_port,
    group_members,
    http,
    run_cli,
    wait_until,
)

Serve = Callable[..., subprocess.Popen[bytes]]
ModelDir = Callable[..., Path]

#: How each memory kind is brought about on 80 GiB: figures, arguments, neighbour's bytes, words in the log.
MEMORY_DEATHS: dict[str, tuple[dict[str, int], list[str], int, str]] = {
    "gpu_neighbour": ({}, [], 30 * GIB, "Free memory on device cuda:0 (50.0/80.0 GiB) on startup is less than desired"),
    "gpu_weights": ({"weights_bytes": 90 * GIB}, [], 0, "Failed to load model - not enough GPU memory"),
    "gpu_profile": ({"activation_bytes_per_token": 10 * MIB}, [], 0, "in profile_run"),
    "gpu_warmup": ({"sampler_bytes_per_seq": 300 * MIB}, [], 0, "when warming up sampler with 256 dummy requests"),
    "gpu_kv_none": ({"weights_bytes": 74 * GIB}, [], 0, "No available memory for the cache blocks"),
    "gpu_kv_small": ({"kv_bytes_per_token": 4 * MIB}, [], 0, "the estimated maximum model length is 14608"),
    "gpu_kv_alloc": ({}, ["--kv-cache-memory-bytes", "70G"], 0, "in initialize_kv_cache_tensors"),
    "gpu_graph": ({"graph_bytes": 9 * GIB, "graph_estimate_bytes": MIB}, [], 0, "in capture_model"),
}


def served(port: int) -> Callable[[], bool]:
    return lambda: http(f"http://127.0.0.1:{port}/health")[0] == 200


def log_of(tmp_path: Path) -> str:
    return (tmp_path / "vllm.log").read_text()


@pytest.mark.parametrize("kind", MEMORY_DEATHS)
def test_death_at_start(kind: str, tmp_path: Path, gpus: Gpus, model_dir: ModelDir, vllm_serve: Serve) -> None:
    figures, arguments, neighbour_bytes, words = MEMORY_DEATHS[kind]
    with gpus.neighbour(neighbour_bytes):
        process = vllm_serve(model_dir(**figures), "--port", str(free_port()), *arguments)
        assert process.wait(timeout=20) == 1
    log = log_of(tmp_path)
    assert words in log
    assert "Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore': 1}" in log
    assert not group_members(process.pid)
    assert gpus.free_bytes() == 80 * GIB


@pytest.mark.parametrize(
    ("kind", "remedy"),
    [
        ("gpu_profile", ["--max-num-batched-tokens", "4096"]),
        ("gpu_warmup", ["--max-num-seqs", "64"]),
        ("gpu_kv_none", ["--gpu-memory-utilization=0.99"]),
        ("gpu_kv_small", ["--max_model_len", "14608"]),
        ("gpu_graph", ["--gpu-memory-utilization", "0.85"]),
        ("gpu_graph", ["--enforce-eager"]),
    ],
)
def test_the_right_remedy_serves(kind: str, remedy: list[str], model_dir: ModelDir, vllm_serve: Serve) -> None:
    port = free_port()
    model = model_dir(max_position_embeddings=16384, **MEMORY_DEATHS[kind][0])
    vllm_serve(model, "--port", str(port), *remedy)
    wait_until(served(port), 20, "the remedied server to be healthy")
    assert chat(port)[0] == 200


def test_healthy_server_answers(gpus: Gpus, model_dir: ModelDir, vllm_serve: Serve) -> None:
    port, model = free_port(), model_dir()
    process = vllm_serve(
        model, "--port", str(port), "--served-model-name", "m", "--api-key", "secret", "--max-model-len", "4k"
    )
    wait_until(served(port), 20, "/health")
    assert chat(port)[0] == 401
    status, models = http(f"http://127.0.0.1:{port}/v1/models", api_key="secret")
    card = models["data"][0]
    assert (status, card["id"], card["root"], card["max_model_len"]) == (200, "m", str(model), 4000)
    status, answer = chat(port, "Hallo", api_key="secret")
    assert status == 200
    assert "Hallo" in answer["choices"][0]["message"]["content"]
    assert "vllm:prompt_tokens_total" in http(f"http://127.0.0.1:{port}/metrics")[1]
    names = sorted(member.name() for member in group_members(process.pid))
    assert len(names) == 3
    assert names[:2] == ["VLLM::EngineCor", "VLLM::Worker"] or "VLLM::EngineCore" in names
    assert sum(gpus.holders().values()) > 70 * GIB
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=10) == 0
    assert not group_members(process.pid)


def test_runtime_oom_ends_with_status_0(tmp_path: Path, model_dir: ModelDir, vllm_serve: Serve) -> None:
    port = free_port()
    process = vllm_serve(model_dir(runtime_peak_bytes=7 * GIB), "--port", str(port))
    wait_until(served(port), 20, "/health")
    assert chat(port)[0] == 500
    assert process.wait(timeout=10) == 0
    log = log_of(tmp_path)
    assert "EngineCore encountered a fatal error." in log
    assert "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 9.00 GiB." in log


def test_killed_worker_ends_with_status_0(tmp_path: Path, model_dir: ModelDir, vllm_serve: Serve) -> None:
    port = free_port()
    process = vllm_serve(model_dir(watchdog_seconds=1.5), "--port", str(port))
    wait_until(served(port), 20, "/health")
    (worker,) = (member for member in group_members(process.pid) if member.name().startswith("VLLM::Worker"))
    worker.kill()
    wait_until(lambda: http(f"http://127.0.0.1:{port}/health")[0] == 503, 5, "/health to say 503")
    assert process.wait(timeout=10) == 0
    assert "Worker proc VllmWorker-0 died unexpectedly (exit code: None)" in log_of(tmp_path)


def test_orphans_of_a_killed_api_server_hold_the_memory(gpus: Gpus, model_dir: ModelDir, vllm_serve: Serve) -> None:
    port = free_port()
    process = vllm_serve(model_dir(), "--port", str(port))
    wait_until(served(port), 20, "/health")
    process.kill()
    process.wait(timeout=5)
    orphans = group_members(process.pid)
    assert len(orphans) == 2
    assert gpus.free_bytes() < 10 * GIB
    engine = next(orphan for orphan in orphans if "Engine" in orphan.name())
    engine.kill()
    wait_until(lambda: not group_members(process.pid), 5, "the Worker to follow its EngineCore")
    assert gpus.free_bytes() == 80 * GIB


def test_wrong_arguments(tmp_path: Path, model_dir: ModelDir, vllm_serve: Serve) -> None:
    process = vllm_serve(model_dir(), "--no-such-flag", "3")
    assert process.wait(timeout=10) == 2
    assert "vllm: error: unrecognized arguments: --no-such-flag 3" in log_of(tmp_path)


def test_taken_port_and_missing_model(tmp_path: Path, model_dir: ModelDir, vllm_serve: Serve) -> None:
    port = free_port()
    vllm_serve(model_dir(), "--port", str(port))
    wait_until(served(port), 20, "/health")
    assert vllm_serve(model_dir(name="other"), "--port", str(port)).wait(timeout=10) == 1
    assert "OSError: [Errno 98] Address already in use" in log_of(tmp_path)
    assert vllm_serve(tmp_path / "nowhere", "--port", str(free_port())).wait(timeout=10) == 1
    assert "HFValidationError: Repo id must be" in log_of(tmp_path)


@pytest.mark.parametrize(
    ("where", "what", "status", "words"),
    [
        ("startup", "exit0", 0, "non-default args"),
        ("startup", "port", 1, "OSError: [Errno 98] Address already in use"),
        ("startup", "bad_model", 1, "does not appear to have a file named config.json"),
        ("startup", "shm_full", 1, "RuntimeError: Insufficient space in /dev/shm"),
        ("loading", "host_alloc", 1, "DefaultCPUAllocator: can't allocate memory"),
        ("loading", "sigkill_engine", 1, "Failed core proc(s): {'EngineCore': -9}"),
        ("loading", "sigkill_self", -9, "Starting to load model"),
        ("profile", "illegal_memory_access", 1, "an illegal memory access was encountered"),
        ("kv_cache", "sigkill_worker", 1, "RuntimeError: cancelled"),
        ("graph", "out_of_memory", 1, "torch.AcceleratorError: CUDA error: out of memory"),
        ("first_completion", "engine_exception", 0, "EngineCore encountered a fatal error."),
        ("first_completion", "segv", 0, "died unexpectedly"),
        ("first_completion", "sigkill_engine", 0, "engine core exited unexpectedly"),
        ("first_completion", "sigkill_group", -9, "Application startup complete."),
        ("after_seconds", "sigkill_worker", 0, "died unexpectedly"),
    ],
)
def test_fault(
    where: str, what: str, status: int, words: str, tmp_path: Path, model_dir: ModelDir, vllm_serve: Serve
) -> None:
    port, fault = free_port(), {"where": where, "what": what, "after_seconds": 0.2}
    process = vllm_serve(model_dir(fault=fault), "--port", str(port))
    if where == "first_completion":
        wait_until(served(port), 20, "/health")
        assert chat(port)[0] in (0, 500)
    assert process.wait(timeout=20) == status
    assert words in log_of(tmp_path)


def test_hung_completion_can_still_be_stopped(model_dir: ModelDir, vllm_serve: Serve) -> None:
    port = free_port()
    process = vllm_serve(model_dir(fault={"where": "first_completion", "what": "hang"}), "--port", str(port))
    wait_until(served(port), 20, "/health")
    assert chat(port, timeout_sec=1)[0] == 0
    assert http(f"http://127.0.0.1:{port}/health")[0] == 200  # a hung engine looks healthy
    process.terminate()
    assert process.wait(timeout=10) == 0
    assert not group_members(process.pid)


def test_tensor_parallel_workers_hold_a_device_each(gpus: Gpus, model_dir: ModelDir, vllm_serve: Serve) -> None:
    gpus.provide(count=3, total_bytes=24 * GIB)
    port, environment = free_port(), {"CUDA_VISIBLE_DEVICES": "2,0"}
    model = model_dir(weights_bytes=30 * GIB)
    process = vllm_serve(model, "--port", str(port), "-tp", "2", environment=environment)
    wait_until(served(port), 20, "/health")
    assert [len(gpus.holders(index)) for index in range(3)] == [1, 0, 1]
    names = {member.name() for member in group_members(process.pid)}
    assert {"VLLM::Worker_TP", "VLLM::Worker_TP0"} & names
    (holder,) = gpus.holders(2)
    os.kill(holder, signal.SIGKILL)
    assert process.wait(timeout=10) == 0
    assert not group_members(process.pid)


def test_module_form(gpus: Gpus, model_dir: ModelDir) -> None:
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    process = subprocess.Popen(
        [*command, "--model", str(model_dir()), "--port", str(port)],
        env=os.environ | gpus.environment | {"PYTHONPATH": str(VLLM_SITE)},
        start_new_session=True,
    )
    try:
        wait_until(served(port), 20, "/health")
    finally:
        process.terminate()
        assert process.wait(timeout=10) == 0


def test_completion_takes_real_host_memory(model_dir: ModelDir, vllm_serve: Serve) -> None:
    port = free_port()
    process = vllm_serve(model_dir(touch_bytes_on_completion=100 * MIB), "--port", str(port))
    wait_until(served(port), 20, "/health")
    (worker,) = (member for member in group_members(process.pid) if member.name().startswith("VLLM::Worker"))
    before = worker.memory_info().rss
    assert chat(port)[0] == 200
    assert worker.memory_info().rss - before > 90 * MIB


def test_fault_strikes_so_many_times(tmp_path: Path, model_dir: ModelDir, vllm_serve: Serve) -> None:
    model = model_dir(fault={"where": "loading", "what": "sigkill_worker", "times": 1})
    port = free_port()
    assert vllm_serve(model, "--port", str(port)).wait(timeout=10) == 1
    vllm_serve(model, "--port", str(port))
    wait_until(served(port), 20, "the second life to be healthy")


def test_completion_without_chat_template(model_dir: ModelDir, vllm_serve: Serve) -> None:
    port = free_port()
    vllm_serve(model_dir(chat_template=False), "--port", str(port))
    wait_until(served(port), 20, "/health")
    status, body = chat(port)
    assert status == 400
    assert "chat template" in body["error"]["message"]
    assert http(f"http://127.0.0.1:{port}/v1/completions", {"prompt": "Hallo", "max_tokens": 4})[0] == 200


def test_nvidias_binding_reads_the_stand_in(gpus: Gpus, tmp_path: Path) -> None:
    program = """
import json, pynvml
pynvml.nvmlInit()
device = pynvml.nvmlDeviceGetHandleByIndex(0)
memory = pynvml.nvmlDeviceGetMemoryInfo(device)
second = pynvml.nvmlDeviceGetMemoryInfo(device, version=pynvml.nvmlMemory_v2)
holders = pynvml.nvmlDeviceGetComputeRunningProcesses(device)
uuid = pynvml.nvmlDeviceGetUUID(device)
assert pynvml.nvmlDeviceGetIndex(pynvml.nvmlDeviceGetHandleByUUID(uuid)) == 0
assert pynvml.nvmlDeviceGetGraphicsRunningProcesses(device) == []
print(json.dumps([pynvml.nvmlDeviceGetCount(), pynvml.nvmlDeviceGetName(device), memory.total, memory.free,
                  second.free, [[holder.pid, holder.usedGpuMemory] for holder in holders]]))
"""

    def read() -> subprocess.CompletedProcess[str]:
        environment = os.environ | gpus.environment
        return subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=20
        )

    with gpus.neighbour(3 * GIB) as neighbour:
        count, name, total, free, second_free, holders = json.loads(read().stdout)
        assert (count, name, total) == (1, "NVIDIA H100 80GB HBM3", 80 * GIB)
        assert free == second_free == 77 * GIB
        assert holders == [[neighbour.pid, 3 * GIB]]
        neighbour.kill()
        wait_until(lambda: not alive(neighbour.pid), 5, "the neighbour's end")
        assert json.loads(read().stdout)[3:] == [80 * GIB, 80 * GIB, []]  # though nobody has reaped it yet
    gpus.set_error(15)
    assert "GPU is lost" in read().stderr


def test_supervisord_runs_it(supervisord: Supervisord, model_dir: ModelDir) -> None:
    port = free_port()
    supervisord.write_program("vllm", f"vllm serve {model_dir()} --port {port}", autorestart="false")
    supervisord.start()
    supervisord.wait_state("vllm", "RUNNING")
    wait_until(served(port), 20, "/health")
    assert "RUNNING" in supervisord.ctl("status", "vllm").stdout
    pid = supervisord.pid("vllm")
    os.kill(pid, signal.SIGKILL)
    supervisord.wait_state("vllm", "EXITED")
    assert len(group_members(pid)) == 2
    assert "Application startup complete." in supervisord.log_text("vllm")
    supervisord.stop()
    assert not group_members(pid)


@pytest.mark.parametrize(
    "options", [{"http": "inet", "password": "p%w"}, {"http": "unix", "password": "pw"}, {"http": None}]
)
def test_supervisord_with_other_doors(make_supervisord: Callable[..., Supervisord], options: dict[str, Any]) -> None:
    supervisord = make_supervisord(**options)
    supervisord.write_program("sleeper", "sleep 60")
    supervisord.start()
    if options["http"]:
        supervisord.wait_state("sleeper", "RUNNING")
    wait_until(lambda: "sleeper entered RUNNING" in supervisord.output(), 10, "the program to run")
    supervisord.stop()


def test_environment_of_children_is_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUPERVISOR_SERVER_URL", "unix:///nowhere")
    assert "SUPERVISOR_SERVER_URL" not in clean_environment()
    assert run_cli("--no-such-verb").returncode == 2
