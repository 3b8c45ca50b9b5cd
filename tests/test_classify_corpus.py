"""Whole logs and shortened reports with their known truth: `explain` says the stated kind, and never cries OOM."""

from pathlib import Path

import pytest
from cases import CORPUS, Case, load, verdict_of

from supervisor_vllm.classify import classify
from supervisor_vllm.explain import incident_from_log
from supervisor_vllm.kinds import KINDS


@pytest.mark.parametrize("case", load("real"), ids=lambda case: case.name)
def test_real_log(case: Case, tmp_path: Path) -> None:
    verdict = verdict_of(case, tmp_path)
    assert verdict.kind in case.kinds
    assert KINDS[verdict.kind].oom == case.oom


@pytest.mark.parametrize("case", load("public"), ids=lambda case: case.name)
def test_public_report(case: Case, tmp_path: Path) -> None:
    verdict = verdict_of(case, tmp_path)
    assert verdict.kind in case.kinds
    assert KINDS[verdict.kind].oom == case.oom


@pytest.mark.parametrize("case", load("own"), ids=lambda case: case.name)
def test_own_case(case: Case, tmp_path: Path) -> None:
    verdict = verdict_of(case, tmp_path)
    assert verdict.kind in case.kinds
    if "phase" in case.row:
        assert verdict.phase == case.phase
    expected = case.row.get("numbers", {})
    assert {name: verdict.numbers.get(name) for name in expected} == expected
    if "holders" in case.row:
        assert [[holder["pid"], holder["owner"]] for holder in verdict.numbers["holders"]] == case.row["holders"]


def test_evidence_has_the_files_own_line_number(tmp_path: Path) -> None:
    verdict = classify(incident_from_log(str(CORPUS / "real" / "free_check.log"), exit_status=1))
    evidence = verdict.evidence[0]
    lines = (CORPUS / "real" / "free_check.log").read_text().split("\n")
    assert evidence.source == "vllm-log"
    assert evidence.line is not None
    assert lines[evidence.line - 1].startswith(evidence.text[:200])
    assert "less than desired CPU memory utilization" in evidence.text


def test_summary_is_one_sentence_with_numbers_in_peoples_units(tmp_path: Path) -> None:
    verdict = classify(incident_from_log(str(CORPUS / "real" / "free_check.log"), exit_status=1))
    assert "7.91 GiB of 9.34 GiB were free" in verdict.summary
    assert "8.59 GiB" in verdict.summary
    assert "\n" not in verdict.summary
