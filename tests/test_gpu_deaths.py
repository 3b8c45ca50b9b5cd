"""End to end: the devices are those of the environment that the program really gets, and what can't be read is said."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from host import Host
from world import GIB, free_port

from supervisor_vllm.supervisord_conf import ProgramSection
from supervisor_vllm.target import effective_environment

MakeHost = Callable[..., Host]


def section(**options: str) -> ProgramSection:
    return ProgramSection("gpu3", "vllm serve m", Path("/x.conf"), options, "gpu3", ("gpu3:gpu3",), ())


@pytest.mark.parametrize(
    ("options", "command", "devices"),
    [
        ({}, "vllm serve m", "0,1"),
        ({"environment": 'CUDA_VISIBLE_DEVICES="2,3"'}, "vllm serve m", "2,3"),
        ({"environment": 'CUDA_VISIBLE_DEVICES="2,3"'}, "env CUDA_VISIBLE_DEVICES=1 vllm serve m", "1"),
        ({}, "sh -c 'export CUDA_VISIBLE_DEVICES=3; exec vllm serve m'", "3"),
        ({}, "sh -c 'CUDA_VISIBLE_DEVICES=$SECOND exec vllm serve m'", "1"),
        ({"environment": "SECOND=5"}, "bash -c 'CUDA_VISIBLE_DEVICES=${SECOND} vllm serve m'", "5"),
        ({"environment": "CUDA_VISIBLE_DEVICES=%(ENV_SECOND)s"}, "vllm serve m", "1"),
        ({}, "env CUDA_VISIBLE_DEVICES=%(ENV_SECOND)s vllm serve m", "1"),
        ({"environment": "CUDA_VISIBLE_DEVICES=%(process_num)d", "numprocs_start": "3"}, "vllm serve m", "3"),
        ({"environment": 'CUDA_VISIBLE_DEVICES="%(nobody_knows)s"'}, "vllm serve m", "%(nobody_knows)s"),
        ({}, "env CUDA_VISIBLE_DEVICES= vllm serve m", ""),
    ],
)
def test_what_the_program_finds_around_it(
    options: dict[str, str], command: str, devices: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setenv("SECOND", "1")
    environment = effective_environment(section(**options), command)
    assert environment["CUDA_VISIBLE_DEVICES"] == devices


def test_the_device_that_the_command_chooses(
    vllm_host: MakeHost, vllm_bin: Path, model_dir: Callable[..., Path]
) -> None:
    """GPU 0 is free all the time; the program's is GPU 1."""
    command = f"env CUDA_VISIBLE_DEVICES=1 {vllm_bin}/vllm serve {model_dir()} --host 127.0.0.1 --port {free_port()}"
    host = vllm_host(gpu_bytes=24 * GIB, command=command)
    host.gpus.provide(count=2, total_bytes=24 * GIB)
    with host.gpus.neighbour(20 * GIB, index=1) as neighbour:
        host.start(memory_release_timeout_sec="60")
        status = host.wait(lambda status: "waiting for memory" in status["reason"], "a wait for memory")
        numbers = status["verdict"]["numbers"]
        assert numbers["gpu_index"] == 1
        assert [(holder["pid"], holder["owner"]) for holder in numbers["holders"]] == [(neighbour.pid, "neighbour")]
        assert " on GPU 1 (device 0 of those it sees), " in status["verdict"]["summary"]
        assert "waiting for memory: GPU 1: " in status["reason"]


def test_a_driver_that_is_gone_is_named(vllm_host: MakeHost) -> None:
    host = vllm_host(gpu_bytes=24 * GIB)
    host.gpus.set_error(18)
    with host.gpus.neighbour(10 * GIB):
        host.start(memory_release_timeout_sec="60")
        status = host.wait(lambda status: "can't be measured" in status["reason"], "a wait for what isn't measured")
        why = "NVML: RM has detected an NVML/RM version mismatch."
        assert f"the device's free memory can't be measured here: {why}" in status["reason"]
        assert {"source": "gpu", "text": why}.items() <= status["verdict"]["evidence"][-1].items()
