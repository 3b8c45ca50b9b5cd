"""The promise, with a real supervisord, real processes and a stand-in vLLM that follows vLLM's memory equation.

Each test reads: vLLM dies of this → it is healthy again after so many launches, with these arguments, and the history
says why. The GPU is the stand-in `libnvidia-ml.so.1`, seen through the real NVML binding.
"""

from __future__ import annotations

import os
import signal

import psutil
import pytest
from standin.figures import GIB, MIB
from world import wait_until

GPU_BYTES = 24 * GIB


def override_command(host) -> str | None:
    path = host.override("vllm")
    if not path.exists():
        return None
    lines = [line for line in path.read_text().splitlines() if line.startswith("command")]
    return lines[0].partition("=")[2].strip() if lines else None


# -- memory, kind by kind --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "figures", "flags", "changed", "launches"),
    [
        # the KV cache is smaller than one request: down to vLLM's own estimate
        ("gpu_kv_small", {"weights_bytes": 16 * GIB, "kv_bytes_per_token": 512 * 1024}, "--max-model-len 32768", {"--max-model-len"}, 1),
        # nothing is left for the KV cache: utilisation goes UP
        ("gpu_kv_none", {"weights_bytes": 14 * GIB}, "--gpu-memory-utilization 0.55 --max-model-len 4096", {"--gpu-memory-utilization"}, 2),
        ("gpu_profile", {"weights_bytes": 14 * GIB, "activation_bytes_per_token": MIB}, "--max-num-batched-tokens 16384 --max-model-len 2048", {"--max-num-batched-tokens"}, 2),
        ("gpu_warmup", {"weights_bytes": 14 * GIB, "sampler_bytes_per_seq": 10 * MIB}, "--max-num-seqs 1024 --max-num-batched-tokens 2048 --max-model-len 2048", {"--max-num-seqs"}, 2),
        ("gpu_graph", {"weights_bytes": 14 * GIB, "graph_bytes": 3 * GIB, "graph_estimate_bytes": 0}, "--gpu-memory-utilization 0.95 --max-model-len 2048", {"--gpu-memory-utilization"}, 1),
        ("gpu_runtime", {"weights_bytes": 14 * GIB, "runtime_peak_bytes": 3 * GIB}, "--gpu-memory-utilization 0.92 --max-model-len 2048", {"--gpu-memory-utilization"}, 1),
    ],
)  # fmt: skip
def test_vllm_dies_of_gpu_memory_and_comes_back(vllm_host, kind, figures, flags, changed, launches):
    host = vllm_host(figures=figures, flags=flags, gpu_bytes=GPU_BYTES)
    host.start()
    status = host.wait_state("HEALTHY")
    assert status["verdict"]["kind"] == kind
    assert status["verdict"]["oom"] is True
    assert {change["flag"] for change in status["changes"]} == changed
    incidents = host.history()
    assert [row["verdict"]["kind"] for row in incidents][0] == kind
    assert incidents[-1]["outcome"] == "healthy"
    assert len(incidents) <= launches
    assert incidents[-1]["seconds_to_healthy"] > 0
    assert host.user_file_is_untouched()
    assert host.complete("你好")


def test_weights_that_do_not_fit_are_held_with_the_arithmetic(vllm_host):
    host = vllm_host(figures={"weights_bytes": 30 * GIB}, gpu_bytes=GPU_BYTES)
    host.start()
    status = host.wait_state("HELD")
    assert status["verdict"]["kind"] == "gpu_weights"
    assert "GiB" in status["reason"]
    assert host.history()[0]["launches"] == 0
    assert override_command(host) is None
