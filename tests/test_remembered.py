"""What was learned belongs to a model, a vLLM, a device: another one never gets it, the same one starts right again."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from host import Host
from test_people import tight_host
from world import wait_until

from supervisor_vllm.errors import UserError
from supervisor_vllm.evidence.installed_vllm import installed_version
from supervisor_vllm.fleet import exported, import_text
from supervisor_vllm.incident import Change
from supervisor_vllm.journal import open_journal
from supervisor_vllm.policy.fingerprint import Fingerprint, deciding_flags, difference
from supervisor_vllm.policy.launch_command import parse_launch

MakeHost = Callable[..., Host]
MINE = Fingerprint(
    "org/m", (("dtype", "bfloat16"),), "abc", 15 * 10**9, "0.32.0", ("NVIDIA L4 23609999999",), "580.95.05"
)


@pytest.mark.parametrize(
    ("now", "words"),
    [
        (MINE, None),
        (dataclasses.replace(MINE, devices=()), None),  # not seen yet
        (dataclasses.replace(MINE, vllm_version=None), None),
        (dataclasses.replace(MINE, model="/elsewhere/m"), None),  # the same files by another name
        (dataclasses.replace(MINE, model_digest="def"), "another model"),
        (dataclasses.replace(MINE, model="org/n", model_digest=None), "another model"),
        (dataclasses.replace(MINE, weights_bytes=8 * 10**9), "weights of another size"),
        (dataclasses.replace(MINE, vllm_version="0.33.0"), "another vLLM"),
        (dataclasses.replace(MINE, devices=("NVIDIA H100 85000000000",)), "other devices"),
        (dataclasses.replace(MINE, driver="590.1"), "another driver (580.95.05 → 590.1)"),
        (dataclasses.replace(MINE, driver=""), None),
        (dataclasses.replace(MINE, flags=(("dtype", "bfloat16"), ("quantization", "fp8"))), "--quantization"),
    ],
)
def test_what_is_the_same_thing(now: Fingerprint, words: str | None) -> None:
    said = difference(MINE, now)
    assert said is None if words is None else words in str(said)


def test_flags_that_are_learned_and_names_dont_decide() -> None:
    one = parse_launch(
        "vllm serve M --port 1 --served-model-name a --max-model-len 5 --tensor-parallel-size 2 --dtype half"
    )
    assert deciding_flags(one) == (("dtype", "half"), ("tensor-parallel-size", "2"))
    assert deciding_flags(one) == deciding_flags(parse_launch("vllm serve M -tp 2 --dtype=half --max-num-seqs 9"))


def test_the_installed_vllm_is_known_without_running_it(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    for name in ("vllm", "python3"):
        (tmp_path / "bin" / name).touch(mode=0o755)
    packages = tmp_path / "lib" / "python3.12" / "site-packages"
    (packages / "vllm-0.29.1.post1.dist-info").mkdir(parents=True)
    (packages / "vllm_ascend-0.1.dist-info").mkdir()
    path = {"PATH": f"{tmp_path}/bin"}
    for command in (
        "vllm serve M",
        f"{tmp_path}/bin/vllm serve M",
        f"env A=1 {tmp_path}/bin/python3 -m vllm.entrypoints.openai.api_server --model M",
        f"bash -c 'exec {tmp_path}/bin/vllm serve M'",
    ):
        assert installed_version(parse_launch(command), path) == "0.29.1.post1", command
    assert installed_version(parse_launch("/nowhere/bin/vllm serve M"), path) is None
    (packages / "vllm-0.30.0.dist-info").mkdir()
    assert installed_version(parse_launch("vllm serve M"), path) is None  # half of an upgrade


def test_an_import_is_never_stronger_than_what_was_measured(tmp_path: Path) -> None:
    journal = open_journal(tmp_path / "state")
    own = (Change("--max-model-len", "32768", "8192", "measured"),)
    other = (Change("--max-model-len", "32768", "4096", "elsewhere"),)
    journal.remember(MINE, other, when=1.0, origin="imported")
    journal.remember(MINE, own, when=2.0)
    journal.remember(MINE, other, when=3.0, origin="imported")
    (row,) = journal.remembered()
    assert (row.changes, row.origin, row.fingerprint) == (own, "measured", MINE)


def test_another_model_starts_as_the_user_wrote_it_and_the_first_one_right_again(vllm_host: MakeHost) -> None:
    host = tight_host(vllm_host).start()
    host.wait_healthy_again()
    learned = host.override_command()
    assert learned and "--max-model-len 32768" not in learned
    first = host.user_file.read_text()
    model = parse_launch(learned).model
    assert model

    host.user_file.write_text(first.replace(model, f"{model}-other"))
    wait_until(lambda: host.override_command() is None, 20, "what was learned of the first model to go")
    assert "another model" in host.listener_log()

    host.user_file.write_text(first)
    wait_until(lambda: host.override_command() == learned, 20, "what was learned of this model to come back")
    host.supervisord.ctl("update")
    host.wait_state("HEALTHY")
    assert "--max-model-len 32768" not in " ".join(host.running_command())
    assert len(host.history()) == 1  # it started right the first time


def test_export_and_import(tmp_path: Path) -> None:
    here, there = open_journal(tmp_path / "here"), open_journal(tmp_path / "there")
    learned = (Change("--max-model-len", "32768", "8192", "what fits"),)
    here.remember(MINE, learned, when=1000.0)
    here.remember(dataclasses.replace(MINE, model_digest="x"), (), when=1001.0)  # nothing to tell
    here.remember(dataclasses.replace(MINE, model_digest="y"), learned, when=1002.0, origin="imported")
    text = json.dumps(exported(here))
    assert import_text(there, text, "f.json") == 1
    (row,) = there.remembered()
    assert (row.fingerprint, row.changes, row.time, row.origin) == (MINE, learned, 1000.0, "imported")
    assert exported(there)["learned"] == []


def _file(**changed: object) -> str:
    change = {"flag": "--max-model-len", "from": "1", "to": "2", "why": "w"} | changed
    entry = {"fingerprint": {"model": "m"}, "changes": [change], "time": "2026-01-01T00:00:00+00:00"}
    return json.dumps({"format": "supervisor-vllm learned arguments 1", "learned": [entry]})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[" * 100_000,
        '{"format": "supervisor-vllm learned arguments 1", "learned": [3]}',
        _file(flag="--trust-remote-code"),
        _file(to="1; reboot"),
        _file(to="/etc/passwd"),
        _file(to=7),
    ],
)
def test_a_file_that_is_none_changes_nothing(text: str, tmp_path: Path) -> None:
    journal = open_journal(tmp_path / "state")
    with pytest.raises(UserError):
        import_text(journal, text, "f.json")
    assert journal.remembered() == []
