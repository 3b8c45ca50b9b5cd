"""The journal: SQLite in the state directory. Every step of a recovery is written here *before* it is taken.

So a listener that is killed at any point finds out on its next start how far it had come. The journal outlives the
listener, supervisord and the host; so does the count of launches.

Times are seconds since the epoch (wall clock: a monotonic one doesn't outlive the host). No secrets: commands are
redacted by the caller before they come here.
"""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from .errors import UserError
from .incident import Change, Incident, Plan, Verdict, from_json, to_json
from .policy.fingerprint import Fingerprint

FILE_NAME = "journal.sqlite3"

State = Literal["WATCHING", "DIAGNOSING", "WAITING", "STARTING", "VERIFYING", "HEALTHY", "HELD"]
StartedBy = Literal["supervisor-vllm", "person", "supervisord"]

_LAUNCH_COLUMNS = "id, program, incident_id, time, started_by, pid, healthy_time, command"
_SCHEMA_VERSION = 3
#: What each version added; a journal of an older one gets what it hasn't yet.
_SCHEMAS = {
    1: """
CREATE TABLE program (
    program TEXT PRIMARY KEY,
    state TEXT NOT NULL,
    since REAL NOT NULL,
    reason TEXT NOT NULL,
    incident_id INTEGER,
    life TEXT,
    served TEXT
);
CREATE TABLE incident (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    program TEXT NOT NULL,
    time REAL NOT NULL,
    incident TEXT NOT NULL,
    verdict TEXT NOT NULL,
    plan TEXT NOT NULL,
    outcome TEXT NOT NULL,
    healthy_time REAL
);
CREATE INDEX incident_by_program ON incident (program, id);
CREATE TABLE launch (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    program TEXT NOT NULL,
    incident_id INTEGER,
    time REAL NOT NULL,
    started_by TEXT NOT NULL,
    pid INTEGER,
    healthy_time REAL
);
CREATE INDEX launch_by_program ON launch (program, id);
CREATE TABLE learned (
    program TEXT NOT NULL,
    flag TEXT NOT NULL,
    change TEXT NOT NULL,
    incident_id INTEGER,
    time REAL NOT NULL,
    PRIMARY KEY (program, flag)
);
CREATE TABLE step (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    program TEXT NOT NULL,
    time REAL NOT NULL,
    state TEXT NOT NULL,
    reason TEXT NOT NULL,
    incident_id INTEGER
);
""",
    2: """
CREATE TABLE learned_of (
    program TEXT PRIMARY KEY,
    fingerprint TEXT NOT NULL
);
CREATE TABLE remembered (
    fingerprint TEXT PRIMARY KEY,
    changes TEXT NOT NULL,
    time REAL NOT NULL,
    origin TEXT NOT NULL
);
CREATE TABLE notch (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    program TEXT NOT NULL,
    flag TEXT NOT NULL,
    before TEXT NOT NULL,
    after TEXT,
    launch_id INTEGER NOT NULL,
    time REAL NOT NULL,
    failed_time REAL
);
""",
    3: """
ALTER TABLE launch ADD COLUMN command TEXT;
ALTER TABLE incident ADD COLUMN in_shadow INTEGER NOT NULL DEFAULT 0;
""",
}


@dataclass(frozen=True)
class ProgramRow:
    """Where the recovery of one program stands. `life` is what the listener noted of the running process."""

    program: str
    state: State
    since: float
    reason: str
    incident_id: int | None = None
    life: Mapping[str, Any] | None = None
    served: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class IncidentRow:
    id: int
    program: str
    time: float
    verdict: Verdict
    plan: Plan
    outcome: str
    healthy_time: float | None
    launches: int
    #: decided and recorded, and not carried out
    in_shadow: bool = False


@dataclass(frozen=True)
class LaunchRow:
    id: int
    program: str
    incident_id: int | None
    time: float
    started_by: StartedBy
    pid: int | None
    healthy_time: float | None
    #: None: it died before its process was seen
    command: str | None = None


@dataclass(frozen=True)
class RememberedRow:
    """`origin`: measured, or imported."""

    fingerprint: Fingerprint
    changes: tuple[Change, ...]
    time: float
    origin: str


@dataclass(frozen=True)
class LearnedRow:
    change: Change
    incident_id: int | None
    time: float


