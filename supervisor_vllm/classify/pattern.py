"""How a signature is written: a regular expression with typed holes for the numbers.

`<free_bytes:gib>` is a hole: the number's name in `incident.Numbers` and the unit that stands in the text. The
expressions have no nested quantifiers, so that a line costs time in proportion to its length.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ..incident import Confidence, Numbers

_NUMBER = r"-?\d{1,18}(?:\.\d{1,9})?"
_SIZE = r"\d{1,18}(?:\.\d{1,9})? ?(?:bytes|[KMGTP]i?B|B)\b"
_HOLE = re.compile(r"<(\w+):(\w+)>")
_SCALE = {"bytes": 0, "B": 0, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5}


def size_bytes(text: str) -> int:
    """`3.82 GiB` → bytes. Torch and vLLM mean 1024 everywhere, also where they print GB."""
    match = re.match(r"(\d+(?:\.\d+)?) ?([A-Za-z]+)", text)
    if not match:
        raise ValueError(text)
    power = _SCALE.get(match[2], _SCALE.get(match[2][0], 0))
    size: int = round(float(match[1]) * 2 ** (10 * power))
    return size


#: unit → (what matches, how it becomes a number)
_UNITS: dict[str, tuple[str, Callable[[str], float]]] = {
    "gib": (_NUMBER, lambda text: round(float(text) * 2**30)),
    "mib": (_NUMBER, lambda text: round(float(text) * 2**20)),
    "bytes": (r"\d{1,18}", int),
    "count": (r"\d{1,18}", int),
    "float": (_NUMBER, float),
    "size": (_SIZE, size_bytes),
    "device": (r"(?:[a-z]{2,8}:)?\d{1,3}", lambda text: int(text.rpartition(":")[2])),
}


def pattern(source: str) -> re.Pattern[str]:
    """The compiled expression. A hole becomes a group named `<number>__<unit>`."""
    return re.compile(_HOLE.sub(lambda hole: f"(?P<{hole[1]}__{hole[2]}>{_UNITS[hole[2]][0]})", source))


def numbers_of(match: re.Match[str]) -> Numbers:
    """The numbers in a match, in bytes, tokens, fractions. A hole that isn't filled is left out."""
    found: Numbers = {}
    for group, text in match.groupdict().items():
        name, _, unit = group.partition("__")
        if text is not None:
            found[name] = _UNITS[unit][1](text)
    return found


#: cause: a root cause, the first in time decides. vague: says that something is wrong, a cause beside it says more.
#: hint: no error, but a number that can't work; decides only where nothing else does.
Role = Literal["cause", "vague", "hint"]


@dataclass(frozen=True)
class Signature:
    """A wording that decides. `kind` "by_phase": of the phase in which it stands.

    `anywhere`: the words may stand inside an error line too (then only "likely"); otherwise at its beginning.
    `source`: where vLLM (or torch, …) says it, and the versions. `example` matches, `near_miss` doesn't.
    """

    name: str
    kind: str
    pattern: re.Pattern[str]
    source: str
    example: str
    near_miss: str
    phase: str | None = None
    confidence: Confidence = "proven"
    role: Role = "cause"
    anywhere: bool = False
