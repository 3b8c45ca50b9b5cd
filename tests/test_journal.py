"""The journal: what was written before a SIGKILL is there after it; what a stranger could touch is refused."""

import os
import stat
import time

import pytest

from supervisor_vllm.errors import UserError
from supervisor_vllm.incident import Change, Evidence, Incident, LogLine, Plan, ProcessRef, Verdict, from_json, to_json
from supervisor_vllm.journal import FILE_NAME, open_journal

INCIDENT = Incident(
    program="vllm",
    time="2026-12-01T10:00:00+00:00",
    command="vllm serve m",
    pid=4711,
    tree=(ProcessRef(4711, 1.5, "vllm"),),
    log=(LogLine(1, "你好"),),
)
VERDICT = Verdict("gpu_kv_small", "proven", "too small", "kv_cache", (Evidence("vllm-log", "x", 1),), {"kv_tokens": 5})
PLAN = Plan("adjust", "shorter", (Change("--max-model-len", "4096", "2048", "estimate"),), "vllm serve m")


def test_values_survive_json():
    assert from_json(Incident, to_json(INCIDENT)) == INCIDENT
    assert from_json(Verdict, to_json(VERDICT)) == VERDICT
    assert from_json(Plan, to_json(PLAN)) == PLAN
    assert to_json(PLAN)["changes"][0]["from"] == "4096"


def test_a_recovery_is_found_again(tmp_path):
    journal = open_journal(tmp_path / "state")
    journal.enter("vllm", "DIAGNOSING", "exited")
    incident_id = journal.add_incident(INCIDENT, VERDICT, PLAN)
    journal.enter("vllm", "STARTING", "again", incident_id=incident_id)
    launch = journal.add_launch("vllm", "supervisor-vllm", incident_id=incident_id)
    journal.replace_learned("vllm", PLAN.changes, incident_id=incident_id)
    journal.close()

    journal = open_journal(tmp_path / "state")
    row = journal.program("vllm")
    assert (row.state, row.incident_id) == ("STARTING", incident_id)
    assert journal.incident(incident_id) == INCIDENT
    (incident,) = journal.incidents("vllm")
    assert (incident.verdict, incident.plan, incident.launches, incident.outcome) == (VERDICT, PLAN, 1, "running")
    assert [row.id for row in journal.launches("vllm")] == [launch]
    assert [row.change for row in journal.learned("vllm")] == list(PLAN.changes)
    assert journal.incidents("another") == []


def test_a_transaction_is_all_or_nothing(tmp_path):
    journal = open_journal(tmp_path / "state")
    with pytest.raises(ZeroDivisionError), journal.transaction():
        journal.add_incident(INCIDENT, VERDICT, PLAN)
        journal.enter("vllm", "HELD", "x")
        raise ZeroDivisionError
    assert journal.incidents() == []
    assert journal.program("vllm").state == "WATCHING"


def test_since_stays_while_the_state_stays(tmp_path):
    journal = open_journal(tmp_path / "state")
    journal.enter("vllm", "WAITING", "one")
    since = journal.program("vllm").since
    journal.enter("vllm", "WAITING", "two")
    assert journal.program("vllm").since == since
    assert journal.program("vllm").reason == "two"


def test_launches_of_ours_count_until_a_person_starts_it(tmp_path):
    journal = open_journal(tmp_path / "state")
    journal.add_launch("vllm", "supervisor-vllm", incident_id=None)
    journal.add_launch("vllm", "supervisord", incident_id=None)
    journal.add_launch("vllm", "supervisor-vllm", incident_id=None)
    assert len(journal.own_launch_times("vllm")) == 2
    journal.add_launch("vllm", "person", incident_id=None)
    assert journal.own_launch_times("vllm") == []


def test_deaths_in_a_row_end_with_a_healthy_launch(tmp_path):
    journal = open_journal(tmp_path / "state")
    journal.add_incident(INCIDENT, VERDICT, PLAN)
    launch = journal.add_launch("vllm", "supervisor-vllm", incident_id=None)
    assert len(journal.incidents_since_healthy("vllm")) == 1
    journal.set_launch_healthy(launch, time.time())
    assert journal.incidents_since_healthy("vllm") == []


def test_the_state_directory_is_for_its_owner_only(tmp_path):
    state = tmp_path / "state"
    state.mkdir(mode=0o755)
    open_journal(state)
    assert stat.S_IMODE(state.stat().st_mode) == 0o700
    assert stat.S_IMODE((state / FILE_NAME).stat().st_mode) == 0o600


def test_a_link_is_refused(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "state").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="is a link"):
        open_journal(tmp_path / "state")


def test_something_else_is_named_in_one_line(tmp_path):
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / FILE_NAME).write_bytes(os.urandom(4096))
    with pytest.raises(UserError, match="can't be used"):
        open_journal(tmp_path / "state")


def test_looking_creates_nothing(tmp_path):
    journal = open_journal(tmp_path / "state", read_only=True)
    assert journal.incidents() == []
    assert not (tmp_path / "state").exists()
