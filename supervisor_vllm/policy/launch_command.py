"""A vLLM launch command as it stands in `command=`: found, read, and changed in place. Pure.

It works on the raw text of the user's file (supervisord's `%(…)s` not expanded, over several lines): a change replaces
the value's characters, or adds the flag behind vLLM's own last argument, and touches nothing else.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from ..lazy import lazy
from ..redaction import redact_text as redact
from .arguments import ALL, BARE, MANY, SHORT
from .words import Character, Word, raw_characters, simple_commands, split

__all__ = ["LaunchCommand", "parse_launch", "redact", "with_flag"]

_SHELLS = frozenset({"sh", "bash", "dash", "zsh", "ksh", "ash", "busybox"})
#: vLLM's server as a module (`python -m …`): by itself, and with the word serve.
_SERVER_MODULES = frozenset({"vllm.entrypoints.openai.api_server", "vllm.entrypoints.api_server"})
_CLI_MODULES = frozenset({"vllm", "vllm.entrypoints.cli.main"})
#: What only talks about a command.
_NOT_LAUNCHERS = frozenset({"echo", "printf", "grep", "pgrep", "pkill", "test", "which", "cat"})
_ASSIGNMENT = lazy(r"[A-Za-z_][A-Za-z0-9_]*=")
_HUMAN_INT = lazy(r"(\d+(?:\.\d+)?)([kKmMgGtT])")
_DECIMAL = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True)
class Argument:
    """One flag as it stands: `name` without dashes in vLLM's long spelling, `words` its own word and its values."""

    name: str
    words: tuple[Word, ...]
    #: index of the first character of the value in the flag's own word (`--flag=value`), or None
    value_at: int | None = None
    negated: bool = False

    @property
    def value(self) -> str:
        """`true` and `false` for bare flags."""
        if self.value_at is not None:
            return self.words[0].text[self.value_at :]
        if len(self.words) > 1:
            return " ".join(word.text for word in self.words[1:])
        return "false" if self.negated else "true"


