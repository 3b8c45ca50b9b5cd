"""One pass over a log: what in it could be the cause, in which phase, and whether the server lived on after it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from ..evidence.log_records import Record
from ..incident import LogLine
from ..lazy import lazy
from .pattern import Signature
from .phase import KIND_BY_PHASE, executes, later, phase_of_frames, proven_phase, runs_forward
from .signatures import SIGNATURES
from .wording import (
    death_code,
    exception_head,
    frame,
    is_core_signal,
    is_death,
    is_echo,
    is_fatal,
    is_flat_traceback,
    is_shell_kill,
    is_soft_stop,
    is_start_failure,
    is_stop,
    is_wrapper,
    may_be_users_text,
    method_context,
    proves_serving,
    readings,
)

#: After an error that was survived the server answers again. A few answers can still come from streams under way.
_LIFE_PROOFS_OF_SURVIVAL = 5
#: A fatal marker stands beside its traceback; vLLM may dump the scheduler's state between them.
_FATAL_DISTANCE = 500
_MAX_FRAMES = 120
#: Of a long line (vLLM dumps the scheduler's state as an error), the message is the beginning.
_INSIDE_CHARS = 1500

_ANSWER = lazy(r'\S{1,80} - "POST /\S{1,200} HTTP/[\d.]{1,4}" 200\b')
_GENERATING = lazy(
    r"(?:Engine \d{1,4}: )?Avg prompt throughput: [\d.]{1,12} tokens/s, Avg generation throughput: (?!0\.0 )"
)
#: vLLM says it as an error and goes on (transformers_utils/config.py: the list of files is only looked for).
_GOES_ON = lazy(r"retrying \d{1,3} of \d{1,3}|[Rr]etrying in \d|Error retrieving (?:safetensors|file list)\b")
_SHM_FRAME = lazy(r"shared_memory|shm_broadcast|/dev/shm|SharedMemory|shm_open|reductions\.py")
_PINNED_FRAME = lazy(r"pin_memory|allocate_cpu_cache|cudaHostAlloc")
_LOADING_FRAME = lazy(
    r"\bload_weights\b|\bweight_loader\b|safetensors|_dict_from_json_file|configuration_utils|tokenization_utils"
)


@dataclass(frozen=True)
class Finding:
    """A line that may be the cause. `signature` None: an exception that no signature knows (`name`, `message`).

    `phase` is the one the whole log proves so far, `frames_phase` what the traceback says. `exact`: the words stand
    where an error begins.
    """

    index: int
    record: Record
    signature: Signature | None
    match: re.Match[str] | None
    phase: str | None
    frames_phase: str | None
    exact: bool = True
    name: str = ""
    message: str = ""
    echo: bool = False
    forward: bool = False
    executes: bool = False
    shm_frames: bool = False
    pinned_frames: bool = False
    loading_frames: bool = False


@dataclass(frozen=True)
class Marker:
    index: int
    line: LogLine
    signal: int | None = None
    exit_status: int | None = None


@dataclass
class Scan:
    """The result. Indexes count records, so that "before" and "after" can be asked."""

    findings: list[Finding] = field(default_factory=list)
    exceptions: list[Finding] = field(default_factory=list)
    hints: list[Finding] = field(default_factory=list)
    deaths: list[Marker] = field(default_factory=list)
    fatals: list[Marker] = field(default_factory=list)
    stops: list[Marker] = field(default_factory=list)
    soft_stops: list[Marker] = field(default_factory=list)
    life: list[int] = field(default_factory=list)
    phase_starts: list[tuple[int, str]] = field(default_factory=list)
    started_at: int | None = None
    last_phase: str | None = None
    cut_frames: tuple[LogLine, str] | None = None
    bare_killed: LogLine | None = None
    core_signal: LogLine | None = None
    server: bool = False
    eager: bool = False
    served: bool = False
    start_failed: bool = False
    any_error: bool = False


def scan(records: Iterable[Record], signatures: tuple[Signature, ...] = SIGNATURES) -> Scan:
    result = Scan()
    causes = tuple(signature for signature in signatures if signature.role != "hint")
    hints = tuple(signature for signature in signatures if signature.role == "hint")
    frames: dict[str, list[str]] = {}
    for index, record in enumerate(records):
        _note_progress(result, index, record)
        _note_hint(result, index, record, hints)
        _note_markers(result, index, record)
        if not record.may_be_error:
            continue
        if record.body.startswith("Traceback (most recent call last)"):
            frames[record.process] = [text for text in frames.get(record.process, ())[-1:] if method_context(text)]
            if is_flat_traceback(record.body):
                _add_frame(frames, record.process, record.body)
        elif method_context(record.body):
            _add_frame(frames, record.process, record.body)
        elif location := frame(record.body):
            _add_frame(frames, record.process, f"{location[0]} {location[1]}")
        elif record.body[:1].isspace():
            _add_frame(frames, record.process, record.body.strip())
        _note_error(result, index, record, frames, causes)
    _note_cut_frames(result, frames)
    return result


def _add_frame(frames: dict[str, list[str]], process: str, text: str) -> None:
    found = frames.setdefault(process, [])
    found.append(text)
    if len(found) > _MAX_FRAMES:
        del found[0]


def _note_progress(result: Scan, index: int, record: Record) -> None:
    if record.origin.rpartition("/")[2].startswith(("serving", "loggers.py")):
        result.served = True
    if record.level not in (None, "INFO", "WARNING", "DEBUG"):
        return
    body = record.body
    if record.origin == "uvicorn" or record.level is None:
        if _ANSWER.match(body):
            result.life.append(index)
            result.served = True
        if body.startswith(("Started server process", "Uvicorn running on")):
            result.server = True
    if record.level == "INFO" and _GENERATING.match(body):
        result.life.append(index)
    if record.process.startswith("APIServer") or body.startswith(("vLLM API server version", "Starting vLLM")):
        result.server = True
    if " engine (v" in body and "enforce_eager=True" in body:
        result.eager = True
    phase = proven_phase(body)
    if phase and later(phase, result.last_phase) != result.last_phase:
        result.last_phase = phase
        result.phase_starts.append((index, phase))
    if body.startswith("Application startup complete") and result.started_at is None:
        result.started_at = index


def _note_hint(result: Scan, index: int, record: Record, hints: tuple[Signature, ...]) -> None:
    if record.level not in (None, "INFO"):
        return
    for signature in hints:
        if match := signature.match(record.body):
            result.hints.append(Finding(index, record, signature, match, signature.phase, None))
            return


def _note_markers(result: Scan, index: int, record: Record) -> None:
    body = record.body
    if record.level == "INFO" or record.level is None or record.level == "WARNING":
        if is_stop(body):
            result.stops.append(Marker(index, record.line))
        elif is_soft_stop(body):
            result.soft_stops.append(Marker(index, record.line))
        elif is_core_signal(body):
            result.core_signal = record.line
    if record.level == "INFO":
        return
    result.served = result.served or proves_serving(body)
    result.start_failed = result.start_failed or is_start_failure(body)
    if is_fatal(body):
        result.fatals.append(Marker(index, record.line))
    for text in readings(body):
        if is_death(text):
            signal, status = death_code(text)
            if signal != 15:  # vLLM's own cleaning up
                result.deaths.append(Marker(index, record.line, signal, status))
            break
    if record.level is None and is_shell_kill(body):
        result.bare_killed = record.line


def _note_error(
    result: Scan, index: int, record: Record, frames: dict[str, list[str]], causes: tuple[Signature, ...]
) -> None:
    body = record.body
    if record.level in ("ERROR", "CRITICAL"):
        result.any_error = True
    if _GOES_ON.search(body):
        return
    texts = tuple(readings(body))
    found = _match_exact(texts, causes) or _match_inside(record, texts, causes)
    if found:
        signature, match, exact = found
        _add_finding(result, index, record, frames, signature, match, exact)
        return
    for text in texts:
        head = exception_head(text)
        if head and not head[0].endswith("Warning"):
            _add_exception(result, index, record, frames, *head)
            return


def _match_exact(texts: tuple[str, ...], causes: tuple[Signature, ...]) -> tuple[Signature, re.Match[str], bool] | None:
    for text in reversed(texts):  # the innermost reading has no lead-in left
        for signature in causes:
            if match := signature.match(text):
                return signature, match, True
    return None


def _match_inside(
    record: Record, texts: tuple[str, ...], causes: tuple[Signature, ...]
) -> tuple[Signature, re.Match[str], bool] | None:
    """The words somewhere in an error record or exception line, unless they may be a user's own."""
    if not texts or may_be_users_text(record.body):
        return None
    flat = is_flat_traceback(texts[0])
    if record.level is None and exception_head(texts[0]) is None and not flat:
        return None
    text = texts[0] if flat else texts[0][:_INSIDE_CHARS]
    for signature in causes:
        if signature.anywhere and (match := signature.search(text)):
            return signature, match, False
    return None


