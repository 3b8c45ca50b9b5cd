"""What a signature's expression promises: the words that every match holds, and how long it can take.

Python's matcher tries again from each place where it had a choice. An expression is safe where those choices can't
multiply: then a line costs time in proportion to its length, whatever stands in it.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Sequence
from typing import Any

# the module got its name in Python 3.11
_parser: Any = importlib.import_module("re._parser" if sys.version_info >= (3, 11) else "sre_parse")

#: Of a search that begins at each of a line's characters: so many ways from one place.
MAX_WAYS = 10_000
_MIN_WORD_CHARS = 3
_UNBOUNDED = 2**16

#: Characters that stand for all: ASCII, and what isn't.
_SAMPLE = frozenset(range(128)) | {0xE9, 0x4E2D, 0x2026}
_SPACE = frozenset(code for code in _SAMPLE if chr(code).isspace())
_DIGIT = frozenset(code for code in _SAMPLE if chr(code).isdigit())
_WORD = frozenset(code for code in _SAMPLE if chr(code).isalnum() or chr(code) == "_")
_CATEGORIES = {
    "CATEGORY_DIGIT": _DIGIT,
    "CATEGORY_NOT_DIGIT": _SAMPLE - _DIGIT,
    "CATEGORY_SPACE": _SPACE,
    "CATEGORY_NOT_SPACE": _SAMPLE - _SPACE,
    "CATEGORY_WORD": _WORD,
    "CATEGORY_NOT_WORD": _SAMPLE - _WORD,
}


def required_words(source: str) -> frozenset[str]:
    """One of these is in every text that matches; empty where nothing is sure. re.error: no expression."""
    return _words(_parser.parse(source)) or frozenset()


def trouble_of(source: str) -> str | None:
    """Why the expression could be slow; None: it can't. re.error: no expression."""
    tree = _parser.parse(source)
    if repeat := _unbounded(tree):
        return f"`{repeat}` has no limit: write {{0,200}} or the like"
    ways = _ways(tree, frozenset())
    if ways > MAX_WAYS:
        return f"it can be tried in {ways:,} ways at one place, {MAX_WAYS:,} are allowed: its repeats overlap"
    return None


def _name(operation: object) -> str:
    return str(operation)


def _words(tree: Iterable[Any]) -> frozenset[str] | None:
    found: list[frozenset[str]] = []
    run = ""
    for operation, argument in tree:
        name = _name(operation)
        if name == "LITERAL":
            run += chr(argument)
            continue
        if name == "AT":
            continue
        found.append(frozenset({run}))
        run = ""
        inner = _inner_words(name, argument)
        if inner:
            found.append(inner)
    found.append(frozenset({run}))
    usable = [words for words in found if min(map(len, words)) >= _MIN_WORD_CHARS]
    return max(usable, key=lambda words: min(map(len, words)) - 2 * len(words), default=None)


def _inner_words(name: str, argument: Any) -> frozenset[str] | None:
    if name == "SUBPATTERN":
        return _words(argument[3])
    if name == "BRANCH":
        branches = [_words(branch) for branch in argument[1]]
        return frozenset().union(*branches) if all(branches) else None  # type: ignore[arg-type]
    if name in ("MAX_REPEAT", "MIN_REPEAT") and argument[0] >= 1:
        return _words(argument[2])
    return None


def _children(name: str, argument: Any) -> Sequence[Any]:
    if name == "SUBPATTERN":
        return (argument[3],)
    if name == "BRANCH":
        return tuple(argument[1])
    if name in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
        return (argument[2],)
    if name in ("ASSERT", "ASSERT_NOT"):
        return (argument[1],)
    return ()


def _unbounded(tree: Iterable[Any]) -> str | None:
    for operation, argument in tree:
        name = _name(operation)
        if name.endswith("REPEAT") and int(argument[1]) >= _UNBOUNDED:
            return "+" if argument[0] else "*"
        for child in _children(name, argument):
            if found := _unbounded(child):
                return found
    return None


def _ways(tree: Iterable[Any], after: frozenset[int]) -> int:
    """In how many ways the tree can be tried from one place. `after`: what may follow it (empty: nothing must)."""
    ways = 1
    for operation, argument in reversed(list(tree)):
        name = _name(operation)
        if name == "BRANCH":
            ways *= sum(_ways(branch, after) for branch in argument[1])
        elif name.endswith("REPEAT"):
            low, high, body = int(argument[0]), int(argument[1]), argument[2]
            begins = _begins(body)
            ways *= _ways(body, begins | after) ** max(1, high)
            if high > low and begins & after:
                ways *= high - low + 1
        else:
            for child in _children(name, argument):
                ways *= _ways(child, after)
        own, may_be_empty = _first(name, argument)
        after = own | after if may_be_empty else own
    return ways


def _begins(tree: Iterable[Any]) -> frozenset[int]:
    """The characters with which the tree can begin."""
    found: frozenset[int] = frozenset()
    for operation, argument in tree:
        own, may_be_empty = _first(_name(operation), argument)
        found |= own
        if not may_be_empty:
            break
    return found


def _first(name: str, argument: Any) -> tuple[frozenset[int], bool]:
    """(the characters with which one element can begin, can it be empty?)"""
    if name in ("AT", "ASSERT", "ASSERT_NOT"):
        return frozenset(), True
    if name == "SUBPATTERN":
        return _begins(argument[3]), _may_be_empty(argument[3])
    if name == "BRANCH":
        return frozenset().union(*map(_begins, argument[1])), any(map(_may_be_empty, argument[1]))
    if name.endswith("REPEAT"):
        return _begins(argument[2]), argument[0] == 0 or _may_be_empty(argument[2])
    return _characters(name, argument), False


def _may_be_empty(tree: Iterable[Any]) -> bool:
    return all(_first(_name(operation), argument)[1] for operation, argument in tree)


def _characters(name: str, argument: Any) -> frozenset[int]:
    if name == "LITERAL":
        return frozenset({argument if argument < 128 else 0xE9})
    if name == "NOT_LITERAL":
        return _SAMPLE - {argument}
    if name == "ANY":
        return _SAMPLE - {10}
    if name == "RANGE":
        return frozenset(code for code in _SAMPLE if argument[0] <= code <= argument[1])
    if name == "CATEGORY":
        return _CATEGORIES.get(_name(argument), _SAMPLE)
    if name == "IN":
        inside: frozenset[int] = frozenset()
        for operation, value in argument:
            if _name(operation) != "NEGATE":
                inside |= _characters(_name(operation), value)
        return _SAMPLE - inside if _name(argument[0][0]) == "NEGATE" else inside
    return _SAMPLE
