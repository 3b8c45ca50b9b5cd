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
