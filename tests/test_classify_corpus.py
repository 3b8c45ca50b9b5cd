"""Whole logs and shortened reports with their known truth: `explain` says the stated kind, and never cries OOM."""

import json
from pathlib import Path

import pytest

from supervisor_vllm.classify import classify
from supervisor_vllm.explain import incident_from_log
from supervisor_vllm.incident import Verdict
from supervisor_vllm.kinds import KINDS

CORPUS = Path(__file__).parent / "corpus"
REAL = json.loads((CORPUS / "real" / "cases.json").read_text())
PUBLIC = json.loads((CORPUS / "public" / "cases.json").read_text())
OWN = json.loads((CORPUS / "own" / "cases.json").read_text())


def explain(tmp_path: Path, case: dict) -> Verdict:
    log = tmp_path / "vllm.log"
    log.write_text("".join(f"{line}\n" for line in case["log"]), newline="")
    kernel = tmp_path / "kernel.log"
    kernel.write_text("".join(f"{line}\n" for line in case.get("kernel") or ()))
    incident = incident_from_log(
        str(log),
        command=case.get("command") or case.get("args") or "",
        exit_status=case.get("exit_status"),
        signal=case.get("signal"),
        pids=tuple(case.get("pids", ())),
        cgroup=case.get("cgroup"),
        kernel_log=str(kernel) if case.get("kernel") else None,
    )
    return classify(incident)


@pytest.mark.parametrize("name", REAL)
def test_real_log(name: str) -> None:
    case = REAL[name]
    kernel = CORPUS / "real" / f"{name}.kernel"
    verdict = classify(
        incident_from_log(
            str(CORPUS / "real" / f"{name}.log"),
            command=case["command"],
            exit_status=case["exit_status"],
            kernel_log=str(kernel) if kernel.exists() else None,
        )
    )
    if case["kind"] is None:
        assert not KINDS[verdict.kind].oom
        assert verdict.kind in ("stopped", "unknown")
    else:
        assert verdict.kind == case["kind"]


@pytest.mark.parametrize("case", PUBLIC, ids=lambda case: case["id"])
def test_public_report(case: dict, tmp_path: Path) -> None:
    verdict = explain(tmp_path, {**case, "exit_status": 1})
    assert verdict.kind in case["kinds"]
    assert KINDS[verdict.kind].oom == case["oom"]


@pytest.mark.parametrize("case", OWN, ids=lambda case: case["id"])
def test_own_case(case: dict, tmp_path: Path) -> None:
    case = {"command": "vllm serve /m/q", **case}
    verdict = explain(tmp_path, case)
    assert verdict.kind == case["kind"]
    if "phase" in case:
        assert verdict.phase == case["phase"]
    assert {name: verdict.numbers.get(name) for name in case.get("numbers", {})} == case.get("numbers", {})
    if "holders" in case:
        assert [[holder["pid"], holder["owner"]] for holder in verdict.numbers["holders"]] == case["holders"]


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