@dataclass(frozen=True)
class Journal:
    """One connection, for one thread at a time."""

    path: Path
    connection: sqlite3.Connection

    def close(self) -> None:
        self.connection.close()

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """All or nothing, and on the disk when it returns (synchronous=FULL). Nested ones join the outer one."""
        if self.connection.in_transaction:
            yield self.connection
            return
        self.connection.execute("BEGIN IMMEDIATE")
        try:
            yield self.connection
        except BaseException:
            self.connection.execute("ROLLBACK")
            raise
        self.connection.execute("COMMIT")

    # -- the program's state ---------------------------------------------------------------------------------------

    def program(self, program: str) -> ProgramRow:
        row = self.connection.execute(
            "SELECT program, state, since, reason, incident_id, life, served FROM program WHERE program = ?", (program,)
        ).fetchone()
        if row is None:
            return ProgramRow(program, "WATCHING", time.time(), "not seen yet")
        name, state, since, reason, incident_id, life, served = row
        return ProgramRow(name, state, since, reason, incident_id, _load(life), _load(served))

    def enter(self, program: str, state: State, reason: str, *, incident_id: int | None = None) -> None:
        """The step that is about to be taken."""
        now = time.time()
        with self.transaction() as sql:
            sql.execute(
                "INSERT INTO program (program, state, since, reason, incident_id) VALUES (?, ?, ?, ?, ?) "
                "ON CONFLICT (program) DO UPDATE SET since = CASE WHEN state = excluded.state THEN since "
                "ELSE excluded.since END, state = excluded.state, reason = excluded.reason, "
                "incident_id = excluded.incident_id",
                (program, state, now, reason, incident_id),
            )
            sql.execute(
                "INSERT INTO step (program, time, state, reason, incident_id) VALUES (?, ?, ?, ?, ?)",
                (program, now, state, reason, incident_id),
            )

    def set_life(self, program: str, life: Mapping[str, Any] | None) -> None:
        with self.transaction() as sql:
            sql.execute("UPDATE program SET life = ? WHERE program = ?", (_dump(life), program))

    def set_served(self, program: str, served: Mapping[str, Any] | None) -> None:
        with self.transaction() as sql:
            sql.execute("UPDATE program SET served = ? WHERE program = ?", (_dump(served), program))

    # -- incidents ---------------------------------------------------------------------------------------------------

    def add_incident(self, incident: Incident, verdict: Verdict, plan: Plan, *, in_shadow: bool = False) -> int:
        with self.transaction() as sql:
            cursor = sql.execute(
                "INSERT INTO incident (program, time, in_shadow, incident, verdict, plan, outcome) "
                "VALUES (?, ?, ?, ?, ?, ?, 'running')",
                (
                    incident.program,
                    time.time(),
                    in_shadow,
                    *(_dump(to_json(value)) for value in (incident, verdict, plan)),
                ),
            )
        assert cursor.lastrowid is not None
        return cursor.lastrowid

    def set_plan(self, incident_id: int, verdict: Verdict, plan: Plan) -> None:
        """The plan after more was known (the memory was waited for)."""
        with self.transaction() as sql:
            sql.execute(
                "UPDATE incident SET verdict = ?, plan = ? WHERE id = ?",
                (_dump(to_json(verdict)), _dump(to_json(plan)), incident_id),
            )

    def close_incident(self, incident_id: int, outcome: str, *, healthy_time: float | None = None) -> None:
        with self.transaction() as sql:
            sql.execute(
                "UPDATE incident SET outcome = ?, healthy_time = COALESCE(?, healthy_time) WHERE id = ?",
                (outcome, healthy_time, incident_id),
            )

    def incident(self, incident_id: int) -> Incident:
        (text,) = self.connection.execute("SELECT incident FROM incident WHERE id = ?", (incident_id,)).fetchone()
        return from_json(Incident, json.loads(text))

    def incident_row(self, incident_id: int) -> IncidentRow:
        return next(row for row in self._incidents("WHERE incident.id = ?", (incident_id,)))

    def incidents(self, program: str | None = None) -> list[IncidentRow]:
        """Oldest first."""
        if program is None:
            return list(self._incidents("", ()))
        return list(self._incidents("WHERE incident.program = ?", (program,)))

    def incidents_since_healthy(self, program: str) -> list[IncidentRow]:
        """The deaths in a row with no healthy launch and no person between them, oldest first."""
        since = 0.0
        for launch in self.launches(program):
            since = max(since, launch.healthy_time or 0.0, launch.time if launch.started_by == "person" else 0.0)
        return [row for row in self.incidents(program) if row.time > since]

    def _incidents(self, where: str, values: tuple[Any, ...]) -> Iterator[IncidentRow]:
        rows = self.connection.execute(
            "SELECT id, program, time, verdict, plan, outcome, healthy_time, in_shadow, "
            "(SELECT COUNT(*) FROM launch WHERE launch.incident_id = incident.id AND started_by = 'supervisor-vllm') "
            f"FROM incident {where} ORDER BY id",
            values,
        )
        for id_, program, when, verdict, plan, outcome, healthy_time, in_shadow, launches in rows:
            yield IncidentRow(
                id_, program, when, from_json(Verdict, json.loads(verdict)), from_json(Plan, json.loads(plan)),
                outcome, healthy_time, launches, bool(in_shadow),
            )  # fmt: skip

    # -- launches ----------------------------------------------------------------------------------------------------

    def add_launch(
        self, program: str, started_by: StartedBy, *, incident_id: int | None, pid: int | None = None
    ) -> int:
        with self.transaction() as sql:
            cursor = sql.execute(
                "INSERT INTO launch (program, incident_id, time, started_by, pid) VALUES (?, ?, ?, ?, ?)",
                (program, incident_id, time.time(), started_by, pid),
            )
        assert cursor.lastrowid is not None
        return cursor.lastrowid

    def launch(self, launch_id: int) -> LaunchRow:
        row = self.connection.execute(f"SELECT {_LAUNCH_COLUMNS} FROM launch WHERE id = ?", (launch_id,)).fetchone()
        return LaunchRow(*row)

    def set_launch_process(self, launch_id: int, pid: int, command: str | None) -> None:
        with self.transaction() as sql:
            sql.execute("UPDATE launch SET pid = ?, command = ? WHERE id = ?", (pid, command, launch_id))

    def set_launch_healthy(self, launch_id: int, when: float) -> None:
        with self.transaction() as sql:
            sql.execute("UPDATE launch SET healthy_time = ? WHERE id = ?", (when, launch_id))

    def launches(self, program: str) -> list[LaunchRow]:
        """Oldest first."""
        rows = self.connection.execute(
            f"SELECT {_LAUNCH_COLUMNS} FROM launch WHERE program = ? ORDER BY id", (program,)
        )
        return [LaunchRow(*row) for row in rows]

    def own_launch_times(self, program: str) -> list[float]:
        """Of the launches of ours since a person last started it."""
        times: list[float] = []
        for row in self.launches(program):
            if row.started_by == "person":
                times.clear()
            elif row.started_by == "supervisor-vllm":
                times.append(row.time)
        return times

    def last_healthy_time(self, program: str) -> float:
        """0.0 when it never was healthy."""
        return max((row.healthy_time or 0.0 for row in self.launches(program)), default=0.0)

    # -- what was learned --------------------------------------------------------------------------------------------

    def learned(self, program: str) -> list[LearnedRow]:
        rows = self.connection.execute(
            "SELECT change, incident_id, time FROM learned WHERE program = ? ORDER BY time, flag", (program,)
        )
        return [LearnedRow(from_json(Change, json.loads(row[0])), row[1], row[2]) for row in rows]

    def replace_learned(self, program: str, changes: tuple[Change, ...], *, incident_id: int | None) -> None:
        """What stays the same keeps its date and its incident."""
        before = {row.change: row for row in self.learned(program)}
        with self.transaction() as sql:
            sql.execute("DELETE FROM learned WHERE program = ?", (program,))
            for change in changes:
                row = before.get(change, LearnedRow(change, incident_id, time.time()))
                sql.execute(
                    "INSERT INTO learned (program, flag, change, incident_id, time) VALUES (?, ?, ?, ?, ?)",
                    (program, change.flag, _dump(to_json(change)), row.incident_id, row.time),
                )

    def learned_of(self, program: str) -> Fingerprint | None:
        """What the learned changes belong to; None where that was never seen serving."""
        row = self.connection.execute("SELECT fingerprint FROM learned_of WHERE program = ?", (program,)).fetchone()
        return from_json(Fingerprint, json.loads(row[0])) if row else None

    def set_learned_of(self, program: str, fingerprint: Fingerprint) -> None:
        with self.transaction() as sql:
            sql.execute("INSERT OR REPLACE INTO learned_of VALUES (?, ?)", (program, fingerprint.key))

    def remember(
        self, fingerprint: Fingerprint, changes: tuple[Change, ...], *, when: float, origin: str = "measured"
    ) -> None:
        """With what this very thing served. What was measured here is stronger than what was imported."""
        with self.transaction() as sql:
            own = sql.execute("SELECT origin FROM remembered WHERE fingerprint = ?", (fingerprint.key,)).fetchone()
            if own and own[0] == "measured" and origin != "measured":
                return
            values = (fingerprint.key, _dump([to_json(change) for change in changes]), when, origin)
            sql.execute("INSERT OR REPLACE INTO remembered VALUES (?, ?, ?, ?)", values)

    def add_notch(self, program: str, change: Change, *, launch_id: int, when: float) -> None:
        """A step back up that this launch tries."""
        with self.transaction() as sql:
            known = "SELECT 1 FROM notch WHERE launch_id = ? AND flag = ?"
            if sql.execute(known, (launch_id, change.flag)).fetchone():
                return  # a listener that was killed on the way
            sql.execute(
                "INSERT INTO notch (program, flag, before, after, launch_id, time) VALUES (?, ?, ?, ?, ?, ?)",
                (program, change.flag, change.from_, change.to, launch_id, when),
            )

    def open_notches(self, launch_id: int) -> tuple[Change, ...]:
        rows = self.connection.execute(
            "SELECT flag, before, after FROM notch WHERE launch_id = ? AND failed_time IS NULL", (launch_id,)
        )
        return tuple(Change(flag, before, after, "") for flag, before, after in rows)

    def fail_notches(self, launch_id: int, *, when: float) -> None:
        with self.transaction() as sql:
            sql.execute("UPDATE notch SET failed_time = ? WHERE launch_id = ?", (when, launch_id))

    def failed_notches(self, program: str) -> dict[str, list[str | None]]:
        """flag → values that were tried and died; None: without the flag."""
        rows = self.connection.execute(
            "SELECT flag, after FROM notch WHERE program = ? AND failed_time IS NOT NULL", (program,)
        )
        found: dict[str, list[str | None]] = {}
        for flag, value in rows:
            found.setdefault(flag, []).append(value)
        return found

    def remembered(self) -> list[RememberedRow]:
        rows = self.connection.execute("SELECT fingerprint, changes, time, origin FROM remembered ORDER BY time DESC")
        return [
            RememberedRow(
                from_json(Fingerprint, json.loads(fingerprint)),
                tuple(from_json(Change, change) for change in json.loads(changes)),
                when,
                origin,
            )
            for fingerprint, changes, when, origin in rows
        ]


