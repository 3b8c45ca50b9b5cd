"""Real vLLM, broken on purpose by tests/bench/break_vllm.py: the kind is that of what was done."""

import json
from pathlib import Path

import pytest

from supervisor_vllm.classify import classify
from supervisor_vllm.explain import incident_from_log
from supervisor_vllm.kinds import KINDS

BROKEN = Path(__file__).parent / "corpus" / "broken"
CASES = json.loads((BROKEN / "cases.json").read_text())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_what_was_done_is_what_is_said(case: dict) -> None:
    kernel = BROKEN / f"{case['name']}.kernel"
    verdict = classify(
        incident_from_log(
            str(BROKEN / f"{case['name']}.log"),
            command=case["command"],
            exit_status=case["exit_status"],
            signal=case["signal"],
            pids=tuple(case["pids"]),
            kernel_log=str(kernel) if kernel.exists() else None,
        )
    )
    assert verdict.kind in case["kinds"], verdict
    assert KINDS[verdict.kind].oom == case["oom"]
    assert case["phase"] in (None, verdict.phase)
