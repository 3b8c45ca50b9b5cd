"""Real vLLM, broken on purpose by tests/bench/break_vllm.py: the kind is that of what was done."""

from pathlib import Path

import pytest
from cases import Case, load, verdict_of

from supervisor_vllm.kinds import KINDS


@pytest.mark.parametrize("case", load("broken"), ids=lambda case: case.name)
def test_what_was_done_is_what_is_said(case: Case, tmp_path: Path) -> None:
    verdict = verdict_of(case, tmp_path)
    assert verdict.kind in case.kinds, verdict
    assert KINDS[verdict.kind].oom == case.oom
    assert case.phase in (None, verdict.phase)
