"""Signatures of the user's own, in `signatures.d/*.toml` beside the settings: checked before they decide anything.

    [[signature]]
    name = "our_plugin"
    kind = "gpu_oom"
    pattern = 'OurPlugin: arena of <tried_bytes:size> is full'
    examples = ["OurPlugin: arena of 3.50 GiB is full"]
    near_misses = ["OurPlugin: arena of 3.50 GiB is ready"]

They stand above the built-in ones: on the same line the user's word counts.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from ..errors import UserError
from ..incident import Confidence
from ..kinds import KINDS
from .expression import required_words, trouble_of
from .pattern import UNITS, Role, Signature, plain_source
from .phase import PHASES
from .signatures import SIGNATURES
from .wording import readings

_TEXTS = ("name", "kind", "pattern", "versions", "source", "phase", "confidence", "role")
_LISTS = ("examples", "near_misses", "words")


@dataclass(frozen=True)
class Loaded:
    """`signatures`: the user's, then the built-in ones. `problems`: one sentence each; that file isn't used."""

    signatures: tuple[Signature, ...]
    problems: tuple[UserError, ...] = ()


def load_signatures(folder: Path) -> Loaded:
    """Never raises: a listener goes on with what is right, and says what isn't."""
    own: list[Signature] = []
    problems: list[UserError] = []
    for path in sorted(folder.glob("*.toml")):
        try:
            own += _read(path, {signature.name for signature in (*own, *SIGNATURES)})
        except UserError as problem:
            problems.append(problem)
    return Loaded((*own, *SIGNATURES), tuple(problems))


def _read(path: Path, taken: set[str]) -> list[Signature]:
    try:
        rows = _toml().loads(path.read_text(encoding="utf-8")).get("signature")
    except OSError as why:
        raise UserError(f"{path} can't be read: {why.strerror or why}", hint="check its rights") from None
    except ValueError as why:  # TOMLDecodeError, UnicodeDecodeError
        raise UserError(f"{path}: {why}", hint="it has to be TOML with [[signature]] tables") from None
    if not isinstance(rows, list) or not rows:
        raise UserError(f"{path} holds no signature", hint="write [[signature]] above each")
    signatures = []
    for number, row in enumerate(rows, 1):
        where = f"{path}: signature {number}" + (f" ({row['name']})" if isinstance(row.get("name"), str) else "")
        signature = _checked(where, row)
        if signature.name in taken:
            raise UserError(f"{where}: the name is taken", hint="see supervisor-vllm signatures")
        taken.add(signature.name)
        signatures.append(signature)
    return signatures


def _toml() -> Any:
    return importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")


def _checked(where: str, row: dict[str, Any]) -> Signature:
    def wrong(text: str, hint: str) -> UserError:
        return UserError(f"{where}: {text}", hint=hint)

    if unknown := sorted(row.keys() - {*_TEXTS, *_LISTS, "anywhere"}):
        raise wrong(f"there is no key {unknown[0]!r}", "known are: " + ", ".join((*_TEXTS, *_LISTS, "anywhere")))
    if missing := [key for key in ("name", "kind", "pattern", "examples", "near_misses") if not row.get(key)]:
        raise wrong(f"{missing[0]} is missing", "an example and a near miss are how a pattern is checked")
    if not all(isinstance(row.get(key, ""), str) for key in _TEXTS):
        raise wrong("a value that has to be a text is none", "write it in quotes")
    if not all(_is_texts(row.get(key, [])) for key in _LISTS):
        raise wrong("examples, near_misses and words are lists of texts", 'write examples = ["…"]')
    for key, allowed in (("kind", (*KINDS, "by_phase")), ("phase", PHASES), *_ROLES):
        if row.get(key) is not None and row[key] not in allowed:
            raise wrong(f"there is no {key} {row[key]!r}", "one of: " + ", ".join(allowed))
    return _compiled(row, wrong)


_ROLES = (("confidence", get_args(Confidence)), ("role", get_args(Role)))


def _is_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) and item for item in value)


def _compiled(row: dict[str, Any], wrong: Any) -> Signature:
    try:
        source = plain_source(row["pattern"])
        re.compile(source)
    except KeyError as why:
        raise wrong(f"there is no unit {why}", "one of: " + ", ".join(UNITS)) from None
    except (re.error, RecursionError, OverflowError) as why:
        raise wrong(f"the pattern is no regular expression: {why}", "write it in single quotes") from None
    if trouble := trouble_of(source):
        raise wrong(f"the pattern may be slow: {trouble}", "a line must cost time in proportion to its length")
    words = tuple(row.get("words", ())) or tuple(sorted(required_words(source)))
    if not words:
        raise wrong("no word is in every match", 'name one in each branch: words = ["…"]')
    given: dict[str, Any] = {key: row[key] for key in _TEXTS if row.get(key) is not None}
    given |= {key: tuple(row[key]) for key in ("examples", "near_misses")}
    signature = Signature(**given, words=words, anywhere=bool(row.get("anywhere", False)))
    if missed := _first(signature.examples, lambda text: not _matches(signature, text)):
        raise wrong(f"its example isn't matched: {missed}", "a match begins where the message begins")
    if hit := _first(signature.near_misses, lambda text: signature.search(text) is not None):
        raise wrong(f"its near miss is matched too: {hit}", "make the pattern narrower")
    return signature


def _matches(signature: Signature, text: str) -> bool:
    return any(signature.match(reading) for reading in readings(text)) or (
        signature.anywhere and signature.search(text) is not None
    )


def _first(texts: Iterable[str], condition: Any) -> str | None:
    return next((text for text in texts if condition(text)), None)
