"""supervisord's own log says how a process ended (lines of supervisor 4.3.0)."""

from __future__ import annotations

from supervisor_vllm.evidence.exit_status import exit_in_log

LOG = """\
2026-01-01 00:00:00,000 INFO spawned: 'v' with pid 10
2026-01-01 00:00:05,000 WARN exited: v (exit status 3; not expected)
2026-01-01 00:00:06,000 INFO spawned: 'v2' with pid 11
2026-01-01 00:00:07,000 WARN exited: v2 (exit status 9; not expected)
2026-01-01 00:00:08,000 INFO spawned: 'v' with pid 12
2026-01-01 00:00:09,000 WARN exited: v (terminated by SIGKILL; not expected)
2026-01-01 00:00:10,000 INFO spawned: 'v' with pid 13
"""


def test_each_life_has_its_own_end() -> None:
    assert exit_in_log(LOG, "v", 10) == (3, None)
    assert exit_in_log(LOG, "v", 12) == (None, "SIGKILL")
    assert exit_in_log(LOG, "v", 0) == (None, "SIGKILL")


def test_a_life_that_has_not_ended_or_is_not_in_the_log_proves_nothing() -> None:
    assert exit_in_log(LOG, "v", 13) == (None, None)
    assert exit_in_log(LOG, "v", 99) == (None, None)
    assert exit_in_log("", "v", 0) == (None, None)
