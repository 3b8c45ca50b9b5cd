"""What was learned is a price: after a quiet time half of it is given back; a notch that fails is never tried again."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest
from host import Host
from test_people import tight_host

from supervisor_vllm.errors import UserError
from supervisor_vllm.incident import Change
from supervisor_vllm.policy.step_up import Learned, steps_up
from supervisor_vllm.settings import in_window, parse_settings

MakeHost = Callable[..., Host]
UTIL, LEN, SEQS = "--gpu-memory-utilization", "--max-model-len", "--max-num-seqs"
DAY = 86400.0


def step(flag: str, own: str | None, now: str, *, age: float = 2 * DAY, **known: object) -> str | None:
    """The next value of a flag whose user's value is `own` and that was learned to be `now`."""
    defaults = {UTIL: 0.92, LEN: 131072.0, SEQS: 256.0}
    value = float(own) if own else defaults[flag]
    arguments: dict = {"failed": {}, "last_memory_death": 0.0, "now": 10 * DAY, "after_sec": DAY} | known
    learned = [Learned(Change(flag, own, now, "w"), 10 * DAY - age)]
    found = steps_up(learned, own={flag: value}, **arguments)
    return found[0].to if found else None


def test_half_of_the_way_back() -> None:
    assert step(LEN, "32768", "8192") == "20480"
    assert step(UTIL, "0.9", "0.8") == "0.85"
    assert step(UTIL, "0.6", "0.8") == "0.70"  # down again: it had gone up
    assert step(SEQS, None, "64") == "160"


def test_the_last_step_is_the_users_own_value() -> None:
    assert step(UTIL, "0.9", "0.88") == "0.9"
    assert step(LEN, "32768", "31744") == "32768"


def test_only_after_a_quiet_time() -> None:
    assert step(LEN, "32768", "8192", age=DAY / 2) is None
    assert step(LEN, "32768", "8192", last_memory_death=9.5 * DAY) is None
    assert step(LEN, "32768", "8192", after_sec=0.0) is None


def test_a_notch_that_failed_is_never_tried_again() -> None:
    now, tried = 8192, []
    while value := step(LEN, "32768", str(now), failed={LEN: tried}):
        assert value not in tried and value != "32768" and int(value) > now
        if int(value) > 17000:
            tried.append(value)
        else:
            now = int(value)
        assert len(tried) < 12
    assert 15000 < now <= 17000
    assert step(LEN, "32768", "8192", failed={LEN: [None]}) == "20480"  # the user's own value was too much


def test_other_flags_and_odd_values_are_left_alone() -> None:
    assert steps_up([], own={}, failed={}, last_memory_death=0, now=9, after_sec=1) == ()
    for change in (
        Change("--enforce-eager", None, "true", "w"),
        Change(LEN, None, "auto", "w"),
        Change(UTIL, "x", None, ""),
    ):
        found = steps_up(
            [Learned(change, 0.0)], own={LEN: 5.0, UTIL: 0.9}, failed={}, last_memory_death=0, now=9 * DAY, after_sec=1
        )
        assert found == ()


def test_the_operators_window() -> None:
    assert parse_settings({"step_up": " window  2:30 - 04:00"}).step_up == "window 2:30 - 04:00"
    for window, open_at, closed_at in (
        ("window 2:30-04:00", ((2, 30), (3, 59)), ((2, 29), (4, 0), (14, 30))),
        ("window 23:00-01:00", ((23, 0), (0, 59)), ((1, 0), (22, 59), (12, 0))),
        ("on-restart", (), ((3, 0),)),
        ("never", (), ((3, 0),)),
    ):
        assert all(in_window(window, *clock) for clock in open_at), window
        assert not any(in_window(window, *clock) for clock in closed_at), window
    for text in ("window", "window 25:00-26:00", "window 2-4", "at night"):
        with pytest.raises(UserError, match="window HH:MM-HH:MM"):
            parse_settings({"step_up": text})


@pytest.mark.slow
def test_in_the_window_it_restarts_by_itself_and_takes_back_what_fails(vllm_host: MakeHost) -> None:
    host = tight_host(vllm_host).start(step_up_after_sec="1", step_up="window 00:00-23:59", start_limit_burst="4")
    learned = int(host.wait_healthy_again()["changes"][0]["to"])
    host.wait_healthy_again(3, 120)  # stopped for the step, which was too much, and what served before
    stepped, failed = host.history()[1:3]
    assert (stepped["verdict"]["kind"], stepped["outcome"]) == ("stopped", "died again")
    assert "Stopped for a step back up in the window" in stepped["verdict"]["summary"]
    assert learned < int(stepped["plan"]["changes"][0]["to"]) < 32768
    assert failed["verdict"]["kind"] == "gpu_kv_small"
    assert (failed["plan"]["changes"][0]["to"], failed["outcome"]) == (str(learned), "healthy")


@pytest.mark.slow
def test_a_restart_that_happens_anyway_gives_half_back_and_takes_it_again_where_it_fails(vllm_host: MakeHost) -> None:
    """What was learned is vLLM's own estimate: any step up is too much."""
    host = tight_host(vllm_host).start(step_up_after_sec="1")
    host.wait_healthy_again()
    learned = int(host.status()["changes"][0]["to"])
    os.kill(host.pid, signal.SIGKILL)  # no memory death: a restart that happens anyway
    host.wait_healthy_again(3, 120)  # killed, then the step that was too much, then what served before
    stepped, failed = host.history()[1:3]
    (tried,) = stepped["plan"]["changes"]
    assert (tried["flag"], int(tried["from"])) == (LEN, learned)
    assert learned < int(tried["to"]) < 32768
    assert failed["verdict"]["kind"] == "gpu_kv_small"
    assert (failed["plan"]["changes"][0]["to"], failed["outcome"]) == (str(learned), "healthy")
    assert "failed and is not tried again" in host.listener_log()
