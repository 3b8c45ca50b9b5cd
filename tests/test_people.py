"""People come first: what they stop, start, edit or take out is left alone, obeyed, and said."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from host import Host
from standin.figures import GIB
from world import free_port, wait_until

MakeHost = Callable[..., Host]

#: A model that fits only with a shorter length.
TIGHT = {"weights_bytes": 16 * GIB, "kv_bytes_per_token": 512 * 1024}


def tight_host(vllm_host: MakeHost, **options: object) -> Host:
    return vllm_host(figures=TIGHT, flags="--max-model-len 32768 --max-num-seqs 128", gpu_bytes=24 * GIB, **options)


def test_a_stop_is_left_alone(vllm_host: MakeHost) -> None:
    host = vllm_host().start()
    host.wait_state("HEALTHY")
    host.supervisord.ctl("stop", "vllm")
    status = host.wait_state("WATCHING")
    assert "stopped" in status["reason"]
    assert host.history() == []
    host.supervisord.ctl("start", "vllm")
    host.wait_state("HEALTHY")
    assert host.spawns() == 2


def test_a_restart_is_left_alone_and_verified(vllm_host: MakeHost) -> None:
    host = vllm_host().start()
    before = host.wait_state("HEALTHY")["pid"]
    host.supervisord.ctl("restart", "vllm")
    after = host.wait(lambda status: status["state"] == "HEALTHY" and status["pid"] != before, "the new one HEALTHY")
    assert after["pid"] == host.pid
    assert host.history() == []
    assert host.spawns() == 2


def test_sigterm_by_hand_is_a_stop(vllm_host: MakeHost) -> None:
    host = vllm_host().start()
    host.wait_state("HEALTHY")
    os.kill(host.pid, signal.SIGTERM)
    status = host.wait_state("WATCHING")
    assert status["verdict"]["kind"] == "stopped"
    assert host.spawns() == 1


def test_an_unrelated_update_restarts_nothing(vllm_host: MakeHost) -> None:
    host = tight_host(vllm_host).start()
    host.wait_state("HEALTHY")
    pid = host.pid
    host.supervisord.write_program("other", "sleep 1000")
    done = host.supervisord.ctl("update")
    assert "other" in done.stdout
    assert host.pid == pid
    assert host.status()["state"] == "HEALTHY"


def test_a_running_vllm_is_taken_over_by_init_and_update(vllm_host: MakeHost) -> None:
    host = vllm_host()
    host.supervisord.start()
    host.supervisord.wait_state("vllm", "RUNNING")
    done = host.install()
    assert done.returncode == 0, done.stderr
    assert "supervisorctl" in done.stdout
    assert "update" in done.stdout
    update = host.supervisord.ctl("update")
    assert "supervisor-vllm" in update.stdout
    host.wait_state("HEALTHY")
    os.kill(host.pid, signal.SIGKILL)
    host.wait_healthy_again()


def test_a_hand_edit_of_the_users_file_wins(vllm_host: MakeHost) -> None:
    host = tight_host(vllm_host).start()
    host.wait_state("HEALTHY")
    learned = host.status()["changes"][0]["to"]
    assert f"--max-model-len {learned}" in str(host.override_command())
    edited = host.user_file.read_text().replace("--max-model-len 32768", "--max-model-len 4096")
    host.user_file.write_text(edited)
    wait_until(lambda: host.override_command() is None, 20, "the override to follow the edit")
    host.supervisord.ctl("update")
    status = host.wait(lambda status: (status["served"] or {}).get("max_model_len") == 4096, "the edit to be served")
    assert status["changes"] == []
    assert host.user_file.read_text() == edited


def test_an_edit_of_another_flag_keeps_what_was_learned(vllm_host: MakeHost) -> None:
    host = tight_host(vllm_host).start()
    host.wait_state("HEALTHY")
    host.user_file.write_text(host.user_file.read_text().replace("--max-num-seqs 128", "--max-num-seqs 64"))
    wait_until(lambda: "--max-num-seqs 64" in str(host.override_command()), 20, "the override to follow the edit")
    assert "--max-model-len 32768" not in str(host.override_command())
    assert len(host.status()["changes"]) == 1


def test_the_override_goes_with_the_users_section(vllm_host: MakeHost) -> None:
    """Else supervisord would not start any more."""
    host = tight_host(vllm_host).start()
    host.wait_state("HEALTHY")
    host.user_file.unlink()
    wait_until(lambda: host.override is None, 20, "the override to go")
    done = host.supervisord.ctl("reread")
    assert "ERROR" not in done.stdout + done.stderr


def test_undo(vllm_host: MakeHost) -> None:
    host = tight_host(vllm_host).start()
    host.wait_state("HEALTHY")
    done = host.verb("undo", "vllm")
    assert done.returncode == 0, done.stderr
    assert "--max-model-len" in done.stdout
    assert "supervisorctl" in done.stdout
    assert host.override_command() is None
    assert host.status()["changes"] == []
    assert host.user_file_is_untouched()


def test_uninstall_leaves_the_users_files_byte_for_byte(vllm_host: MakeHost) -> None:
    host = tight_host(vllm_host)
    before = {file.name: file.read_bytes() for file in host.supervisord.conf_dir.iterdir()}
    host.start()
    host.wait_state("HEALTHY")
    assert {file.name for file in host.supervisord.conf_dir.iterdir()} > set(before)
    done = host.verb("uninstall", "vllm")
    assert done.returncode == 0, done.stderr
    assert {file.name: file.read_bytes() for file in host.supervisord.conf_dir.iterdir()} == before
    update = host.supervisord.ctl("update")
    assert "ERROR" not in update.stdout
    assert host.supervisord.info("supervisor-vllm") == {}


def test_a_group_with_a_running_neighbour_is_not_torn_down(vllm_host: MakeHost) -> None:
    host = tight_host(vllm_host)
    host.supervisord.write_program("neighbour", "sleep 1000")
    host.supervisord.write("group.conf", "[group:both]\nprograms=vllm,neighbour\n")
    done = host.install()
    assert "group both" in done.stdout
    host.supervisord.start()
    neighbour = host.supervisord.wait_state("both:neighbour", "RUNNING")["pid"]
    status = host.wait_state("HELD")
    assert "both:neighbour" in status["reason"]
    assert host.supervisord.pid("both:neighbour") == neighbour
    assert host.override_command() is None


def test_a_group_alone_is_changed(vllm_host: MakeHost) -> None:
    host = tight_host(vllm_host)
    host.supervisord.write("group.conf", "[group:alone]\nprograms=vllm\n")
    host.start()
    status = host.wait_state("HEALTHY")
    assert status["changes"]


def test_settings_edited_by_hand_count_and_wrong_ones_are_named(vllm_host: MakeHost) -> None:
    host = vllm_host().start()
    host.wait_state("HEALTHY")
    file = host.supervisord.conf_dir / "supervisor-vllm.conf"
    good = file.read_text()
    file.write_text(re.sub(r"(?m)^restart_sec ?= ?.*$", "restart_sec = soon", good))
    wait_until(lambda: "restart_sec" in host.listener_log(), 20, "the listener to name the mistake")
    assert host.status_error().startswith("supervisor-vllm: ")
    assert "restart_sec = 'soon'" in host.status_error()
    file.write_text(good)
    os.kill(host.pid, signal.SIGKILL)
    host.wait_healthy_again()


def test_shadow_mode_changes_nothing(vllm_host: MakeHost) -> None:
    host = tight_host(vllm_host, startretries=1).start(mode="shadow")
    status = host.wait(lambda status: status["incidents"] > 0, "the first incident")
    assert host.override is None
    (first, *_) = host.history()
    assert first["plan"]["changes"][0]["flag"] == "--max-model-len"
    assert status["changes"] == []
    assert "shadow" in host.listener_log()


def test_shadow_mode_says_what_the_next_launch_proved(vllm_host: MakeHost) -> None:
    host = tight_host(vllm_host, startretries=0, autorestart="false").start(mode="shadow")
    host.wait(lambda status: status["incidents"] == 1, "the first death")
    assert host.history()[0]["hindsight"]["judgement"] == "open"
    host.supervisord.rpc.startProcess("vllm", False)
    host.wait(lambda status: status["incidents"] == 2, "the second death")
    first, second = host.history()
    assert first["hindsight"] == {"judgement": "right", "why": "started unchanged, it died of the same again"}
    assert second["plan"]["changes"] == first["plan"]["changes"]  # the first one's were never tried
    planned = first["plan"]["changes"][0]["to"]
    text = host.user_file.read_text()
    host.user_file.write_text(text.replace(host.command, f"{host.command} --max-model-len {planned}"))
    host.supervisord.ctl("update")
    host.wait_state("HEALTHY")
    assert host.history()[1]["hindsight"] == {"judgement": "right", "why": "changed like this, or further, it served"}
    assert "proved right" in host.verb("history").stdout


@pytest.mark.parametrize(
    "access", [{"password": "p%ss w0rd"}, {"http": "inet"}, {"http": "inet", "password": "secret"}]
)
def test_every_way_to_reach_supervisord(vllm_host: MakeHost, access: dict[str, str]) -> None:
    host = vllm_host(supervisord=access).start()
    host.wait_state("HEALTHY")
    os.kill(host.pid, signal.SIGKILL)
    host.wait_healthy_again()
    assert access.get("password", "no such text") not in host.listener_log() + json.dumps(host.history())


def test_the_api_key_is_used_and_written_nowhere(vllm_host: MakeHost) -> None:
    key = "c4nary-S3cret"
    host = vllm_host(flags=f"--api-key {key}").start()
    host.wait_state("HEALTHY")
    os.kill(host.pid, signal.SIGKILL)
    host.wait_healthy_again()
    written = b"".join(file.read_bytes() for file in host.state_dir.iterdir() if file.is_file())
    assert key.encode() not in written
    assert key not in json.dumps(host.history()) + json.dumps(host.status())


def test_an_edit_of_the_override_counts(vllm_host: MakeHost) -> None:
    host = tight_host(vllm_host).start()
    host.wait_state("HEALTHY")
    assert host.override is not None
    host.override.write_text(
        # as with sed, over the whole file
        re.sub(r"--max-model-len \d+ --max", "--max-model-len 5000 --max", host.override.read_text())
    )
    host.supervisord.ctl("update")
    status = host.wait(lambda status: (status["served"] or {}).get("max_model_len") == 5000, "the edit to be served")
    (change,) = status["changes"]
    assert (change["from"], change["to"]) == ("32768", "5000")
    assert "by hand" in change["why"]
    os.kill(host.pid, signal.SIGKILL)
    host.wait_healthy_again(2)
    assert "--max-model-len 5000" in str(host.override_command())


def test_deleting_the_override_undoes_everything_in_it(vllm_host: MakeHost) -> None:
    host = tight_host(vllm_host).start()
    host.wait_state("HEALTHY")
    assert host.override is not None
    host.override.unlink()
    host.wait(lambda status: status["changes"] == [], "the learned changes to go")


def test_a_stop_in_the_middle_of_a_recovery_ends_it(vllm_host: MakeHost) -> None:
    fault = {"where": "loading", "what": "engine_exception", "times": 1}
    host = vllm_host(figures={"load_seconds": 8, "fault": fault}, stopwaitsecs=1).start()
    host.wait(lambda status: status["state"] == "VERIFYING" and status["incidents"] == 1, "the second launch")
    host.supervisord.ctl("stop", "vllm")
    host.wait_state("WATCHING")
    (incident,) = host.history()
    assert incident["outcome"] == "held"
    assert host.spawns() == 2


def test_a_start_by_a_person_in_the_pause_is_the_recovery(vllm_host: MakeHost) -> None:
    host = vllm_host(figures={"fault": {"where": "loading", "what": "engine_exception", "times": 1}})
    host.start(restart_sec="600")
    host.wait_state("WAITING")
    host.supervisord.ctl("start", "vllm")
    host.wait_state("HEALTHY")
    (incident,) = host.history()
    assert (incident["outcome"], incident["launches"]) == ("healthy", 0)
    assert host.spawns() == 2


def test_two_programs_behind_one_listener(vllm_host: MakeHost, vllm_bin: Path) -> None:
    host = vllm_host()
    host.gpus.provide(count=2)
    host.install()
    command = f"{vllm_bin}/vllm serve {host.model} --port {free_port()}"
    host.supervisord.write_program("other", command, environment='CUDA_VISIBLE_DEVICES="1"')
    done = host.cli(
        "init", "--program", "other", "--conf-dir", str(host.supervisord.conf_dir), "--supervisord-conf",
        str(host.supervisord.conf_file), "--set", "restart_sec=0.1",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    host.supervisord.start()
    host.wait_state("HEALTHY")
    both = [host.pid, host.supervisord.wait_state("other", "RUNNING")["pid"]]
    for pid in both:
        os.kill(pid, signal.SIGKILL)
    host.wait_healthy_again()
    wait_until(lambda: "other  HEALTHY" in host.verb("status").stdout, 60, "the other one to be HEALTHY", step_sec=0.5)
    assert sorted(incident["program"] for incident in host.history()) == ["other", "vllm"]
