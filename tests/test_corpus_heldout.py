"""Public reports that were explained before anybody judged them: what is right must stay right (docs/accuracy.md)."""

import json
from pathlib import Path

import pytest

from supervisor_vllm.classify import classify
from supervisor_vllm.explain import incident_from_log
from supervisor_vllm.kinds import KINDS

CASES = json.loads((Path(__file__).parent / "corpus" / "heldout" / "cases.json").read_text())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_report(case: dict, tmp_path: Path) -> None:
    log, kernel = tmp_path / "vllm.log", tmp_path / "kernel.log"
    log.write_text("".join(f"{line}\n" for line in case["log"]))
    kernel.write_text("".join(f"{line}\n" for line in case["kernel"]))
    verdict = classify(
        incident_from_log(
            str(log),
            command=case["args"],
            exit_status=case["exit_status"],
            kernel_log=str(kernel) if case["kernel"] else None,
        )
    )
    assert verdict.kind in case["kinds"], verdict
    assert KINDS[verdict.kind].oom == case["oom"]
