"""The table of signatures: each row knows a text that it matches and one, near to it, that it doesn't."""

import time

import pytest

from supervisor_vllm.classify.pattern import Signature, numbers_of, pattern, size_bytes
from supervisor_vllm.classify.signatures import SIGNATURES
from supervisor_vllm.classify.wording import exception_head, readings
from supervisor_vllm.kinds import KINDS


@pytest.mark.parametrize("signature", SIGNATURES, ids=lambda signature: signature.name)
def test_row(signature: Signature) -> None:
    for text in signature.examples:
        match = next(filter(None, map(signature.match, readings(text))), None)
        assert match, text
        numbers_of(match)
    for text in signature.near_misses:
        assert not any(signature.search(reading) for reading in (text, *readings(text))), text
    assert signature.kind == "by_phase" or signature.kind in KINDS
    assert signature.source


def test_names_are_unique() -> None:
    names = [signature.name for signature in SIGNATURES]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("signature", SIGNATURES, ids=lambda signature: signature.name)
def test_the_example_is_this_rows(signature: Signature) -> None:
    """No row above takes the example away, except one that means the same."""
    first = next(row for row in SIGNATURES if any(row.match(text) for text in readings(signature.examples[0])))
    assert (first.kind, first.name.partition("_")[0]) == (signature.kind, signature.name.partition("_")[0]) or (
        first.name == signature.name
    )


@pytest.mark.parametrize(
    "text",
    ["a" * 8192, " " * 8192, "Error" * 1600, "'" * 8192, "1" * 8192, "(" * 8192, "[Errno 28] " * 700, "Killed " * 1100],
    ids=lambda text: text[:6],
)
def test_patterns_cost_time_in_proportion(text: str) -> None:
    start = time.perf_counter()
    for signature in SIGNATURES:
        signature.search(text)
        signature.match(text)
    for reading in readings(text):
        exception_head(reading)
    assert time.perf_counter() - start < 2


def test_holes_become_bytes() -> None:
    match = pattern(r"<a:gib> <b:mib> <c:size> <d:device> <e:count>").match("1.5 2 3.00 MiB cuda:3 7")
    assert match
    assert numbers_of(match) == {"a": 3 * 2**29, "b": 2**21, "c": 3 * 2**20, "d": 3, "e": 7}


@pytest.mark.parametrize(
    ("text", "size"), [("448.00 KiB", 448 * 1024), ("512 bytes", 512), ("2.00 GiB", 2**31), ("1.00 TiB", 2**40)]
)
def test_sizes(text: str, size: int) -> None:
    assert size_bytes(text) == size
