"""A real kernel OOM kill in a real memory cgroup (version 1), and a stranger's, which doesn't count."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from host import Host
from standin.figures import MIB
from world import chat, wait_until

MakeHost = Callable[..., Host]

MEMORY = Path("/sys/fs/cgroup/memory")
pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(not (MEMORY / "memory.limit_in_bytes").exists(), reason="no memory cgroup of version 1"),
]


@contextlib.contextmanager
def memory_cgroup(name: str, limit_bytes: int) -> Iterator[Path]:
    group = MEMORY / f"supervisor-vllm-test-{os.getpid()}-{name}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(limit_bytes))
        yield group
    finally:
        wait_until(lambda: _removed(group), 20, f"{group} to be empty")


def _removed(group: Path) -> bool:
    with contextlib.suppress(OSError):
        group.rmdir()
    return not group.exists()


def test_the_worker_is_killed_by_the_kernel_while_it_serves(vllm_host: MakeHost) -> None:
    host = vllm_host(figures={"touch_bytes_on_completion": 64 * MIB}).start()
    host.wait_state("HEALTHY")
    (worker,) = host.processes_of("VLLM::Worker")
    with memory_cgroup("worker", 16 * MIB) as group:
        (group / "cgroup.procs").write_text(str(worker))
        chat(host.port)
        host.wait_healthy_again()
    incident = host.history()[-1]
    assert incident["verdict"]["kind"] == "host_oom_kill"
    assert incident["verdict"]["confidence"] == "proven"
    assert any(
        item["source"] == "kernel-log" and str(worker) in item["text"] for item in incident["verdict"]["evidence"]
    )
    assert incident["plan"]["changes"] == []
    assert incident["outcome"] == "healthy"
    assert "exit status 0" in host.supervisord.output()


def test_a_strangers_kill_is_not_ours(vllm_host: MakeHost) -> None:
    """Another process of the same name is killed by the kernel while our worker is killed by hand."""
    host = vllm_host().start()
    host.wait_state("HEALTHY")
    (worker,) = host.processes_of("VLLM::Worker")
    eater = (
        "import ctypes, os, sys; ctypes.CDLL(None).prctl(15, b'VLLM::Worker', 0, 0, 0); "
        "open(sys.argv[1], 'w').write(str(os.getpid())); bytearray(256 * 2**20)"
    )
    with memory_cgroup("stranger", 32 * MIB) as group:
        stranger = subprocess.run([sys.executable, "-c", eater, str(group / "cgroup.procs")], timeout=60, check=False)
        assert stranger.returncode == -signal.SIGKILL
        os.kill(worker, signal.SIGKILL)
        host.wait_healthy_again()
    assert host.history()[0]["verdict"]["kind"] == "killed"
