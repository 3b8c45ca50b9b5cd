"""Where the log comes from: rotated in the middle of a message, in two files, not readable, with old deaths in it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from host import Host
from standin.figures import GIB
from world import chat

MakeHost = Callable[..., Host]
TIGHT = {"weights_bytes": 16 * GIB, "kv_bytes_per_token": 512 * 1024}


def test_a_log_that_is_rotated_in_the_middle_of_the_message(vllm_host: MakeHost) -> None:
    """supervisord cuts by size, wherever that is: here every 700 bytes."""
    host = vllm_host(
        figures=TIGHT,
        flags="--max-model-len 32768",
        gpu_bytes=24 * GIB,
        stdout_logfile_maxbytes=700,
        stdout_logfile_backups=50,
    ).start()
    status = host.wait_state("HEALTHY")
    assert len(list(host.supervisord.log_dir.glob("vllm.log*"))) > 10
    (incident,) = host.history()
    assert incident["verdict"]["kind"] == "gpu_kv_small"
    assert status["changes"][0]["to"] == str(incident["verdict"]["numbers"]["estimated_max_model_len"])


def test_tracebacks_in_another_file(vllm_host: MakeHost) -> None:
    host = vllm_host(
        figures={"fault": {"where": "first_completion", "what": "illegal_memory_access", "times": 1}},
        redirect_stderr="false",
    ).start()
    host.wait_healthy_again()
    assert host.history()[0]["verdict"]["kind"] == "engine_crash"


def test_no_log_file_at_all(vllm_host: MakeHost) -> None:
    """Its output is kept from supervisord's events, and says what happened."""
    fault = {"where": "loading", "what": "engine_exception", "times": 1}
    host = vllm_host(figures={"fault": fault}, stdout_logfile="NONE")
    assert "no log that can be read" in host.install().stdout
    host.supervisord.start()
    status = host.wait_healthy_again()
    assert status["changes"] == []
    assert host.history()[0]["verdict"]["kind"] == "engine_crash"


def test_the_death_before_does_not_explain_this_one(vllm_host: MakeHost) -> None:
    host = vllm_host(figures=TIGHT, flags="--max-model-len 32768", gpu_bytes=24 * GIB).start()
    host.wait_state("HEALTHY")
    os.kill(host.pid, signal.SIGKILL)
    host.wait_healthy_again(2)
    first, second = host.history()
    assert (first["verdict"]["kind"], second["verdict"]["kind"]) == ("gpu_kv_small", "killed")
    assert second["plan"]["changes"] == []


def test_an_automatic_log_file(vllm_host: MakeHost) -> None:
    """AUTO: supervisord gives the program a new file each time its group is added."""
    host = vllm_host(figures=TIGHT, flags="--max-model-len 32768", gpu_bytes=24 * GIB, stdout_logfile="AUTO").start()
    status = host.wait_state("HEALTHY")
    assert status["served"]["weights"]["shards_total"]
    assert host.history()[0]["verdict"]["kind"] == "gpu_kv_small"


def test_a_prompt_about_memory_decides_nothing(vllm_host: MakeHost) -> None:
    host = vllm_host().start()
    host.wait_state("HEALTHY")
    chat(host.port, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB")
    os.kill(host.pid, signal.SIGKILL)
    host.wait_healthy_again()
    assert host.history()[0]["verdict"]["kind"] == "killed"
