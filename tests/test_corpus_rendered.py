"""The wordings of released versions, out of their own source, as a log would hold them."""

import json
from pathlib import Path

import pytest

from supervisor_vllm.classify import classify
from supervisor_vllm.incident import Incident, LogLine
from supervisor_vllm.kinds import KINDS

CASES = json.loads((Path(__file__).parent / "corpus" / "rendered" / "cases.json").read_text())


def log_of(case: dict) -> list[str]:
    """As that version writes it: until 0.7 without brackets around the place, from 0.10.1 with the process before."""
    number = [int(part) for part in case["versions"][0].split(".")[:2]]
    place = "x.py:7]" if number < [0, 8] else "[x.py:7]"
    process = "(EngineCore_DP0 pid=71) " if number >= [0, 11] else ""
    head = f"{process}{{}} 05-01 12:00:00 {place} "
    if case["level"].startswith("raise "):
        name = case["level"].removeprefix("raise ").rpartition(".")[2]
        name = name if name.endswith(("Error", "Exception")) else "ValueError"
        return [
            head.format("ERROR") + "EngineCore failed to start.",
            head.format("ERROR") + "Traceback (most recent call last):",
            head.format("ERROR") + f'  File "/v/{case["file"]}", line {case["line"]}, in check',
            head.format("ERROR") + f"{name}: {case['text']}",
        ]
    level = {"exception": "ERROR", "critical": "CRITICAL"}.get(case["level"], case["level"].upper())
    return [head.format(level) + case["text"]]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_wording(case: dict) -> None:
    log = tuple(LogLine(number, text) for number, text in enumerate(log_of(case), 1))
    verdict = classify(Incident("vllm", "2026-05-01T12:00:00+00:00", log=log, exit_status=1, command="vllm serve /m"))
    if case["kind"] is None:
        assert not KINDS[verdict.kind].oom, verdict
    else:
        assert verdict.kind == case["kind"], verdict
