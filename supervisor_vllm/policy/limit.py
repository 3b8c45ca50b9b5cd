"""How often and how soon a program may be launched, as systemd's StartLimit and RestartSteps settings say it. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from ..settings import Settings


def launches_left(
    launch_times: Sequence[float], *, last_healthy_time: float, now: float, settings: Settings
) -> int | None:
    """How many launches the limit still allows; None: there is no limit.

    `launch_times`: the launches since a person last started it, seconds since the epoch. Counted are those of the last
    start_limit_interval_sec, and those since the last healthy one however long ago: loading a large model takes longer
    than the interval, and a loop that never gets healthy must end too. A time in the future (the clock was set back)
    counts.
    """
    if not settings.start_limit_burst or not settings.start_limit_interval_sec:
        return None
    oldest = min(now - settings.start_limit_interval_sec, last_healthy_time or now)
    counted = [when for when in launch_times if when > oldest or when > now]
    if not last_healthy_time:
        counted = list(launch_times)
    return max(0, settings.start_limit_burst - len(counted))


def restart_delay_sec(deaths_in_a_row: int, settings: Settings) -> float:
    """The pause before an unchanged restart, growing as systemd's does (systemd 254, RestartSteps).

    `deaths_in_a_row` counts from 1. Without restart_steps, or with a maximum that is not above restart_sec, it stays.
    """
    base, most, steps = settings.restart_sec, settings.restart_max_delay_sec, settings.restart_steps
    if not steps or most <= base or base <= 0:
        return base
    step = min(max(deaths_in_a_row - 1, 0), steps)
    return float(base * (most / base) ** (step / steps))
