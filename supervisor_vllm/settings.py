"""The settings of one program: one table. Section, `--set`, checks, defaults and the documentation come from it.

Names are systemd's where systemd has the thing (restart_sec, start_limit_burst, …); units stand in the names.
They are written in the section [supervisor-vllm:PROGRAM] of the file that `init` makes in conf.d; supervisord
ignores sections that it doesn't know (measured, supervisor 4.3.0).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from .errors import UserError

#: Where Debian's supervisord includes files from.
DEFAULT_CONF_DIR = Path("/etc/supervisor/conf.d")
#: The folder beside the settings that holds the user's own signatures.
SIGNATURES_DIR = "signatures.d"

#: Flags that `allow` may open: remedies that change results or speed.
ALLOWABLE = ("kv_cache_dtype_fp8", "cpu_offload", "enforce_eager")


@dataclass(frozen=True)
class Settings:
    """The values of one program's settings. See TABLE for the meaning of each."""

    restart_sec: float = 30.0
    restart_steps: int = 0
    restart_max_delay_sec: float = 0.0
    start_limit_interval_sec: float = 600.0
    start_limit_burst: int = 3
    load_timeout_sec: float = 1800.0
    health_timeout_sec: float = 60.0
    health_interval_sec: float = 0.0
    health_prompt: str = "你好"
    health_max_tokens: int = 64
    api_key_env: str = "VLLM_API_KEY"
    memory_release_timeout_sec: float = 60.0
    gpu_memory_utilization_min: float = 0.5
    gpu_memory_utilization_max: float = 0.95
    max_model_len_min: int = 1
    max_num_seqs_min: int = 1
    max_num_batched_tokens_min: int = 1
    pin: tuple[str, ...] = ()
    allow: tuple[str, ...] = ()
    prefer: str = "concurrency"
    step_up_after_sec: float = 86400.0
    step_up: str = "on-restart"
    mode: str = "act"


@dataclass(frozen=True)
class Setting:
    """One row: how the text of a setting becomes its value (ValueError says what is wanted), and its meaning."""

    name: str
    parse: Callable[[str], Any]
    help: str
    default: Any = field(default=None)

    @property
    def default_text(self) -> str:
        return render_value(self.default)


_SPANS = (("ms", 0.001), ("min", 60.0), ("sec", 1.0), ("s", 1.0), ("m", 60.0), ("h", 3600.0), ("d", 86400.0))


def _seconds(text: str) -> float:
    """Plain seconds, or systemd's spelling of a time span with one unit (5min, 2h)."""
    number = text.strip().lower()
    for suffix, factor in _SPANS:
        if number.endswith(suffix):
            number, scale = number[: -len(suffix)].strip(), factor
            break
    else:
        scale = 1.0
    try:
        value = float(number) * scale
    except ValueError:
        raise ValueError("wants seconds, such as 30 or 5min") from None
    if not 0 <= value < 1e9:
        raise ValueError("wants seconds from 0 up")
    return value


