"""Signatures of the user's own, the list of all, and the promise that no expression can be slow."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from supervisor_vllm.classify.expression import required_words, trouble_of
from supervisor_vllm.classify.pattern import Signature, plain_source
from supervisor_vllm.classify.signatures import SIGNATURES
from supervisor_vllm.classify.user_signatures import load_signatures

DOCS = Path(__file__).parent.parent / "docs" / "signatures.md"
GOOD = """
[[signature]]
name = "our_plugin"
kind = "gpu_oom"
pattern = 'OurPlugin: arena of <tried_bytes:size> is full'
examples = ["OurPlugin: arena of 3.50 GiB is full"]
near_misses = ["OurPlugin: arena of 3.50 GiB is ready"]
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "supervisor_vllm", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("signature", SIGNATURES, ids=lambda signature: signature.name)
def test_no_row_can_be_slow_and_its_words_are_in_every_match(signature: Signature) -> None:
    source = plain_source(signature.pattern)
    assert trouble_of(source) is None
    required = required_words(source)
    assert required
    assert all(any(word in needed for word in signature.words) for needed in required)


@pytest.mark.parametrize(
    "source",
    [r"a*b", r"a+", r".*out of memory", r"a{3,}", r"(?:a{0,90}){0,90}b", r"[^x]{0,300}[^y]{0,300}z", r"(a|ab){0,40}c"],
)
def test_a_slow_expression_is_refused(source: str) -> None:
    assert trouble_of(source)


@given(st.text(alphabet="ab{}(|)?.0,5[]^", max_size=24))
@settings(max_examples=300, deadline=None)
def test_what_passes_is_quick(source: str) -> None:
    try:
        expression = re.compile(source)
        trouble = trouble_of(source)
    except (re.error, RecursionError, OverflowError):
        return
    if trouble is None:
        begin = time.perf_counter()
        expression.search("ab" * 2000 + "a" * 2000)
        assert time.perf_counter() - begin < 5


def test_the_users_word_counts(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text(GOOD)
    log = tmp_path / "vllm.log"
    log.write_text("RuntimeError: OurPlugin: arena of 3.50 GiB is full\n")
    shown = json.loads(run("explain", str(log), "--exit-status", "1", "--json", "--signatures", str(tmp_path)).stdout)
    assert (shown["kind"], shown["numbers"]["tried_bytes"]) == ("gpu_oom", 3.5 * 2**30)
    without = json.loads(run("explain", str(log), "--exit-status", "1", "--json").stdout)
    assert without["kind"] == "engine_crash"
    assert "our_plugin" in run("signatures", "--signatures", str(tmp_path)).stdout


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("gpu_oom", "gpu_oomph"), "there is no kind 'gpu_oomph'"),
        (("<tried_bytes:size>", "<tried_bytes:stone>"), "there is no unit 'stone'"),
        (("arena of", "arena (of"), "no regular expression"),
        (("arena of", ".*arena of"), "may be slow"),
        (("is ready", "is full"), "near miss is matched too"),
        (('examples = ["OurPlugin', 'examples = ["TheirPlugin'), "example isn't matched"),
        (("near_misses", "nearmisses"), "there is no key 'nearmisses'"),
        (('near_misses = ["OurPlugin: arena of 3.50 GiB is ready"]', ""), "near_misses is missing"),
        (('"our_plugin"', '"torch_oom"'), "the name is taken"),
        (('name = "our_plugin"', "name = 7"), "has to be a text"),
        (("[[signature]]", "[[signature"), "has to be TOML"),
        (("[[signature]]", "[[signatures]]"), "holds no signature"),
    ],
)
def test_a_mistake_is_one_clear_line(change: tuple[str, str], says: str, tmp_path: Path) -> None:
    (tmp_path / "good.toml").write_text(GOOD.replace("our_plugin", "another"))
    (tmp_path / "own.toml").write_text(GOOD.replace(*change))
    loaded = load_signatures(tmp_path)
    assert [says in str(problem) and "own.toml" in str(problem) for problem in loaded.problems] == [True]
    assert loaded.signatures[0].name == "another"  # the rest is used
    assert len(loaded.signatures) == len(SIGNATURES) + 1
    done = run("signatures", "--signatures", str(tmp_path))
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert says in done.stderr


def test_the_documentation_is_made_from_the_table() -> None:
    made = run("signatures", "--markdown").stdout
    assert DOCS.read_text().endswith(made), "supervisor-vllm signatures --markdown says something else"


def test_the_list_for_programs() -> None:
    rows = json.loads(run("signatures", "--json").stdout)["signatures"]
    assert [row["name"] for row in rows] == [signature.name for signature in SIGNATURES]
    assert all(row["examples"] and row["near_misses"] and row["words"] for row in rows)