def _own_frames(frames: dict[str, list[str]], process: str) -> tuple[str, ...]:
    """The traceback's frames; where a report lost its prefixes, those of whoever wrote some."""
    if own := frames.get(process):
        return tuple(own)
    return tuple(next((found for found in reversed(frames.values()) if found), ()))


def _add_finding(
    result: Scan,
    index: int,
    record: Record,
    frames: dict[str, list[str]],
    signature: Signature,
    match: re.Match[str],
    exact: bool,
) -> None:
    own = _own_frames(frames, record.process)
    result.findings.append(
        Finding(
            index=index,
            record=record,
            signature=signature,
            match=match,
            phase=result.last_phase,
            frames_phase=phase_of_frames(own),
            exact=exact,
            forward=runs_forward(own),
            executes=executes(own),
            shm_frames=any(_SHM_FRAME.search(text) for text in own),
            pinned_frames=any(_PINNED_FRAME.search(text) for text in own[-4:]),
        )
    )
    frames.pop(record.process, None)


def _add_exception(
    result: Scan, index: int, record: Record, frames: dict[str, list[str]], name: str, message: str
) -> None:
    if is_wrapper(name, message):
        frames.pop(record.process, None)
        return
    own = tuple(frames.get(record.process, ()))
    if record.level is None and not own and name in ("Error", "Exception", "Exit", "Timeout", "Failure"):
        return
    result.exceptions.append(
        Finding(
            index=index,
            record=record,
            signature=None,
            match=None,
            phase=result.last_phase,
            frames_phase=phase_of_frames(own),
            name=name,
            message=message,
            echo=is_echo(name, message),
            loading_frames=any(_LOADING_FRAME.search(text) for text in own),
        )
    )
    frames.pop(record.process, None)


