"""Deaths that are not about device memory, each with the restart (or the hold) that it deserves."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from host import Host
from standin.figures import GIB
from world import alive, group_members

MakeHost = Callable[..., Host]


def kill(pid: int, name: str = "SIGKILL") -> None:
    os.kill(pid, getattr(signal, name))


@pytest.mark.parametrize("victim", ["VLLM::Worker", "VLLM::EngineCor"])
def test_a_killed_engine_process_ends_in_exit_0_and_is_a_death(vllm_host: MakeHost, victim: str) -> None:
    host = vllm_host().start()
    host.wait_state("HEALTHY")
    kill(host.processes_of(victim)[0])
    host.wait_healthy_again()
    (incident,) = host.history()
    assert incident["verdict"]["kind"] == "killed"
    assert incident["verdict"]["oom"] is False
    assert incident["plan"]["action"] == "retry"
    assert "exit status 0" in host.supervisord.output()
    assert host.override_command() is None


def test_orphans_of_a_killed_api_server_are_ended_before_the_restart(vllm_host: MakeHost) -> None:
    host = vllm_host(gpu_bytes=24 * GIB, figures={"weights_bytes": 16 * GIB}).start()
    host.wait_state("HEALTHY")
    group = host.pid
    left = [process.pid for process in group_members(group) if process.pid != group]
    assert len(left) == 2
    kill(group)
    host.wait_healthy_again()
    assert not any(alive(pid) for pid in left)
    (incident,) = host.history()
    assert incident["verdict"]["kind"] == "killed"
    assert incident["outcome"] == "healthy"
    assert incident["launches"] == 1


def test_a_neighbours_process_is_never_touched(vllm_host: MakeHost) -> None:
    """Same name, same GPU, another group."""
    host = vllm_host(gpu_bytes=80 * GIB).start()
    host.wait_state("HEALTHY")
    lookalike = subprocess.Popen(["bash", "-c", "exec -a VLLM::Worker sleep 300"], start_new_session=True)
    try:
        host.gpus.devices[0].hold(lookalike.pid, 2 * GIB)
        kill(host.pid)
        host.wait_healthy_again()
        assert lookalike.poll() is None
    finally:
        lookalike.kill()
        lookalike.wait()


def test_a_neighbour_that_leaves_costs_nothing(vllm_host: MakeHost) -> None:
    host = vllm_host(gpu_bytes=24 * GIB)
    with host.gpus.neighbour(10 * GIB) as neighbour:
        host.start(memory_release_timeout_sec="60")
        status = host.wait_state("WAITING")
        assert status["verdict"]["kind"] == "gpu_neighbour"
        assert str(neighbour.pid) in str(status["verdict"]["numbers"]["holders"])
    status = host.wait_state("HEALTHY")
    assert status["changes"] == []
    assert host.history()[0]["plan"]["action"] == "retry"


def test_a_neighbour_that_stays_is_given_way_to(vllm_host: MakeHost) -> None:
    host = vllm_host(gpu_bytes=24 * GIB, figures={"weights_bytes": 8 * GIB}, flags="--max-model-len 2048")
    with host.gpus.neighbour(6 * GIB) as neighbour:
        host.start()
        status = host.wait_state("HEALTHY")
        (change,) = status["changes"]
        # 18 of 24 GiB are free: 0.75, less the margin
        assert (change["flag"], change["from"], change["to"]) == ("--gpu-memory-utilization", None, "0.74")
        assert neighbour.poll() is None
        assert host.complete()


def test_a_neighbour_that_takes_nearly_everything_is_held(vllm_host: MakeHost) -> None:
    host = vllm_host(gpu_bytes=24 * GIB)
    with host.gpus.neighbour(20 * GIB) as neighbour:
        host.start()
        status = host.wait_state("HELD")
    assert f"pid {neighbour.pid}" in status["reason"]
    assert "below 0.5" in status["reason"]
    assert host.spawns() == 1


def test_a_host_whose_gpu_can_not_be_measured(vllm_host: MakeHost, tmp_path: Path) -> None:
    """The listener sees no NVML: after the wait it goes by the numbers of vLLM's own message."""
    flags = "--max-model-len 2048"
    host = vllm_host(gpu_bytes=24 * GIB, figures={"weights_bytes": 8 * GIB}, flags=flags)
    with host.gpus.neighbour(6 * GIB):
        host.install()
        file = host.supervisord.conf_dir / "supervisor-vllm.conf"
        file.write_text(file.read_text().replace("startsecs=0", 'startsecs=0\nenvironment=LD_LIBRARY_PATH="/nowhere"'))
        host.supervisord.start()
        status = host.wait_state("HEALTHY")
    assert status["changes"][0]["to"] == "0.74"


