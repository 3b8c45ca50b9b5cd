"""Secrets out of what is written down: API keys and tokens in commands and log lines."""

from __future__ import annotations

import dataclasses

from .incident import Incident, LogLine
from .lazy import lazy

#: A word that is no flag, as it stands in a command.
_WORD = r"(?:'[^'\n]{1,4096}'|\"[^\"\n]{1,4096}\"|(?!--)[^\s'\"]{1,4096})"
#: Keys by their names (in commands, environments, vLLM's own list of arguments) and by their well-known shapes.
_SECRETS = (
    lazy(
        r"(?i)(['\"]?[\w-]{0,64}(?:api[_-]?key|token|secret|password|passwd)['\"]?\s*[=:]\s*)"
        r"(\[[^\]\n]{0,4096}\]|'[^'\n]{1,4096}'|\"[^\"\n]{1,4096}\"|[^\s,;'\"}\]]{1,4096})"
    ),
    # --api-key takes several
    lazy(rf"(?i)(--(?:api[-_]key|hf[-_]token)[ =]+)({_WORD}(?: +{_WORD})*)"),
    lazy(r"(?i)(\bbearer\s+)(\S{1,4096})"),
    lazy(r"(://[^/\s:@]{1,256}:)([^@/\s]{1,256})(?=@)"),
    lazy(r"(\b)((?:hf_|sk-|nvapi-)[A-Za-z0-9_-]{16,256})"),
)
#: What looks like a secret's name but is a number of tokens or a file.
_NOT_SECRET = lazy(
    r"(?i)(max|num|batched|prompt|generation|completion|per|skip|eos|bos|pad|special|stop)[\w -]{0,40}token"
)


def redact_text(text: str) -> str:
    for pattern in _SECRETS:
        text = pattern.sub(
            lambda match: match.group(0) if _NOT_SECRET.search(match.group(1)) else match.group(1) + "***", text
        )
    return text


def redact_lines(lines: tuple[LogLine, ...]) -> tuple[LogLine, ...]:
    return tuple(dataclasses.replace(line, text=redact_text(line.text)) for line in lines)


#: An incident in the journal keeps this much of the log: the start (arguments, loading) and the end (the death).
_HEAD_LINES, _TAIL_LINES, _LINE_CHARS = 300, 700, 2000


def for_journal(incident: Incident) -> Incident:
    """The incident as it is kept: no secrets, a bounded log."""
    log = incident.log
    if len(log) > _HEAD_LINES + _TAIL_LINES:
        log = log[:_HEAD_LINES] + log[-_TAIL_LINES:]
    short = tuple(dataclasses.replace(line, text=line.text[:_LINE_CHARS]) for line in log)
    return dataclasses.replace(incident, command=redact_text(incident.command), log=redact_lines(short))