def _count(minimum: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise ValueError(f"wants a whole number from {minimum} up") from None
        if value < minimum:
            raise ValueError(f"wants a whole number from {minimum} up")
        return value

    return parse


def _fraction(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError("wants a number above 0, at most 1") from None
    if not 0 < value <= 1:
        raise ValueError("wants a number above 0, at most 1")
    return value


def _one_of(*words: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text.strip() not in words:
            raise ValueError(f"wants one of {', '.join(words)}")
        return text.strip()

    return parse


_CLOCK = re.compile(r"window +([01]?\d|2[0-3]):([0-5]\d) *- *([01]?\d|2[0-3]):([0-5]\d)")


def _step_up(text: str) -> str:
    words = " ".join(text.split())
    if words not in ("on-restart", "never") and not _CLOCK.fullmatch(words):
        raise ValueError("wants on-restart, never, or window HH:MM-HH:MM")
    return words


def in_window(step_up: str, hour: int, minute: int) -> bool:
    """Is that time of the day (local) in the window that `step_up` names? One over midnight may be."""
    match = _CLOCK.fullmatch(step_up)
    if match is None:
        return False
    begin, end = (int(match[i]) * 60 + int(match[i + 1]) for i in (1, 3))
    now = hour * 60 + minute
    return begin <= now < end if begin <= end else now >= begin or now < end


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.replace(",", " ").split())


def _flags(text: str) -> tuple[str, ...]:
    """Flags in vLLM's long spelling; leading dashes may be left out, underscores are dashes."""
    return tuple("--" + word.lstrip("-").replace("_", "-") for word in _words(text))


def _allow(text: str) -> tuple[str, ...]:
    words = tuple(word.replace("-", "_") for word in _words(text))
    for word in words:
        if word not in ALLOWABLE:
            raise ValueError(f"wants any of {', '.join(ALLOWABLE)}")
    return words


def _line(text: str) -> str:
    if not text.strip():
        raise ValueError("wants some text")
    return text.strip()


def _environment_name(text: str) -> str:
    name = text.strip()
    if name and not (name.isascii() and name.replace("_", "a").isalnum() and not name[0].isdigit()):
        raise ValueError("wants the name of an environment variable, not the key itself")
    return name


_DEFAULTS = Settings()

TABLE = tuple(
    Setting(name, parse, help_, getattr(_DEFAULTS, name))
    for name, parse, help_ in (
        (
            "restart_sec",
            _seconds,
            "pause before a restart with unchanged arguments; an adjusted one starts as soon as the memory is free",
        ),
        (
            "restart_steps",
            _count(0),
            "number of steps in which the pause grows to restart_max_delay_sec (0: it doesn't grow)",
        ),
        ("restart_max_delay_sec", _seconds, "longest pause before a restart (used only with restart_steps)"),
        (
            "start_limit_interval_sec",
            _seconds,
            "the time in which at most start_limit_burst launches happen (0: no limit)",
        ),
        (
            "start_limit_burst",
            _count(0),
            "launches allowed in start_limit_interval_sec, and in a row without one becoming healthy; then HELD (0: no limit)",
        ),
        ("load_timeout_sec", _seconds, "time from the start of a launch until it must be healthy"),
        ("health_timeout_sec", _seconds, "time in which one completion must come back"),
        ("health_interval_sec", _seconds, "pause between checks while it serves (0: checked after each start only)"),
        ("health_prompt", _line, "the prompt of the completion that proves health"),
        ("health_max_tokens", _count(1), "max_tokens of that completion"),
        (
            "api_key_env",
            _environment_name,
            "environment variable of the listener that holds vLLM's API key, where the command doesn't",
        ),
        ("memory_release_timeout_sec", _seconds, "longest wait for memory to become free before a launch"),
        ("gpu_memory_utilization_min", _fraction, "floor for --gpu-memory-utilization"),
        ("gpu_memory_utilization_max", _fraction, "ceiling for --gpu-memory-utilization"),
        ("max_model_len_min", _count(1), "floor for --max-model-len"),
        ("max_num_seqs_min", _count(1), "floor for --max-num-seqs"),
        ("max_num_batched_tokens_min", _count(1), "floor for --max-num-batched-tokens"),
        ("pin", _flags, "flags that are never changed, such as --max-model-len"),
        ("allow", _allow, f"remedies that change results or speed and are off otherwise: {', '.join(ALLOWABLE)}"),
        (
            "prefer",
            _one_of("context", "concurrency"),
            "what to keep when something must shrink: the context length, or concurrency",
        ),
        ("step_up_after_sec", _seconds, "quiet time after which a learned value moves half of the way back (0: never)"),
        (
            "step_up",
            _step_up,
            "when: at a restart that happens anyway (on-restart), by a restart of its own, too, at that time of the day "
            "(window HH:MM-HH:MM), or never",
        ),
        ("mode", _one_of("act", "shadow"), "shadow: decide and record, change nothing"),
    )
)

_BY_NAME = {setting.name: setting for setting in TABLE}


def parse_settings(values: Mapping[str, str], *, where: str = "--set") -> Settings:
    """Texts to Settings. Raises UserError with one clear line for a wrong name or value."""
    parsed: dict[str, Any] = {}
    for name, text in values.items():
        setting = _BY_NAME.get(name)
        if setting is None:
            raise UserError(f"{where}: there is no setting {name!r}", hint=_did_you_mean(name))
        try:
            parsed[name] = setting.parse(text)
        except ValueError as why:
            raise UserError(f"{where}: {name} = {text!r} {why}") from None
    settings = Settings(**parsed)
    if settings.gpu_memory_utilization_min > settings.gpu_memory_utilization_max:
        raise UserError(
            f"{where}: gpu_memory_utilization_min {settings.gpu_memory_utilization_min:g} is above "
            f"gpu_memory_utilization_max {settings.gpu_memory_utilization_max:g}",
            hint="lower the one or raise the other",
        )
    return settings


def _did_you_mean(name: str) -> str:
    import difflib

    near = difflib.get_close_matches(name, _BY_NAME, n=1)
    return f"did you mean {near[0]}?" if near else f"the settings are {', '.join(_BY_NAME)}"


def render_value(value: Any) -> str:
    """A value as the text that `parse_settings` reads back."""
    if isinstance(value, tuple):
        return " ".join(value)
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)


assert [setting.name for setting in TABLE] == [f.name for f in fields(Settings)]
