"""Would somebody notice? Each row of the signature table is disabled, or gets another kind:
a pinned verdict changes."""

import dataclasses
import json
from pathlib import Path

import pytest

from supervisor_vllm.classify import classify
from supervisor_vllm.classify.pattern import Signature
from supervisor_vllm.classify.signatures import SIGNATURES
from supervisor_vllm.incident import Incident, LogLine

#: name of a row → the verdict on each of its examples, alone in a log
PINNED = json.loads((Path(__file__).parent / "corpus" / "signatures.json").read_text())


def verdicts_on(name: str, table: tuple[Signature, ...]) -> list[dict]:
    found = []
    for example in next(row for row in SIGNATURES if row.name == name).examples:
        log = (LogLine(1, example),)
        known = Incident("vllm", "2026-05-01T12:00:00+00:00", log=log, exit_status=1, command="vllm serve /m")
        verdict = classify(known, table)
        found.append({"kind": verdict.kind, "phase": verdict.phase, "numbers": verdict.numbers})
    return found


@pytest.mark.parametrize("name", [row.name for row in SIGNATURES])
def test_the_pinned_verdict(name: str) -> None:
    assert verdicts_on(name, SIGNATURES) == PINNED[name]


def test_every_row_is_pinned() -> None:
    assert list(PINNED) == [row.name for row in SIGNATURES]


@pytest.mark.parametrize("row", SIGNATURES, ids=lambda row: row.name)
def test_a_row_that_is_gone_is_noticed(row: Signature) -> None:
    without = tuple(other for other in SIGNATURES if other is not row)
    assert verdicts_on(row.name, without) != PINNED[row.name]


@pytest.mark.parametrize("row", SIGNATURES, ids=lambda row: row.name)
def test_a_row_with_another_kind_is_noticed(row: Signature) -> None:
    other = "hung" if row.kind != "hung" else "engine_crash"
    swapped = tuple(dataclasses.replace(one, kind=other) if one is row else one for one in SIGNATURES)
    assert verdicts_on(row.name, swapped) != PINNED[row.name]
