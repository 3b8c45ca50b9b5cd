"""Only what is proven ours is ended; what ignores SIGTERM is killed."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from supervisor_vllm.cleanup import end_processes
from supervisor_vllm.evidence.processes import alive, process_ref, process_tree

READY = "print('ready', flush=True); time.sleep(100)"
PLAIN = f"import time; {READY}"
DEAF = f"import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); {READY}"
Start = Callable[[str], "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[subprocess.Popen[str]] = []

    def run(code: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        started.append(process)
        assert process.stdout and process.stdout.readline() == "ready\n"
        return process

    yield run
    for process in started:
        process.kill()
        process.wait(timeout=10)
        if process.stdout:
            process.stdout.close()


def test_ends_the_tree_and_leaves_the_look_alike(start: Start) -> None:
    ours, look_alike = start(PLAIN), start(PLAIN)
    leader = process_ref(ours.pid)
    other = process_ref(look_alike.pid)
    assert leader and other
    result = end_processes(process_tree(leader))
    assert result.survivors == () and not alive(leader)
    assert alive(other)


def test_what_ignores_term_is_killed(start: Start) -> None:
    ref = process_ref(start(DEAF).pid)
    assert ref
    assert end_processes((ref,), term_wait_sec=0.2).ended == (ref,)
    assert not alive(ref)


def test_a_pid_with_another_start_time_is_never_signalled(start: Start) -> None:
    ref = process_ref(start(PLAIN).pid)
    assert ref
    end_processes((dataclasses.replace(ref, start_time=ref.start_time - 60),), term_wait_sec=0.2)
    assert alive(ref)


def test_the_group_is_found_after_its_leader_died(start: Start) -> None:
    code = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', %r]).wait()" % PLAIN  # noqa: UP031
    leader_process = start(code)
    leader = process_ref(leader_process.pid)
    assert leader
    leader_process.kill()
    leader_process.wait(timeout=10)
    (orphan,) = process_tree(leader)
    assert orphan.pid != leader.pid
    assert end_processes((orphan,)).survivors == ()
    assert process_tree(leader) == () and not alive(orphan)


def test_a_zombie_whose_parent_does_not_look_is_not_waited_for(start: Start) -> None:
    code = f"import subprocess, sys; subprocess.Popen(['sleep', '100']); {PLAIN}"
    parent = process_ref(start(code).pid)
    assert parent
    (child,) = (ref for ref in process_tree(parent) if ref.pid != parent.pid)
    began = time.monotonic()
    assert end_processes((child,)).ended == (child,)
    assert time.monotonic() - began < 3
    assert alive(parent)
