"""Processes told apart by pid and start time."""

from __future__ import annotations

import dataclasses
import os
import select
import subprocess

from world import wait_until

from supervisor_vllm.evidence.processes import alive, open_pidfd, process_ref


def test_a_zombie_is_not_alive_and_its_pidfd_says_so() -> None:
    with subprocess.Popen(["sleep", "100"]) as process:
        ref = process_ref(process.pid)
        pidfd = open_pidfd(process.pid)
        assert ref and alive(ref)
        assert not alive(dataclasses.replace(ref, start_time=ref.start_time - 10))
        process.kill()
        if pidfd is not None:
            assert select.select([pidfd], [], [], 10)[0]
            os.close(pidfd)
        wait_until(lambda: not alive(ref), 10, "the zombie to count as dead")  # nobody has waited for it yet
    assert process_ref(process.pid) is None
