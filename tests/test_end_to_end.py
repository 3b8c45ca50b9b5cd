"""The promise, with a real supervisord, real processes and a stand-in vLLM that follows vLLM's memory equation.

Each test reads: vLLM dies of this → it is healthy again after so many launches, with these arguments, and the history
says why. The GPU is the stand-in `libnvidia-ml.so.1`, seen through the real NVML binding.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from host import Host
from standin.figures import GIB, MIB

MakeHost = Callable[..., Host]

GPU_BYTES = 24 * GIB


# -- memory, kind by kind ----------------------------------------------------------------------------------------------


#: kind → the hidden figures of the model, the user's flags, the flag that must move, deaths until it fits (at most)
MEMORY_DEATHS = {
    # smaller than one request: down to vLLM's own estimate
    "gpu_kv_small": (
        {"weights_bytes": 16 * GIB, "kv_bytes_per_token": 512 * 1024},
        "--max-model-len 32768",
        "--max-model-len",
        1,
    ),
    # nothing left for the KV cache: utilisation goes UP
    "gpu_kv_none": (
        {"weights_bytes": 14 * GIB},
        "--gpu-memory-utilization 0.55 --max-model-len 4096",
        "--gpu-memory-utilization",
        1,
    ),
    "gpu_profile": (
        {"weights_bytes": 14 * GIB, "activation_bytes_per_token": MIB},
        "--max-num-batched-tokens 16384 --max-model-len 2048",
        "--max-num-batched-tokens",
        2,
    ),
    "gpu_warmup": (
        {"weights_bytes": 14 * GIB, "sampler_bytes_per_seq": 11 * MIB},
        "--max-num-seqs 1024 --max-num-batched-tokens 2048 --max-model-len 2048",
        "--max-num-seqs",
        2,
    ),
    "gpu_graph": (
        {"weights_bytes": 14 * GIB, "graph_bytes": 3 * GIB, "graph_estimate_bytes": 0},
        "--gpu-memory-utilization 0.95 --max-model-len 2048",
        "--gpu-memory-utilization",
        2,
    ),
    "gpu_runtime": (
        {"weights_bytes": 14 * GIB, "runtime_peak_bytes": 3 * GIB},
        "--gpu-memory-utilization 0.92 --max-model-len 2048",
        "--gpu-memory-utilization",
        2,
    ),
}


@pytest.mark.parametrize("kind", MEMORY_DEATHS)
def test_vllm_dies_of_gpu_memory_and_comes_back(vllm_host: MakeHost, kind: str) -> None:
    figures, flags, moved, deaths = MEMORY_DEATHS[kind]
    host = vllm_host(figures=figures, flags=flags, gpu_bytes=GPU_BYTES).start()
    status = host.wait_state("HEALTHY")
    incidents = host.history()
    assert incidents[0]["verdict"]["kind"] == kind
    assert incidents[0]["verdict"]["oom"] is True
    assert incidents[0]["plan"]["changes"][0]["flag"] == moved
    assert [row["outcome"] for row in incidents] == ["died again"] * (len(incidents) - 1) + ["healthy"]
    assert len(incidents) <= deaths
    assert incidents[-1]["seconds_to_healthy"] > 0
    assert moved in [change["flag"] for change in status["changes"]]
    assert status["launches_left"] == 3 - len(incidents)
    assert host.user_file_is_untouched()
    assert host.complete()


def test_weights_that_do_not_fit_are_held_with_the_arithmetic(vllm_host: MakeHost) -> None:
    host = vllm_host(figures={"weights_bytes": 30 * GIB}, gpu_bytes=GPU_BYTES)
    host.start()
    status = host.wait_state("HELD")
    assert status["verdict"]["kind"] == "gpu_weights"
    assert "GiB" in status["reason"]
    assert host.history()[0]["launches"] == 0
    assert host.override_command() is None


def test_the_drivers_own_words_without_a_phase(vllm_host: MakeHost) -> None:
    fault = {"where": "startup", "what": "out_of_memory", "times": 1}
    host = vllm_host(figures={"weights_bytes": 8 * GIB, "fault": fault}, gpu_bytes=GPU_BYTES).start()
    status = host.wait_state("HEALTHY")
    (incident,) = host.history()
    assert incident["verdict"]["kind"] == "gpu_oom"
    assert [(change["flag"], change["to"]) for change in status["changes"]] == [("--gpu-memory-utilization", "0.87")]
