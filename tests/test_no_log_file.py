"""A program whose log is no file: supervisord's events are kept instead, and a death is understood as with one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from host import Host
from standin.figures import GIB

MakeHost = Callable[..., Host]
#: Dies in graph capture: the graphs need 2 GiB more than is left
GRAPH = {"weights_bytes": 12 * GIB, "graph_bytes": 3 * GIB, "graph_estimate_bytes": 0}


@pytest.mark.parametrize(
    "options",
    [
        {"stdout_logfile": "/dev/stdout", "stdout_logfile_maxbytes": 0},
        {"stdout_logfile": "/dev/fd/1", "stdout_logfile_maxbytes": 0},
        {"stdout_logfile": "NONE"},
        {"stdout_logfile": "syslog"},
        {"stdout_logfile": "NONE", "stdout_syslog": "true"},
    ],
    ids=lambda options: " ".join(map(str, options.values())),
)
def test_a_death_is_understood_without_a_log_file(vllm_host: MakeHost, options: dict[str, object]) -> None:
    host = vllm_host(figures=GRAPH, gpu_bytes=24 * GIB, **options).start()
    host.wait_healthy_again()
    history = host.history()
    assert len(history) == 1, history
    (incident,) = history
    assert incident["verdict"]["kind"] == "gpu_graph"
    assert incident["launches"] == 1
    assert incident["outcome"] == "healthy"
    assert host.spawns() == 2
    assert host.status()["served"]["weights"]["shards_total"]


def test_the_users_own_output_stays_where_it_goes(vllm_host: MakeHost) -> None:
    """`docker logs` is supervisord's stdout."""
    host = vllm_host(stdout_logfile="/dev/stdout", stdout_logfile_maxbytes=0).start()
    host.wait_state("HEALTHY")
    kept = host.state_dir / "output" / "vllm.out"
    assert "Application startup complete" in kept.read_text()
    assert "Application startup complete" in (host.supervisord.directory / "supervisord.out").read_text()
    assert kept.stat().st_mode & 0o777 == 0o600
    assert kept.parent.stat().st_mode & 0o777 == 0o700


def test_only_the_channel_that_has_no_file(vllm_host: MakeHost) -> None:
    """vLLM's tracebacks go to stderr."""
    fault = {"where": "first_completion", "what": "illegal_memory_access", "times": 1}
    host = vllm_host(figures={"fault": fault}, redirect_stderr="false", stderr_logfile="NONE").start()
    assert host.override is not None
    text = host.override.read_text()
    assert "stderr_events_enabled=true" in text
    assert "stdout_events_enabled" not in text
    host.wait_healthy_again()
    assert host.history()[0]["verdict"]["kind"] == "engine_crash"
    assert [path.name for path in sorted((host.state_dir / "output").glob("vllm.[oe]*"))] == ["vllm.err"]


def test_both_channels(vllm_host: MakeHost) -> None:
    options = {"stdout_logfile": "NONE", "redirect_stderr": "false", "stderr_logfile": "NONE"}
    host = vllm_host(figures=GRAPH, gpu_bytes=24 * GIB, **options).start()
    host.wait_healthy_again()
    assert [incident["verdict"]["kind"] for incident in host.history()] == ["gpu_graph"]


def test_the_user_has_switched_it_off(vllm_host: MakeHost) -> None:
    """Then there is no log: nothing is made up, and it is started again unchanged."""
    host = vllm_host(figures=GRAPH, gpu_bytes=24 * GIB, stdout_logfile="NONE", stdout_events_enabled="false")
    assert "most deaths stay `unknown`" in host.install(start_limit_burst="1").stdout
    assert "events_enabled" not in str(host.override and host.override.read_text())
    host.supervisord.start()
    host.wait_state("HELD")
    assert {incident["verdict"]["kind"] for incident in host.history()} == {"unknown"}
    assert host.override_command() is None


def test_shadow_mode_reads_what_the_user_has_switched_on(vllm_host: MakeHost) -> None:
    options = {"stdout_logfile": "NONE", "stdout_events_enabled": "true", "autorestart": "false", "startretries": 0}
    host = vllm_host(figures=GRAPH, gpu_bytes=24 * GIB, **options).start(mode="shadow")
    status = host.wait(lambda status: status["incidents"] == 1, "the incident")
    assert status["verdict"]["kind"] == "gpu_graph"
    assert host.override is None
