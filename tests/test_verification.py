"""HEALTHY means: what was launched answers. Each way to serve is found from the launch command."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from host import Host

MakeHost = Callable[..., Host]


def test_the_weights_are_proven_from_the_log(vllm_host: MakeHost) -> None:
    host = vllm_host(flags="--max-model-len 4096").start()
    status = host.wait_state("HEALTHY")
    served = status["served"]
    assert served["model"] == served["root"] == str(host.model)
    assert served["max_model_len"] == 4096
    weights = served["weights"]
    assert weights["directory"] == str(host.model)
    assert weights["shards_loaded"] == weights["shards_total"] == 1
    assert weights["seconds"] > 0
    assert "1/1 weight files loaded" in status["reason"]


@pytest.mark.parametrize(
    "flags",
    [
        "--served-model-name small tiny",
        "--api-key one two",
        "--root-path /vllm",
        "--max-model-len 4k",
    ],
)
def test_ways_to_serve(vllm_host: MakeHost, flags: str) -> None:
    host = vllm_host(flags=flags).start()
    host.wait_state("HEALTHY")
    assert host.spawns() == 1


def test_a_unix_socket(vllm_host: MakeHost, tmp_path_factory: pytest.TempPathFactory) -> None:
    socket = tmp_path_factory.mktemp("u") / "s"
    host = vllm_host(flags=f"--uds {socket}").start()
    host.wait_state("HEALTHY")


def test_a_model_without_a_chat_template(vllm_host: MakeHost) -> None:
    host = vllm_host(figures={"chat_template": False}).start()
    host.wait_state("HEALTHY")
    assert "POST /v1/completions" in host.supervisord.log_text("vllm")


def test_behind_a_shell_and_a_relative_path(vllm_host: MakeHost) -> None:
    host = vllm_host()
    command = f"bash -c 'cd {host.model.parent} && exec vllm serve {host.model.name} --port {host.port} 2>&1'"
    host.user_file = host.supervisord.write_program("vllm", command, directory=host.model.parent)
    host.start()
    host.wait_state("HEALTHY")
