"""Shadow mode: what the launch after a death says of the plan that nobody carried out."""

from __future__ import annotations

import pytest

from supervisor_vllm.incident import Change, Plan
from supervisor_vllm.policy.hindsight import Followed, hindsight

DIED = "vllm serve /m --max-model-len 32768 --gpu-memory-utilization 0.8"
SHORTER = Change("--max-model-len", "32768", "16384", "KV is too small")
MORE = Change("--gpu-memory-utilization", "0.8", "0.9", "nothing was left for KV")


def plan(action: str, *changes: Change) -> Plan:
    return Plan(action, "why", changes)  # type: ignore[arg-type]


def command(length: str, utilization: str = "0.8") -> str:
    return f"vllm serve /m --max-model-len {length} --gpu-memory-utilization {utilization}"


@pytest.mark.parametrize(
    ("planned", "followed", "judgement"),
    [
        (plan("adjust", SHORTER), None, "open"),
        (plan("adjust", SHORTER), Followed(DIED, healthy=False), "open"),
        (plan("adjust", SHORTER), Followed(DIED, healthy=False, died_as="gpu_kv_small"), "right"),
        (plan("adjust", SHORTER), Followed(DIED, healthy=False, died_as="host_oom_kill"), "open"),
        (plan("adjust", SHORTER), Followed(DIED, healthy=True), "wrong"),
        (plan("hold"), Followed(DIED, healthy=True), "wrong"),
        (plan("hold"), Followed(DIED, healthy=False, died_as="gpu_kv_small"), "right"),
        (plan("wait"), Followed(DIED, healthy=True), "right"),
        (plan("retry"), Followed(DIED, healthy=False, died_as="gpu_kv_small"), "wrong"),
        (plan("adjust", SHORTER), Followed(command("16384"), healthy=True), "right"),
        (plan("adjust", SHORTER), Followed(command("8k"), healthy=True), "right"),
        (plan("adjust", SHORTER), Followed(command("20000"), healthy=True), "open"),
        (plan("adjust", SHORTER), Followed(command("16384"), healthy=False, died_as="gpu_kv_small"), "wrong"),
        (plan("adjust", SHORTER), Followed(command("16384"), healthy=False, died_as="killed"), "open"),
        (plan("adjust", MORE), Followed(command("32768", "0.95"), healthy=True), "right"),
        (plan("adjust", MORE), Followed(command("32768", "0.85"), healthy=True), "open"),
        (plan("adjust", SHORTER, MORE), Followed(command("16384", "0.8"), healthy=True), "open"),
        (plan("hold"), Followed(command("16384"), healthy=True), "open"),
    ],
)  # fmt: skip
def test_what_the_next_launch_proves(planned: Plan, followed: Followed | None, judgement: str) -> None:
    assert hindsight("gpu_kv_small", planned, DIED, followed).judgement == judgement
