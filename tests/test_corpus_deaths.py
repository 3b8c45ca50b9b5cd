"""Deaths of real vLLM that tests/bench/real_deaths.py made: what we say is true of what was done."""

from pathlib import Path

import pytest
from cases import Case, load, verdict_of

from supervisor_vllm.kinds import KINDS


@pytest.mark.parametrize("case", load("deaths"), ids=lambda case: case.name)
def test_the_kind_is_true(case: Case, tmp_path: Path) -> None:
    verdict = verdict_of(case, tmp_path)
    assert verdict.kind in (*case.kinds, *case.untold), verdict.summary
    # what no line tells can't be found, but memory is never cried where none ran out
    assert KINDS[verdict.kind].oom == case.oom or (case.oom and verdict.kind in case.untold)
