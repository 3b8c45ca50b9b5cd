"""The limit, as systemd's StartLimit settings and RestartSteps have it."""

import pytest

from supervisor_vllm.policy.limit import launches_left, restart_delay_sec
from supervisor_vllm.settings import Settings

NOW = 1_000_000.0
LIMITED = Settings(start_limit_burst=3, start_limit_interval_sec=600)


def left(ages, healthy_age=None, settings=LIMITED):
    healthy = 0.0 if healthy_age is None else NOW - healthy_age
    return launches_left([NOW - age for age in ages], last_healthy_time=healthy, now=NOW, settings=settings)


def test_fresh():
    assert left([]) == 3


def test_each_launch_counts():
    assert left([10]) == 2
    assert left([30, 20, 10]) == 0
    assert left([40, 30, 20, 10]) == 0


def test_a_loop_that_loads_longer_than_the_interval_ends_too():
    assert left([5000, 3000, 1000]) == 0


def test_old_launches_before_the_last_healthy_one_are_forgotten():
    assert left([5000, 4000, 1000], healthy_age=900) == 3
    assert left([5000, 4000, 500], healthy_age=400) == 2
    assert left([5000, 4000, 500], healthy_age=3900) == 2


def test_a_clock_that_was_set_back_forgives_nothing():
    assert left([-50, -100]) == 1


def test_no_limit():
    assert left([1, 2, 3, 4], settings=Settings(start_limit_burst=0)) is None
    assert left([1, 2, 3, 4], settings=Settings(start_limit_interval_sec=0)) is None


def test_the_pause_stays_without_steps():
    assert restart_delay_sec(5, Settings(restart_sec=30)) == 30


def test_the_pause_grows_as_systemds():
    # RestartSec=2, RestartSteps=5, RestartMaxDelaySec=120: about 2, 4.5, 10.3, 23.3, 52.9, 120 s
    settings = Settings(restart_sec=2, restart_steps=5, restart_max_delay_sec=120)
    pauses = [restart_delay_sec(n, settings) for n in range(1, 8)]
    assert pauses == pytest.approx([2, 4.53, 10.28, 23.29, 52.88, 120, 120], abs=0.1)
