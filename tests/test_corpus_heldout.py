"""Public reports that were explained before anybody judged them: what is right must stay right (docs/accuracy.md)."""

from pathlib import Path

import pytest
from cases import Case, load, verdict_of

from supervisor_vllm.kinds import KINDS


@pytest.mark.parametrize("case", load("heldout"), ids=lambda case: case.name)
def test_report(case: Case, tmp_path: Path) -> None:
    verdict = verdict_of(case, tmp_path)
    assert verdict.kind in (*case.kinds, *case.untold), verdict
    assert KINDS[verdict.kind].oom == case.oom or verdict.kind in case.untold