def test_utilisation_goes_up_only_as_far_as_a_neighbour_leaves_memory(vllm_host: MakeHost) -> None:
    flags = "--gpu-memory-utilization 0.55 --max-model-len 2048"
    host = vllm_host(gpu_bytes=24 * GIB, figures={"weights_bytes": 14 * GIB}, flags=flags)
    with host.gpus.neighbour(4 * GIB):
        host.start()
        status = host.wait_state("HEALTHY")
    assert status["verdict"]["kind"] == "gpu_kv_none"
    # 20 of 24 GiB are free: 0.83, less what a server needs beside its budget
    assert status["changes"][0]["to"] == "0.813"


def test_what_was_given_way_to_a_neighbour_comes_back_when_it_has_left(vllm_host: MakeHost) -> None:
    host = vllm_host(gpu_bytes=24 * GIB, figures={"weights_bytes": 8 * GIB}, flags="--max-model-len 2048")
    with host.gpus.neighbour(6 * GIB):
        host.start()
        assert host.wait_state("HEALTHY")["changes"]
        kill(host.pid)
        assert host.wait_healthy_again(2)["changes"], "it is still there"
    kill(host.pid)
    status = host.wait_healthy_again(3)
    assert status["changes"] == []
    assert host.override_command() is None
    (change,) = host.history()[-1]["plan"]["changes"]
    assert (change["from"], change["to"]) == ("0.74", None)


def test_a_death_before_startsecs(vllm_host: MakeHost) -> None:
    """supervisord says FATAL, not EXITED."""
    host = vllm_host(
        figures={"fault": {"where": "startup", "what": "engine_exception", "times": 1}}, startsecs=30
    ).start()
    host.wait_healthy_again()
    assert host.history()[0]["verdict"]["kind"] == "engine_crash"


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ({"where": "startup", "what": "bad_model"}, "bad_model"),
        ({"where": "startup", "what": "shm_full"}, "shm_full"),
    ],
)
def test_what_needs_a_person_is_held_at_once(vllm_host: MakeHost, fault: dict[str, object], kind: str) -> None:
    host = vllm_host(figures={"fault": fault}).start()
    status = host.wait_state("HELD")
    assert status["verdict"]["kind"] == kind
    assert status["reason"]
    assert host.spawns() == 1
    assert host.history()[0]["outcome"] == "held"


def test_bad_arguments_are_held_until_a_person_has_mended_them(vllm_host: MakeHost) -> None:
    host = vllm_host(flags="--no-such-flag 3").start()
    status = host.wait_state("HELD")
    assert status["verdict"]["kind"] == "bad_arguments"
    assert "--no-such-flag" in status["reason"]
    host.user_file.write_text(host.user_file.read_text().replace("--no-such-flag 3", ""))
    done = host.supervisord.ctl("update")
    assert done.returncode == 0, done.stdout
    host.supervisord.ctl("start", "vllm")
    status = host.wait_state("HEALTHY")
    assert host.spawns() == 2


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ({"where": "first_completion", "what": "illegal_memory_access", "times": 1}, "engine_crash"),
        ({"where": "loading", "what": "host_alloc", "times": 1}, "host_alloc"),
    ],
)
def test_other_deaths_are_started_again_unchanged(vllm_host: MakeHost, fault: dict[str, object], kind: str) -> None:
    host = vllm_host(figures={"fault": fault}).start()
    status = host.wait_healthy_again()
    assert host.history()[0]["verdict"]["kind"] == kind
    assert status["changes"] == []


def test_a_server_that_dies_in_the_first_completion_was_never_healthy(vllm_host: MakeHost) -> None:
    host = vllm_host(figures={"fault": {"where": "first_completion", "what": "engine_exception", "times": 1}}).start()
    host.wait_healthy_again()
    assert len(host.history()) == 1
    assert "HEALTHY" not in host.listener_log().partition("DIAGNOSING")[0]