def open_journal(state_dir: Path, *, read_only: bool = False) -> Journal:
    """The journal of `state_dir`; made there when missing (the directory is made 0700, a wider one is narrowed).

    Raises UserError when the directory can't be used or the file isn't a journal of this version.
    """
    path = state_dir / FILE_NAME
    try:
        if read_only:
            return _open_to_read(path)
        make_state_dir(state_dir)
        connection = sqlite3.connect(path, timeout=10.0, isolation_level=None, check_same_thread=False)
        os.chmod(path, 0o600)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        _migrate(connection)
    except (OSError, sqlite3.Error) as why:
        raise UserError(
            f"the journal {path} can't be used ({why})", hint="look at the directory's owner and free space"
        ) from None
    return Journal(path, connection)


def make_state_dir(state_dir: Path) -> None:
    """0700 and ours: what the journal holds is nobody else's, and nobody else may put a link in our way."""
    state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = os.lstat(state_dir)
    if not state_dir.is_dir() or state_dir.is_symlink() or status.st_uid != os.geteuid():
        raise UserError(
            f"the state directory {state_dir} is a link or belongs to someone else",
            hint="choose another with --state-dir",
        )
    if status.st_mode & 0o077:
        os.chmod(state_dir, 0o700)


def _open_to_read(path: Path) -> Journal:
    """Looking changes nothing, and creates no file: where nothing has been written yet the journal is an empty one."""
    if path.exists():
        connection = sqlite3.connect(
            f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=10.0, isolation_level=None
        )
        if connection.execute("PRAGMA user_version").fetchone()[0] == _SCHEMA_VERSION:
            return Journal(path, connection)
        connection.close()
    connection = sqlite3.connect(":memory:", isolation_level=None)
    _migrate(connection)
    return Journal(path, connection)


def _migrate(connection: sqlite3.Connection) -> None:
    connection.execute(
        "BEGIN IMMEDIATE"
    )  # two that open a new journal at once: the second one waits, and finds it made
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version > _SCHEMA_VERSION:
        connection.execute("ROLLBACK")
        raise sqlite3.DatabaseError(f"it was written by a newer version (schema {version})")
    for added in range(version + 1, _SCHEMA_VERSION + 1):
        for statement in filter(str.strip, _SCHEMAS[added].split(";")):
            connection.execute(statement)
    connection.execute(f"PRAGMA user_version = {_SCHEMA_VERSION}")
    connection.execute("COMMIT")


def _dump(value: Any) -> str | None:
    return None if value is None else json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _load(text: str | None) -> Any:
    return None if text is None else json.loads(text)
