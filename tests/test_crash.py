"""The listener is killed with SIGKILL before and after each write of its journal, in the middle of a recovery.
A recovery of one death writes about 15 times; each write has a before and an after.

Whatever the point: supervisord starts it again, the recovery goes on, each launch is counted once, and the end is the
same as without a crash.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from host import Host
from standin.figures import GIB
from world import REPOSITORY, wait_until

MakeHost = Callable[..., Host]

CRASH = Path(__file__).resolve().parent / "crash"


def crashing_host(vllm_host: MakeHost, tmp_path: Path, point: int, **world: object) -> Host:
    environment = {
        "CRASH_AT": str(point),
        "CRASH_FILE": str(tmp_path / "writes"),
        "PYTHONPATH": f"{CRASH}:{REPOSITORY}",
    }
    return vllm_host(supervisord={"environment": environment}, **world)


def points(last: int, step: int) -> list[object]:
    """Each `step`-th point in the fast suite, all of them in the whole one."""
    slow = pytest.mark.slow
    return [point if point % step == 1 else pytest.param(point, marks=slow) for point in range(1, last + 1)]


@pytest.mark.parametrize("point", points(32, 4))
def test_an_adjusted_launch(vllm_host: MakeHost, tmp_path: Path, point: int) -> None:
    host = crashing_host(
        vllm_host, tmp_path, point,
        figures={"weights_bytes": 16 * GIB, "kv_bytes_per_token": 512 * 1024},
        flags="--max-model-len 32768",
        gpu_bytes=24 * GIB,
    ).start()  # fmt: skip
    status = host.wait_state("HEALTHY")
    assert [change["flag"] for change in status["changes"]] == ["--max-model-len"]
    (incident,) = host.history()
    assert (incident["outcome"], incident["launches"]) == ("healthy", 1)
    assert status["launches_left"] == 2
    assert host.spawns() == 2
    assert status["pid"] == host.pid

    def struck_once() -> bool:
        struck = (tmp_path / "writes").stat().st_size >= point  # perhaps only after it is healthy
        return host.listener_starts() == (2 if struck else 1)

    wait_until(struck_once, 20, "the listener to be started again")


@pytest.mark.parametrize("point", points(24, 8))
def test_a_hold(vllm_host: MakeHost, tmp_path: Path, point: int) -> None:
    host = crashing_host(vllm_host, tmp_path, point, figures={"weights_bytes": 30 * GIB}, gpu_bytes=24 * GIB).start()
    status = host.wait_state("HELD")
    assert status["verdict"]["kind"] == "gpu_weights"
    assert host.spawns() == 1
    assert [(row["outcome"], row["launches"]) for row in host.history()] == [("held", 0)]


@pytest.mark.parametrize("point", points(32, 8))
def test_an_unchanged_launch_after_orphans(vllm_host: MakeHost, tmp_path: Path, point: int) -> None:
    fault = {"where": "first_completion", "what": "sigkill_self", "times": 1}
    host = crashing_host(vllm_host, tmp_path, point, figures={"fault": fault}).start()
    status = host.wait_state("HEALTHY")
    (incident,) = host.history()
    assert (incident["outcome"], incident["launches"]) == ("healthy", 1)
    assert status["changes"] == []
    assert host.spawns() == 2