@dataclass(frozen=True)
class LaunchCommand:
    """What a command starts. Values are as they stand (`%%` read as `%`)."""

    raw: str
    is_vllm: bool = False
    arguments: tuple[Argument, ...] = ()
    positionals: tuple[Word, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    shell: bool = False
    #: vLLM's own words: the one that names it, and the last one that belongs to it
    program: Word | None = None
    last: Word | None = None
    #: a literal `--`, before which new flags go
    terminator: Word | None = None
    #: the vllm program or the Python that runs it, as it stands
    executable: str | None = None

    def find(self, flag: str) -> Argument | None:
        """The occurrence that counts: argparse takes the last one."""
        name = flag.lstrip("-").replace("_", "-")
        return next((argument for argument in reversed(self.arguments) if argument.name == name), None)

    def get(self, flag: str) -> str | None:
        argument = self.find(flag)
        return None if argument is None else argument.value.replace("%%", "%")

    @property
    def model(self) -> str | None:
        if self.positionals:
            return self.positionals[0].text.replace("%%", "%")
        return self.get("--model") or self.get("--model-tag")

    @property
    def host(self) -> str | None:
        return self.get("--host")

    @property
    def port(self) -> int:
        text = self.get("--port") or ""
        return int(text) if text.isdigit() else 8000

    @property
    def uds(self) -> str | None:
        return self.get("--uds")

    @property
    def root_path(self) -> str | None:
        return self.get("--root-path")

    @property
    def served_model_names(self) -> tuple[str, ...]:
        return tuple((self.get("--served-model-name") or "").split())

    @property
    def api_key(self) -> str | None:
        """The first of them: any does."""
        return next(iter((self.get("--api-key") or "").split()), None)

    @property
    def max_model_len(self) -> int | None:
        """None where it isn't given, or left to vLLM (auto, -1)."""
        return whole_number(self.get("--max-model-len"))

    @property
    def local_ranks(self) -> int:
        """Workers, each with its device, on this machine; too many where others take part."""
        here = self.get("--data-parallel-size-local") or self.get("--data-parallel-size")
        sizes = (self.get("--tensor-parallel-size"), self.get("--pipeline-parallel-size"), here)
        return math.prod(whole_number(size) or 1 for size in sizes)


def whole_number(text: str | None) -> int | None:
    """vLLM's spelling of whole numbers: 32k is 32000, 32K is 32768 (0.32 engine/arg_utils.py, measured). None for
    anything else, auto and negative ones included."""
    if text is None:
        return None
    if text.isascii() and text.isdigit():
        return int(text)
    match = _HUMAN_INT.fullmatch(text)
    if not match:
        return None
    number, unit = match.groups()
    return int(float(number) * (_DECIMAL.get(unit) or _BINARY[unit]))


@lru_cache(maxsize=64)
def parse_launch(command: str) -> LaunchCommand:
    """Never raises. `is_vllm` is False where vLLM's own arguments can't be seen (a script, an expansion)."""
    return _parse(command, raw_characters(command), shell=False, depth=0) or LaunchCommand(command)


def _parse(raw: str, characters: Sequence[Character], *, shell: bool, depth: int) -> LaunchCommand | None:
    words = split(characters, shell=shell)
    commands = simple_commands(words) if shell else [words]
    for command in reversed(commands):
        found = _parse_words(raw, command, shell=shell, depth=depth)
        if found:
            return _with_exports(found, commands) if shell else found
    return None


def _parse_words(raw: str, words: list[Word], *, shell: bool, depth: int) -> LaunchCommand | None:
    if words and _name(words[0]) in _NOT_LAUNCHERS:
        return None
    script = _shell_script(words)
    if script is not None and depth < 3:
        inner = _parse(raw, words[script].characters, shell=True, depth=depth + 1)
        if inner:
            return _with_environment(inner, words[:script], shell=True)
    begin = _server_arguments(words)
    if begin is None:
        return None
    arguments, positionals, terminator = _arguments(words[begin:])
    module = any(word.text in _SERVER_MODULES or word.text.endswith("/api_server.py") for word in words[:begin])
    found = LaunchCommand(
        raw,
        is_vllm=True,
        arguments=arguments,
        positionals=() if module else positionals,
        shell=shell,
        program=words[begin - 1],
        last=words[-1],
        terminator=terminator,
        executable=_executable(words[:begin]),
    )
    return _with_environment(found, words[:begin], shell=shell)


def _executable(words: list[Word]) -> str | None:
    for index in range(len(words) - 1, -1, -1):
        name = _name(words[index])
        is_module = index > 0 and words[index - 1].text == "-m"
        if (name == "vllm" or name.startswith(("python", "pypy"))) and not is_module:
            return words[index].text
    return None


def _name(word: Word) -> str:
    return word.text.rpartition("/")[2]


def _shell_script(words: list[Word]) -> int | None:
    """The index of the script in `sh -c SCRIPT`, `bash -lc SCRIPT`, `bash -o pipefail -c SCRIPT`."""
    for index, word in enumerate(words):
        if _name(word) not in _SHELLS:
            continue
        for position in range(index + 1, len(words) - 1):
            text = words[position].text
            if text.startswith("-") and not text.startswith("--") and "c" in text:
                return position + 1
            if not text.startswith(("-", "+")) and words[position - 1].text not in ("-o", "+o", "-O", "+O"):
                break
    return None


def _server_arguments(words: list[Word]) -> int | None:
    """The index of the first word that is an argument of vLLM's server."""
    for index, word in enumerate(words):
        following = words[index + 1].text if index + 1 < len(words) else ""
        if _name(word) == "vllm" and following == "serve":
            return index + 2
        module = word.text[2:] if word.text.startswith("-m") and len(word.text) > 2 else ""
        if word.text == "-m":
            module, index = following, index + 1
        if module in _SERVER_MODULES:
            return index + 1
        if module in _CLI_MODULES and index + 1 < len(words) and words[index + 1].text == "serve":
            return index + 2
        if word.text.endswith("vllm/entrypoints/openai/api_server.py"):
            return index + 1
    return None


def _arguments(words: list[Word]) -> tuple[tuple[Argument, ...], tuple[Word, ...], Word | None]:
    arguments: list[Argument] = []
    positionals: list[Word] = []
    index = 0
    while index < len(words):
        word = words[index]
        if word.text == "--":
            return tuple(arguments), (*positionals, *words[index + 1 :]), word
        argument = _flag(word)
        index += 1
        if argument is None:
            positionals.append(word)
            continue
        count = 0 if argument.value_at is not None else _value_count(argument, words[index:])
        arguments.append(
            Argument(argument.name, (word, *words[index : index + count]), argument.value_at, argument.negated)
        )
        index += count
    return tuple(arguments), tuple(positionals), None


def _flag(word: Word) -> Argument | None:
    text = word.text
    if text.startswith("--") and len(text) > 2:
        spelled, equals, _ = text[2:].partition("=")
        name = _long_name(spelled.replace("_", "-"))
        negated = name.startswith("no-") and name[3:] in BARE
        return Argument(name[3:] if negated else name, (word,), len(spelled) + 3 if equals else None, negated)
    if text.startswith("-") and len(text) > 1 and not _is_number(text):
        spelled, equals, _ = text[1:].partition("=")
        if spelled in SHORT:
            return Argument(SHORT[spelled], (word,), len(spelled) + 2 if equals else None)
        if spelled[:1] == "O":  # -O3, -O{json}
            return Argument(SHORT["O"], (word,), 2)
        return Argument(spelled, (word,))
    return None


def _long_name(spelled: str) -> str:
    """argparse accepts every prefix that only one flag has."""
    if spelled in ALL:
        return spelled
    if spelled.startswith("no-") and spelled[3:] in BARE:
        return spelled
    matches = [name for name in ALL if name.startswith(spelled)]
    return matches[0] if len(matches) == 1 else spelled


def _value_count(argument: Argument, following: Sequence[Word]) -> int:
    values = 0
    for word in following:
        if word.text.startswith("-") and not _is_number(word.text):
            break
        values += 1
    if argument.name in MANY:
        return values
    if argument.name in BARE or argument.negated:
        # until 0.8.0: --enable-chunked-prefill False
        return 1 if values and following[0].text in ("True", "False", "true", "false") else 0
    return min(values, 1)


def _is_number(text: str) -> bool:
    """argparse takes -1 as a value where no flag looks like a number."""
    return re.fullmatch(r"-\d+(\.\d*)?", text) is not None


def _with_environment(command: LaunchCommand, before: Sequence[Word], *, shell: bool) -> LaunchCommand:
    found = {}
    for word in before:
        if _ASSIGNMENT.match(word.text):
            name, _, value = word.text.partition("=")
            found[name] = value
    environment = {**found, **command.environment}
    return dataclasses.replace(command, environment=environment, shell=shell or command.shell)


def _with_exports(command: LaunchCommand, commands: list[list[Word]]) -> LaunchCommand:
    """`export X=Y` and `X=Y` before it in the same script."""
    assignments = [
        word
        for words in commands
        if words[0].text == "export" or all(_ASSIGNMENT.match(word.text) for word in words)
        for word in words
    ]
    return _with_environment(command, assignments, shell=True)


# -- changing ----------------------------------------------------------------------------------------------------------


def with_flag(command: str, flag: str, value: str | None) -> str:
    """The raw text with the flag at this value: `true` for a bare flag, None to take every occurrence away.

    A command in which vLLM's arguments can't be seen is returned as it is.
    """
    launch = parse_launch(command)
    if not launch.is_vllm:
        return command
    if value is None:
        return _without(launch, flag)
    argument = launch.find(flag)
    if argument is None:
        return _added(launch, flag, value)
    if argument.value == value:
        return command
    if value == "true" and argument.negated:
        return _replaced(launch.raw, argument.words[0], 0, flag)
    return _changed(launch, argument, flag, value)


def _changed(launch: LaunchCommand, argument: Argument, flag: str, value: str) -> str:
    if argument.value_at is not None:
        return _replaced(launch.raw, argument.words[0], argument.value_at, value)
    if len(argument.words) == 1:
        word = argument.words[0]
        return _inserted(launch.raw, word, f" {value}")
    raw = launch.raw
    for word in reversed(argument.words[2:]):  # more values than one: the new one takes the place of all
        raw = _cut(raw, word)
    return _replaced(raw, argument.words[1], 0, value)


def _replaced(raw: str, word: Word, begin: int, value: str) -> str:
    """The word's characters from `begin` on give way to `value`; quotes around them stay where they can."""
    places = [character.place for character in word.characters[begin:]]
    if not places:
        place = word.characters[-1].place + 1 if word.characters else word.start
        return raw[:place] + value + raw[place:]
    if places == list(range(places[0], places[0] + len(places))):
        return raw[: places[0]] + value + raw[places[-1] + 1 :]
    # quotes or backslashes in the middle of the value: they go with it
    return raw[: word.start] + word.text[:begin] + value + raw[word.end :]


def _inserted(raw: str, after: Word, text: str) -> str:
    """Behind a word, in the quotes that its surroundings have. Blanks where only a backslash keeps them get one."""
    return raw[: after.end] + text + raw[after.end :]


def _added(launch: LaunchCommand, flag: str, value: str) -> str:
    text = flag if value == "true" else f"{flag} {value}"
    if launch.terminator is not None:
        place = launch.terminator.start
        return f"{launch.raw[:place]}{text} {launch.raw[place:]}"
    anchor = launch.last or launch.program
    assert anchor is not None
    return _inserted(launch.raw, anchor, f" {text}")


def _without(launch: LaunchCommand, flag: str) -> str:
    name = flag.lstrip("-").replace("_", "-")
    raw = launch.raw
    for argument in reversed(launch.arguments):
        if argument.name == name:
            for word in reversed(argument.words):
                raw = _cut(raw, word)
    return raw


def _cut(raw: str, word: Word) -> str:
    """The word and the blanks before it."""
    begin = word.start
    while begin > 0 and raw[begin - 1].isspace():
        begin -= 1
    return raw[:begin] + raw[word.end :]
