"""A real kernel OOM kill in a real memory cgroup (version 1), and a stranger's, which doesn't count."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from host import Host
from standin.figures import MIB
from world import MEMORY_CGROUPS, chat, memory_cgroup

from supervisor_vllm.classify import classify
from supervisor_vllm.evidence import life, processes
from supervisor_vllm.evidence.roots import ROOTS
from supervisor_vllm.incident import ProcessRef

MakeHost = Callable[..., Host]

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(not (MEMORY_CGROUPS / "memory.limit_in_bytes").exists(), reason="no memory cgroup of version 1"),
]


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


#: Takes 256 MiB in the cgroup whose cgroup.procs it is given, under the name that it is given.
EATER = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(15, sys.argv[2].encode(), 0, 0, 0); "
    "open(sys.argv[1], 'w').write(str(os.getpid())); bytearray(256 * 2**20)"
)


def eat(group: Path, name: str) -> subprocess.Popen[bytes]:
    """A process that the kernel kills for the cgroup's limit."""
    eater = subprocess.Popen([sys.executable, "-c", EATER, str(group / "cgroup.procs"), name])
    assert eater.wait(timeout=60) == -signal.SIGKILL
    return eater


@pytest.mark.slow
@pytest.mark.parametrize("who", ["VLLM::EngineCor", "leader"])
def test_any_process_of_the_tree(who: str, vllm_host: MakeHost) -> None:
    """Another process fills the cgroup, the kernel chooses ours first."""
    host = vllm_host().start()
    host.wait_state("HEALTHY")
    pid = host.pid if who == "leader" else host.processes_of(who)[0]
    Path(f"/proc/{pid}/oom_score_adj").write_text("1000")
    with memory_cgroup("tree", 32 * MIB) as group:
        (group / "cgroup.procs").write_text(str(pid))
        eat(group, "python3")
        host.wait_healthy_again()
    verdict = host.history()[0]["verdict"]
    assert (verdict["kind"], verdict["confidence"]) == ("host_oom_kill", "proven")
    assert any(item["source"] == "kernel-log" and str(pid) in item["text"] for item in verdict["evidence"])


def test_an_older_kill_of_a_pid_that_was_used_again() -> None:
    begun = processes.boot_seconds_now()
    with memory_cgroup("again", 32 * MIB) as group:
        pid = eat(group, "VLLM::Worker").pid

    def kind(boot_seconds: float) -> str:
        """Of a life with that pid that began then."""
        leader = ProcessRef(pid, time.time())
        born = life.Life(leader=leader, tree=(leader,), log_marks=(), boot_seconds=boot_seconds)
        incident = life.gather(
            born,
            ROOTS,
            program="vllm",
            time="2026-05-01T12:00:00+00:00",
            command="vllm serve /m",
            exit_status=None,
            signal="SIGKILL",
            stop_requested=False,
        )
        return classify(incident).kind

    assert kind(begun) == "host_oom_kill"
    assert kind(processes.boot_seconds_now()) == "killed"


def test_a_strangers_kill_is_not_ours(vllm_host: MakeHost) -> None:
    """Another process of the same name is killed by the kernel while our worker is killed by hand."""
    host = vllm_host().start()
    host.wait_state("HEALTHY")
    (worker,) = host.processes_of("VLLM::Worker")
    with memory_cgroup("stranger", 32 * MIB) as group:
        eat(group, "VLLM::Worker")
        os.kill(worker, signal.SIGKILL)
        host.wait_healthy_again()
    assert host.history()[0]["verdict"]["kind"] == "killed"
