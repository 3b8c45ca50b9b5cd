"""Random machines and models on which vLLM dies (a fixed sample of `make bench-policy`): one restart is enough."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent / "bench"))

import bench_policy
import policy_worlds

SAMPLE = bench_policy.deaths(60)


@pytest.fixture(scope="module")
def account() -> bench_policy.Account:
    bests = {world.seed: policy_worlds.best(world, context_first=False) for world in SAMPLE}
    return bench_policy.account(SAMPLE, bests, bench_policy.ours)[0]


def test_what_can_be_healed_is_healed_by_one_restart(account: bench_policy.Account) -> None:
    assert account.healed == account.healable > 30
    assert account.mean_launches <= 1.3


def test_little_is_lost(account: bench_policy.Account) -> None:
    assert account.capacity >= 0.9


def test_what_can_not_be_healed_is_said(account: bench_policy.Account) -> None:
    assert account.recognised == account.impossible > 5
    assert account.wasted_launches <= account.impossible
