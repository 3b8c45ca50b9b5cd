"""Fixtures of the tests' world (world.py). Nothing is started that is not ended here."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from host import Host
from world import Gpus, Supervisord, compile_nvml, kill_group, run_cli, write_vllm_program
from world import model_dir as make_model_dir

REAL_VLLM_VARIABLE = "SUPERVISOR_VLLM_TEST_PYTHON"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    real_vllm = os.environ.get(REAL_VLLM_VARIABLE)
    no_vllm = pytest.mark.skip(reason=f"{REAL_VLLM_VARIABLE} names no interpreter that has vLLM")
    no_root = pytest.mark.skip(reason="needs root")
    for item in items:
        if "vllm" in item.keywords and item.get_closest_marker("vllm") and not real_vllm:
            item.add_marker(no_vllm)
        if item.get_closest_marker("root") and os.geteuid() != 0:
            item.add_marker(no_root)


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    """The interpreter that has real vLLM; for tests marked `vllm`."""
    return Path(os.environ[REAL_VLLM_VARIABLE])


@pytest.fixture(scope="session")
def nvml_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the stand-in libnvidia-ml.so.1, for LD_LIBRARY_PATH."""
    if not (shutil.which("gcc") or shutil.which("cc")):
        pytest.skip("no C compiler (gcc) to build the stand-in NVML library with")
    directory = tmp_path_factory.mktemp("nvml")
    try:
        compile_nvml(directory)
    except subprocess.CalledProcessError as failure:
        pytest.fail(f"the stand-in NVML library doesn't compile:\n{failure.stderr}")
    return directory


@pytest.fixture(scope="session")
def vllm_bin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bin directory with the stand-in `vllm`."""
    return write_vllm_program(tmp_path_factory.mktemp("bin") / "vllm").parent


@pytest.fixture
def gpus(tmp_path: Path, nvml_library: Path) -> Gpus:
    """One stand-in GPU of 80 GiB; `gpus.provide(count=…, total_bytes=…)` makes it others."""
    return Gpus(tmp_path / "gpus", nvml_library)


@pytest.fixture
def world_environment(gpus: Gpus, vllm_bin: Path) -> dict[str, str]:
    """What a child needs to see the stand-ins: PATH, LD_LIBRARY_PATH, the GPU directory."""
    return gpus.environment | {"PATH": f"{vllm_bin}{os.pathsep}{os.environ['PATH']}"}


@pytest.fixture
def make_supervisord(tmp_path: Path, world_environment: dict[str, str]) -> Iterator[Callable[..., Supervisord]]:
    """make_supervisord(http="unix" | "inet" | None, password=…, environment=…, main_sections=…), not started yet."""
    made: list[Supervisord] = []

    def make(*, environment: dict[str, str] | None = None, **options: Any) -> Supervisord:
        directory = tmp_path / f"supervisor{len(made) or ''}"
        made.append(Supervisord(directory, environment=world_environment | (environment or {}), **options))
        return made[-1]

    yield make
    for supervisord in made:
        supervisord.stop()


@pytest.fixture
def supervisord(make_supervisord: Callable[..., Supervisord]) -> Supervisord:
    """A supervisord with a unix socket, not started yet: write programs, then `.start()`."""
    return make_supervisord()


@pytest.fixture
def model_dir(tmp_path: Path) -> Callable[..., Path]:
    """model_dir(name="model", chat_template=True, weights_bytes=…, fault={…}, …)"""
    return lambda **figures: make_model_dir(tmp_path / "models", **figures)


@pytest.fixture
def cli(world_environment: dict[str, str]) -> Callable[..., subprocess.CompletedProcess[str]]:
    """cli("status", "--json", …): `python -m supervisor_vllm` with the stand-in GPUs in sight."""

    def run(
        *arguments: str, environment: dict[str, str] | None = None, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        return run_cli(*arguments, environment=world_environment | (environment or {}), **options)

    return run


@pytest.fixture
def vllm_serve(
    tmp_path: Path, vllm_bin: Path, world_environment: dict[str, str]
) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """vllm_serve(model, "--port", "8000", …): the stand-in without supervisord, logging to tmp_path/vllm.log."""
    started: list[subprocess.Popen[bytes]] = []

    def serve(model: Path, *arguments: str, environment: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
        with (tmp_path / "vllm.log").open("ab") as log:
            process = subprocess.Popen(
                [str(vllm_bin / "vllm"), "serve", str(model), *arguments],
                env=os.environ | world_environment | (environment or {}),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        started.append(process)
        return process

    yield serve
    for process in started:
        kill_group(process.pid)
        process.wait(timeout=10)


@pytest.fixture
def vllm_host(
    make_supervisord: Callable[..., Supervisord], gpus: Gpus, vllm_bin: Path, model_dir: Callable[..., Path]
) -> Callable[..., Host]:
    """vllm_host(figures={…}, flags="…", gpu_bytes=…, supervisord={…}, **program options): see host.Host."""

    def make(
        *,
        figures: dict[str, Any] | None = None,
        flags: str = "",
        gpu_bytes: int | None = None,
        supervisord: dict[str, Any] | None = None,
        **options: Any,
    ) -> Host:
        if gpu_bytes is not None:
            gpus.provide(total_bytes=gpu_bytes)
        model = model_dir(**(figures or {}))
        return Host(make_supervisord(**(supervisord or {})), gpus, vllm_bin, model, flags=flags, **options)

    return make
