"""The README says what the code has, and the Chinese one says the same."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from supervisor_vllm.cli import _parser
from supervisor_vllm.kinds import KINDS
from supervisor_vllm.settings import TABLE

REPOSITORY = Path(__file__).resolve().parent.parent
ENGLISH = (REPOSITORY / "README.md").read_text()
CHINESE = (REPOSITORY / "README.zh-CN.md").read_text()


def rows(text: str) -> list[list[str]]:
    return [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| ")
    ]


@pytest.mark.parametrize("text", [ENGLISH, CHINESE], ids=["en", "zh"])
def test_every_setting_with_its_default(text: str) -> None:
    stated = {row[0]: row[1] for row in rows(text)}
    for setting in TABLE:
        assert stated[setting.name] == (setting.default_text or "(none)"), setting.name


def test_the_settings_meanings_are_the_codes() -> None:
    stated = {row[0]: row[2] for row in rows(ENGLISH) if len(row) > 2}
    assert all(stated[setting.name] == setting.help for setting in TABLE)


@pytest.mark.parametrize("text", [ENGLISH, CHINESE], ids=["en", "zh"])
def test_every_kind(text: str) -> None:
    stated = [row[0] for row in rows(text) if row[0] in KINDS]
    assert stated == list(KINDS)


def test_the_kinds_meanings_are_the_codes() -> None:
    stated = {row[0]: row[1] for row in rows(ENGLISH)}
    assert all(stated[kind.name] == kind.means for kind in KINDS.values())


def test_every_verb() -> None:
    verbs = next(action.choices for action in _parser()._actions if action.choices)
    assert verbs
    for verb in verbs:
        assert f"supervisor-vllm {verb} " in ENGLISH, verb


def test_both_languages_have_the_same_shape() -> None:
    def shape(text: str) -> list[str]:
        return [line.split(" ")[0] for line in text.splitlines() if line.startswith("#")]

    assert shape(ENGLISH) == shape(CHINESE)
    assert len(rows(ENGLISH)) == len(rows(CHINESE))


def test_the_commands_are_the_same() -> None:
    def commands(text: str) -> list[str]:
        blocks = re.findall(r"```\w*\n(.*?)```", text, re.S)
        return [line.split("  ")[0].strip() for block in blocks for line in block.splitlines()]

    assert commands(ENGLISH) == commands(CHINESE)


def test_the_make_commands_exist() -> None:
    makefile = (REPOSITORY / "Makefile").read_text()
    for target in re.findall(r"^make ([\w-]+)", ENGLISH, re.M):
        assert f"\n{target}:" in makefile