def _note_cut_frames(result: Scan, frames: dict[str, list[str]]) -> None:
    """A traceback that ends before its exception (cut reports), in a step that allocates device memory."""
    for own in frames.values():
        phase = phase_of_frames(tuple(own))
        if phase in ("graph", "kv_cache") and result.fatals:
            result.cut_frames = (result.fatals[0].line, phase)


def survived(result: Scan, finding: Finding) -> bool:
    """The server lived on after this error, so the error isn't what ended it."""
    after = [index for index in result.life if index > finding.index]
    until = after[_LIFE_PROOFS_OF_SURVIVAL - 1] if len(after) >= _LIFE_PROOFS_OF_SURVIVAL else None
    restarted = result.started_at is not None and result.started_at > finding.index
    if restarted and not _near_fatal(result, finding.index, result.started_at):
        return True
    return until is not None and not _near_fatal(result, finding.index, until)


def superseded(result: Scan, finding: Finding) -> bool:
    """The start went on to a later phase after this error: one of vLLM's many tries, not the end."""
    return any(index > finding.index and phase != "startup" for index, phase in result.phase_starts)


def in_fatal_context(result: Scan, finding: Finding) -> bool:
    return _near_fatal(result, finding.index, finding.index + _FATAL_DISTANCE)


def _near_fatal(result: Scan, index: int, until: int | None) -> bool:
    low = index - _FATAL_DISTANCE
    high = until if until is not None else index + _FATAL_DISTANCE
    return any(low <= marker.index <= high for marker in (*result.fatals, *result.deaths))


def memory_phase(result: Scan, finding: Finding) -> str | None:
    """The phase of a device allocation that failed."""
    if result.started_at is not None and finding.index > result.started_at:
        return "runtime"
    if finding.frames_phase:
        return finding.frames_phase
    if result.served and not result.start_failed:
        return "runtime"
    phase = finding.phase
    if phase in (None, "startup"):
        phase = _phase_without_proof(result, finding)
    return "kv_cache" if phase == "graph" and result.eager else phase


def _phase_without_proof(result: Scan, finding: Finding) -> str | None:
    """Of a log whose start is missing, or whose processes' lines overtook each other."""
    if finding.forward and result.start_failed:
        return "profile"  # the model's first forward
    if finding.executes:
        return "runtime"
    return "weights" if result.last_phase == "weights" else None


def memory_kind(phase: str | None) -> str:
    return KIND_BY_PHASE.get(phase or "", "gpu_oom")