def test_a_taken_port(vllm_host: MakeHost) -> None:
    host = vllm_host()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", host.port))
        taken.listen()
        host.start()
        status = host.wait_state("HELD")
    assert status["verdict"]["kind"] == "port_in_use"
    assert str(host.port) in status["reason"]
    assert host.spawns() == 2


def test_the_limit(vllm_host: MakeHost) -> None:
    """start_limit_burst launches of ours, then HELD; a start by a person opens it again."""
    host = vllm_host(figures={"fault": {"where": "loading", "what": "engine_exception", "times": 4}})
    host.start(start_limit_burst="2")
    status = host.wait_state("HELD")
    assert status["launches_left"] == 0
    assert "start_limit_burst" in status["reason"]
    assert host.spawns() == 3
    assert host.verb("status", "vllm").returncode == 1
    host.supervisord.ctl("start", "vllm")
    host.wait_state("HEALTHY")
    assert host.spawns() == 5


def test_the_count_of_launches_outlives_supervisord(vllm_host: MakeHost) -> None:
    host = vllm_host(figures={"fault": {"where": "loading", "what": "engine_exception", "times": 100}})
    host.start(start_limit_burst="2")
    host.wait_state("HELD")
    host.supervisord.stop()
    host.supervisord.start()
    host.wait(
        lambda status: status["state"] == "HELD" and status["incidents"] == 4, "HELD after supervisord's own start"
    )
    assert host.spawns() == 4  # three of the first life, and supervisord's autostart


def test_hung_while_serving(vllm_host: MakeHost) -> None:
    host = vllm_host(figures={"fault": {"where": "nth_completion", "what": "hang", "completion": 3, "times": 1}})
    host.start(health_interval_sec="0.5", health_timeout_sec="1")
    host.wait_state("HEALTHY")
    host.wait_healthy_again(limit_sec=90)
    (incident,) = host.history()
    assert incident["verdict"]["kind"] == "hung"
    assert incident["outcome"] == "healthy"


def test_a_load_that_takes_too_long(vllm_host: MakeHost) -> None:
    host = vllm_host(figures={"load_seconds": 60}, stopwaitsecs=1)
    host.start(load_timeout_sec="3", start_limit_burst="1")
    status = host.wait_state("HELD", limit_sec=90)
    assert status["verdict"]["kind"] == "hung"
    assert [row["verdict"]["kind"] for row in host.history()] == ["hung", "hung"]
    assert not host.pid
    left = {
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if str(host.model) in " ".join(process.info["cmdline"] or ())
    }
    assert not left


def test_the_server_of_a_killed_supervisord_is_our_own_orphan(vllm_host: MakeHost) -> None:
    """supervisord is killed: vLLM lives on and holds its port. The next supervisord's vLLM can't start until the old
    one has ended."""
    host = vllm_host().start()
    host.wait_state("HEALTHY")
    old = [process.pid for process in group_members(host.pid)]
    host.supervisord.kill()
    host.supervisord.start()
    host.wait_healthy_again()
    assert not any(alive(pid) for pid in old)
    (incident,) = host.history()
    assert incident["verdict"]["kind"] == "port_in_use"
    assert incident["outcome"] == "healthy"


OWN_SIGNATURE = """
[[signature]]
name = "our_plugin_shape"
kind = "bad_model"
pattern = 'shape .{1,40} is invalid for input of size'
examples = ["RuntimeError: shape '[1, 4096]' is invalid for input of size 4095"]
near_misses = ["RuntimeError: shape '[1, 4096]' is fine"]
"""


def test_a_signature_of_the_users_own_decides_in_the_listener(vllm_host: MakeHost) -> None:
    """What is an engine crash for everybody is a model that a person must mend, here."""
    host = vllm_host(figures={"fault": {"where": "loading", "what": "engine_exception"}})
    done = host.install()
    assert done.returncode == 0, done.stderr
    folder = host.supervisord.conf_dir / "signatures.d"
    folder.mkdir()
    (folder / "own.toml").write_text(OWN_SIGNATURE)
    (folder / "broken.toml").write_text(OWN_SIGNATURE.replace("bad_model", "no_such_kind"))
    host.supervisord.start()
    status = host.wait_state("HELD")
    assert status["verdict"]["kind"] == "bad_model"
    assert "shape '[1, 4096]'" in status["verdict"]["evidence"][0]["text"]
    assert "not used" in host.listener_log() and "broken.toml" in host.listener_log()
