"""What was learned on one host as a file for others: `export` and `import`. An import is a hint with its date, never
stronger than what was measured here."""

from __future__ import annotations

import json
import re
from datetime import datetime, timezone
from typing import Any

from .errors import UserError
from .incident import Change, from_json, to_json
from .journal import Journal
from .policy.fingerprint import Fingerprint
from .policy.flags import LEARNABLE

_FORMAT = "supervisor-vllm learned arguments 1"
_MAX_BYTES = 2**24
_VALUE = re.compile(r"[A-Za-z0-9.]{1,32}")


def exported(journal: Journal) -> dict[str, Any]:
    """Only what was measured here: a hint of others isn't ours to hand on."""
    rows = [row for row in journal.remembered() if row.origin == "measured" and row.changes]
    return {
        "format": _FORMAT,
        "learned": [
            {
                "fingerprint": to_json(row.fingerprint),
                "changes": to_json(row.changes),
                "time": datetime.fromtimestamp(row.time, timezone.utc).isoformat(timespec="seconds"),
            }
            for row in rows
        ],
    }


def import_text(journal: Journal, text: str, where: str) -> int:
    """How many entries were taken. All or none: UserError names what is wrong."""
    entries = _entries(text, where)
    with journal.transaction():
        for fingerprint, changes, when in entries:
            journal.remember(fingerprint, changes, when=when, origin="imported")
    return len(entries)


def _entries(text: str, where: str) -> list[tuple[Fingerprint, tuple[Change, ...], float]]:
    hint = "give a file that `supervisor-vllm export` wrote"
    try:
        data = json.loads(text) if len(text) <= _MAX_BYTES else None
    except (ValueError, RecursionError):
        data = None
    if not isinstance(data, dict) or data.get("format") != _FORMAT or not isinstance(data.get("learned"), list):
        raise UserError(f"{where} holds no learned arguments", hint=hint)
    found = []
    for number, entry in enumerate(data["learned"], 1):
        try:
            fingerprint = from_json(Fingerprint, entry["fingerprint"])
            changes = tuple(from_json(Change, change) for change in entry["changes"])
            when = datetime.fromisoformat(entry["time"]).timestamp()
        except (KeyError, TypeError, ValueError, AttributeError):
            raise UserError(f"{where}: entry {number} can't be understood", hint=hint) from None
        if bad := next((change.flag for change in changes if not _is_learnable(change)), None):
            raise UserError(f"{where}: entry {number}: {bad} is no flag that is learned", hint=hint)
        found.append((fingerprint, changes, when))
    return found


def _is_learnable(change: Change) -> bool:
    """A file from elsewhere may set what we set, and nothing else: no path, no code, no shell."""
    texts = [text for text in (change.from_, change.to) if text is not None]
    return change.flag in LEARNABLE and all(isinstance(text, str) and _VALUE.fullmatch(text) for text in texts)
