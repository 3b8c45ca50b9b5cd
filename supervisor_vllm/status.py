"""What `status` and `history` say: the journal as the contract's JSON objects."""

from __future__ import annotations

import math
import time
from datetime import datetime
from typing import Any

from .config_file import Config, ProgramConfig
from .explanation import verdict_json
from .incident import to_json
from .journal import IncidentRow, Journal
from .policy.hindsight import Followed, Hindsight, hindsight
from .policy.limit import launches_left


def program_status(journal: Journal, item: ProgramConfig) -> dict[str, Any]:
    """One element of `programs`. `launches_left` is null where there is no limit."""
    row = journal.program(item.program)
    incidents = journal.incidents(item.program)
    leader = (row.life or {}).get("leader") or {}
    return {
        "program": item.program,
        "state": row.state,
        "since": iso_time(row.since),
        "pid": leader.get("pid") or None,
        "reason": row.reason,
        "verdict": verdict_json(incidents[-1].verdict, None) if incidents else None,
        "changes": [to_json(learned.change) for learned in journal.learned(item.program)],
        "served": row.served,
        "launches_left": launches_left(
            journal.own_launch_times(item.program),
            last_healthy_time=journal.last_healthy_time(item.program),
            now=time.time(),
            settings=item.settings,
        ),
    }


def status_json(journal: Journal, config: Config, names: tuple[str, ...]) -> dict[str, Any]:
    items = [config.program(name) for name in names] if names else list(config.programs)
    return {"programs": [program_status(journal, item) for item in items]}


def history_json(journal: Journal, program: str | None) -> dict[str, Any]:
    return {"incidents": [incident_json(row, _hindsight(journal, row)) for row in journal.incidents(program)]}


def _hindsight(journal: Journal, row: IncidentRow) -> Hindsight | None:
    """None: the plan was carried out, and the outcome says how that went."""
    if row.outcome == "held" or not row.in_shadow:
        return None
    later = [launch for launch in journal.launches(row.program) if launch.time >= row.time]
    if not later:
        return hindsight(row.verdict.kind, row.plan, "", None)
    end = later[1].time if len(later) > 1 else math.inf
    deaths = [other for other in journal.incidents(row.program) if later[0].time <= other.time <= end]
    command = later[0].command or (journal.incident(deaths[0].id).command if deaths else "")
    healthy = later[0].healthy_time is not None
    followed = Followed(command, healthy, deaths[0].verdict.kind if deaths else None)
    return hindsight(row.verdict.kind, row.plan, journal.incident(row.id).command, followed)


def incident_json(row: IncidentRow, seen_later: Hindsight | None = None) -> dict[str, Any]:
    seconds = None if row.healthy_time is None else round(max(0.0, row.healthy_time - row.time), 3)
    return {
        "id": row.id,
        "program": row.program,
        "time": iso_time(row.time),
        "verdict": verdict_json(row.verdict, None),
        "plan": to_json(row.plan),
        "launches": row.launches,
        "outcome": row.outcome,
        "seconds_to_healthy": seconds,
        "hindsight": to_json(seen_later),
    }


def iso_time(when: float) -> str:
    return datetime.fromtimestamp(when).astimezone().isoformat(timespec="milliseconds")
