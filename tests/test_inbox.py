"""Waiting for an event, a death, or the time."""

import os
import subprocess
import threading

import pytest

from supervisor_vllm.inbox import PID_DIED, Event, Inbox


def test_events_come_in_order():
    inbox = Inbox()
    inbox.put(Event("STARTING"))
    inbox.put(Event("RUNNING", pid=5))
    assert [inbox.take(1).name, inbox.take(1).name] == ["STARTING", "RUNNING"]
    assert inbox.take(0) is None


def test_a_put_wakes_the_waiting_thread():
    inbox = Inbox()
    taken = []
    thread = threading.Thread(target=lambda: taken.append(inbox.take(30)))
    thread.start()
    inbox.put(Event("EXITED"))
    thread.join(10)
    assert taken == [Event("EXITED")]


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="no pidfd")
def test_a_death_is_seen_at_once():
    process = subprocess.Popen(["sleep", "60"])
    pidfd = os.pidfd_open(process.pid)
    try:
        inbox = Inbox()
        assert inbox.take(0, pidfd=pidfd) is None
        process.kill()
        assert inbox.take(10, pidfd=pidfd) == Event(PID_DIED)
    finally:
        process.kill()
        process.wait()
        os.close(pidfd)


def test_a_flood_does_not_block():
    inbox = Inbox()
    for number in range(100_000):
        inbox.put(Event("TICK", pid=number))
    assert all(inbox.take(0).pid == number for number in range(100_000))
