"""Words of a command with the places of their characters: so that a value is changed where it stands. Pure.

Two languages: supervisord splits `command=` as shlex does (quotes and backslashes, no operators); a shell's script
(`sh -c '…'`) also has operators, redirections and comments. A word of the one may hold a script of the other, and each
character still knows its place in the raw text of the configuration file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_OPERATORS = frozenset(";&|()<>\n")


@dataclass(frozen=True)
class Character:
    """One character after unquoting. `place`: its index in the raw text; `begin`: that of a backslash before it."""

    text: str
    place: int
    begin: int


@dataclass(frozen=True)
class Word:
    """`start` and `end` are raw places, quotes included. `operator`: a shell's `;`, `|`, `>` …, not a word."""

    characters: tuple[Character, ...]
    start: int
    end: int
    operator: bool = False

    @property
    def text(self) -> str:
        return "".join(character.text for character in self.characters)


def raw_characters(text: str) -> tuple[Character, ...]:
    return tuple(Character(character, place, place) for place, character in enumerate(text))


def split(characters: Sequence[Character], *, shell: bool) -> list[Word]:
    """The words. An unclosed quote reaches to the end: what supervisord or the shell refuses isn't ours to judge."""
    words: list[Word] = []
    position = 0
    while position < len(characters):
        character = characters[position].text
        if shell and character in _OPERATORS:
            words.append(_operator(characters, position))
            position += len(words[-1].characters)
        elif character.isspace():
            position += 1
        elif shell and character == "#":
            position = _line_end(characters, position)
        else:
            word, position = _word(characters, position, shell=shell)
            words.append(word)
    return words


def _operator(characters: Sequence[Character], position: int) -> Word:
    end = position + 1
    while end < len(characters) and characters[end].text in "&|<>;" and characters[position].text != "\n":
        end += 1
    found = tuple(characters[position:end])
    return Word(found, found[0].begin, found[-1].place + 1, operator=True)


def _line_end(characters: Sequence[Character], position: int) -> int:
    while position < len(characters) and characters[position].text != "\n":
        position += 1
    return position


def _word(characters: Sequence[Character], position: int, *, shell: bool) -> tuple[Word, int]:
    begin, quote = position, ""
    found: list[Character] = []
    while position < len(characters):
        character = characters[position]
        following = characters[position + 1].text if position + 1 < len(characters) else ""
        if quote:
            if character.text == quote:
                quote = ""
            elif character.text == "\\" and quote == '"' and following in ('"', "\\", *("$`\n" if shell else "")):
                position += 1
                if following != "\n" or not shell:
                    found.append(_escaped(character, characters[position]))
            else:
                found.append(character)
        elif character.text in "'\"":
            quote = character.text
        elif character.text == "\\" and following:
            position += 1
            if not (shell and following == "\n"):
                found.append(_escaped(character, characters[position]))
        elif character.text.isspace() or (shell and character.text in _OPERATORS):
            break
        else:
            found.append(character)
        position += 1
    return Word(tuple(found), characters[begin].begin, characters[position - 1].place + 1), position


def _escaped(backslash: Character, character: Character) -> Character:
    return Character(character.text, character.place, backslash.begin)


def simple_commands(words: Sequence[Word]) -> list[list[Word]]:
    """A script's words, command by command, without operators and redirections (`2> file`, `>&2`)."""
    commands: list[list[Word]] = [[]]
    skip_next = False
    for index, word in enumerate(words):
        if word.operator:
            redirection = any(sign in word.text for sign in "<>")
            skip_next = redirection
            if (not redirection and word.text != "&") or word.text == "&":
                commands.append([])
            continue
        following = words[index + 1] if index + 1 < len(words) else None
        if skip_next:
            skip_next = False
        elif _is_descriptor(word, following):
            continue
        else:
            commands[-1].append(word)
    return [command for command in commands if command]


def _is_descriptor(word: Word, following: Word | None) -> bool:
    """The 2 of `2>file`: digits that touch a redirection."""
    return bool(
        word.text.isdigit()
        and following
        and following.operator
        and following.text[0] in "<>"
        and word.end == following.start
    )
