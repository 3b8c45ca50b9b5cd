"""How a signature is written: a regular expression with typed holes for the numbers.

`<free_bytes:gib>` is a hole: the number's name in `incident.Numbers` and the unit that stands in the text.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from ..incident import Confidence, Numbers
from ..lazy import lazy

_NUMBER = r"-?\d{1,18}(?:\.\d{1,9})?"
_SIZE = r"\d{1,18}(?:\.\d{1,9})? ?(?:bytes|[KMGTP]i?B|B)\b"
_HOLE = re.compile(r"<(\w+):(\w+)>")
_SCALE = {"bytes": 0, "B": 0, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5}
_SIZE_PARTS = lazy(r"(\d+(?:\.\d+)?) ?([A-Za-z]+)")


def size_bytes(text: str) -> int:
    """`3.82 GiB` → bytes. Torch and vLLM mean 1024 everywhere, also where they print GB."""
    match = _SIZE_PARTS.match(text)
    if not match:
        raise ValueError(text)
    power = _SCALE.get(match[2], _SCALE.get(match[2][0], 0))
    size: int = round(float(match[1]) * 2 ** (10 * power))
    return size


#: unit → (what matches, how it becomes a number)
UNITS: dict[str, tuple[str, Callable[[str], float]]] = {
    "gib": (_NUMBER, lambda text: round(float(text) * 2**30)),
    "mib": (_NUMBER, lambda text: round(float(text) * 2**20)),
    "bytes": (r"\d{1,18}", int),
    "count": (r"\d{1,18}", int),
    "float": (_NUMBER, float),
    "size": (_SIZE, size_bytes),
    "device": (r"(?:[a-z]{2,8}:)?\d{1,3}", lambda text: int(text.rpartition(":")[2])),
}


def plain_source(source: str) -> str:
    """The regular expression: a hole becomes a group named `<number>__<unit>`. KeyError: an unknown unit."""
    return _HOLE.sub(lambda hole: f"(?P<{hole[1]}__{hole[2]}>{UNITS[hole[2]][0]})", source)


def pattern(source: str) -> re.Pattern[str]:
    return lazy(plain_source(source))


def numbers_of(match: re.Match[str]) -> Numbers:
    """The numbers in a match, in bytes, tokens, fractions. A hole that isn't filled is left out."""
    found: Numbers = {}
    for group, text in match.groupdict().items():
        name, _, unit = group.partition("__")
        if text is not None:
            found[name] = UNITS[unit][1](text)
    return found


#: cause: a root cause, the first in time decides. vague: says that something is wrong, a cause beside it says more.
#: hint: no error, but a number that can't work; decides only where nothing else does.
Role = Literal["cause", "vague", "hint"]


@dataclass(frozen=True)
class Signature:
    """A wording that decides. `kind` "by_phase": of the phase in which it stands.

    `anywhere`: the words may stand inside an error line too (then only "likely"); otherwise at its beginning.
    `words`: a line without any of them isn't looked at. `versions`: vLLM's first and last that say it; empty where it
    isn't vLLM that speaks. `source`: where it is said.
    """

    name: str
    kind: str
    pattern: str
    versions: str = ""
    source: str = ""
    words: tuple[str, ...] = ()
    examples: tuple[str, ...] = ()
    near_misses: tuple[str, ...] = ()
    phase: str | None = None
    confidence: Confidence = "proven"
    role: Role = "cause"
    anywhere: bool = False

    @cached_property
    def expression(self) -> re.Pattern[str]:
        return re.compile(plain_source(self.pattern))

    @property
    def numbers(self) -> tuple[str, ...]:
        """The names of the numbers that it yields."""
        return tuple(dict.fromkeys(hole[1] for hole in _HOLE.finditer(self.pattern)))

    def match(self, text: str) -> re.Match[str] | None:
        """At the beginning of the text."""
        return self.expression.match(text) if self._may_be(text) else None

    def search(self, text: str) -> re.Match[str] | None:
        """Anywhere in the text."""
        return self.expression.search(text) if self._may_be(text) else None

    def _may_be(self, text: str) -> bool:
        return any(word in text for word in self.words)
