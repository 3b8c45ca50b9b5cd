"""init, check, undo and uninstall: what they find, what they write, and what they refuse in one line."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from host import Host
from world import Supervisord, run_cli

from supervisor_vllm.supervisord_conf import program, read_conf

MakeHost = Callable[..., Host]
MakeSupervisord = Callable[..., Supervisord]


@pytest.fixture
def host(vllm_host: MakeHost) -> Host:
    return vllm_host()


def files(host: Host) -> dict[str, tuple[bytes, int]]:
    return {f.name: (f.read_bytes(), f.stat().st_mtime_ns) for f in host.supervisord.conf_dir.iterdir()}


def refused(done: subprocess.CompletedProcess[str]) -> str:
    """One line on stderr, exit status 2."""
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.startswith("supervisor-vllm: ")
    assert done.stderr.count("\n") == 1
    return done.stderr


def test_running_it_twice_changes_nothing(host: Host) -> None:
    first = host.install()
    assert first.returncode == 0
    assert "restarts vllm once" in first.stdout
    assert "supervisorctl -c" in first.stdout
    before = files(host)
    second = host.install()
    assert second.returncode == 0
    assert files(host) == before
    assert "nothing has changed" in second.stdout
    assert host.user_file_is_untouched()


def test_one_setting_changed_later(host: Host) -> None:
    host.install()
    file = host.supervisord.conf_dir / "supervisor-vllm.conf"
    file.write_text(file.read_text().replace("; restart_steps=0", "; mine: do not touch\n; restart_steps=0"))
    before = file.read_text()
    done = host.cli(
        "init", "--program", "vllm", "--conf-dir", str(host.supervisord.conf_dir), "--supervisord-conf",
        str(host.supervisord.conf_file), "--set", "start_limit_burst=7",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    changed = [line for line in file.read_text().splitlines() if line not in before.splitlines()]
    assert [line.replace(" ", "") for line in changed] == ["start_limit_burst=7"]


def test_a_second_program(host: Host, vllm_bin: Path) -> None:
    host.install()
    host.supervisord.write_program("other", f"{vllm_bin}/vllm serve {host.model} --port 1")
    arguments = ["--conf-dir", str(host.supervisord.conf_dir)]
    done = host.cli("init", "--program", "other", *arguments, "--supervisord-conf", str(host.supervisord.conf_file))
    assert done.returncode == 0, done.stderr
    text = (host.supervisord.conf_dir / "supervisor-vllm.conf").read_text()
    assert text.count("[eventlistener:") == 1
    assert "[supervisor-vllm:vllm]" in text
    assert "[supervisor-vllm:other]" in text
    host.cli("uninstall", "other", *arguments)
    assert "[supervisor-vllm:other]" not in (host.supervisord.conf_dir / "supervisor-vllm.conf").read_text()
    assert host.override is not None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["restart_secs=3"], "did you mean restart_sec"),
        (["restart_sec=soon"], "restart_sec = 'soon' wants seconds"),
        (["restart_sec"], "there is no '='"),
        (["health_prompt=a ; b"], "can't be kept"),
        (["prefer=speed"], "wants one of context, concurrency"),
        (["gpu_memory_utilization_min=0.96"], "is above gpu_memory_utilization_max"),
    ],
)
def test_bad_settings_are_one_line_and_nothing_is_written(host: Host, options: list[str], words: str) -> None:
    before = files(host)
    done = host.cli(
        "init", "--program", "vllm", "--conf-dir", str(host.supervisord.conf_dir), "--supervisord-conf",
        str(host.supervisord.conf_file), *(f"--set={option}" for option in options),
    )  # fmt: skip
    assert words in refused(done)
    assert files(host) == before


def test_odd_texts_survive(host: Host) -> None:
    assert host.install(health_prompt="100% 你好 %(x)s").returncode == 0
    host.supervisord.start()
    host.wait_state("HEALTHY")
    text = (host.supervisord.conf_dir / "supervisor-vllm.conf").read_text()
    assert "100% 你好 %(x)s" in text


@pytest.mark.parametrize(
    ("command", "options", "words"),
    [
        ("/opt/start.sh", {}, "does not run a vLLM server"),
        ("vllm bench serve", {}, "does not run a vLLM server"),
        ("vllm serve M", {"numprocs": 2, "process_name": "%(program_name)s_%(process_num)02d"}, "numprocs=2"),
    ],
)
def test_programs_it_can_not_look_after(host: Host, command: str, options: dict[str, object], words: str) -> None:
    host.supervisord.write_program("vllm", command, **options)
    before = files(host)
    assert words in refused(host.install())
    assert files(host) == before


def test_an_unknown_program_is_told_which_there_are(host: Host) -> None:
    done = host.cli(
        "init", "--program", "llm", "--conf-dir", str(host.supervisord.conf_dir), "--supervisord-conf",
        str(host.supervisord.conf_file),
    )  # fmt: skip
    assert "the programs there are vllm" in refused(done)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"stdout_logfile": "NONE"}, "no log that can be read back"),
        ({"stdout_logfile": "/dev/stdout", "stdout_logfile_maxbytes": 0}, "no log that can be read back"),
        ({"stdout_logfile": "AUTO"}, "deletes that log at its next start"),
        ({"redirect_stderr": "false"}, "redirect_stderr=true is better"),
        ({"process_name": "qwen"}, "vllm:qwen"),
    ],
)
def test_what_it_sees(host: Host, options: dict[str, object], words: str) -> None:
    host.supervisord.write_program("vllm", host.command, **options)
    done = host.install()
    assert done.returncode == 0, done.stderr
    assert words in done.stdout


def test_a_host_without_an_http_server(vllm_host: MakeHost) -> None:
    assert "[unix_http_server]" in refused(vllm_host(supervisord={"http": None}).install())


def test_a_hashed_password(host: Host) -> None:
    main = host.supervisord.conf_file
    main.write_text(main.read_text().replace("chmod=0700", "chmod=0700\nusername=u\npassword={SHA}abc"))
    assert "[supervisorctl]" in host.install().stdout


def test_a_directory_that_is_not_included(host: Host, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    done = host.cli(
        "init", "--program", "vllm", "--conf-dir", str(elsewhere), "--supervisord-conf", str(host.supervisord.conf_file)
    )
    assert "conf.d/*.conf" in refused(done)
    assert not list(elsewhere.iterdir())


@pytest.mark.parametrize("name", ["vllm.conf", "zz-vllm.conf", "zzzz.conf", "~last.conf"])
def test_the_override_wins_whatever_the_users_file_is_called(host: Host, name: str) -> None:
    host.user_file.rename(host.user_file.parent / name)
    done = host.install()
    assert done.returncode == 0 or name == "~last.conf", done.stderr
    if done.returncode:
        assert "can't win" in refused(done)
        return
    section = program(read_conf(host.supervisord.conf_file), "vllm")
    assert section.options["autorestart"] == "false"
    assert section.options["killasgroup"] == "true"


def test_a_later_glob_that_can_not_be_beaten(host: Host) -> None:
    later = host.supervisord.directory / "later.d"
    later.mkdir()
    host.user_file.rename(later / "vllm.conf")
    main = host.supervisord.conf_file
    main.write_text(main.read_text().replace("conf.d/*.conf", "conf.d/*.conf later.d/*.conf"))
    assert "can't win" in refused(host.install())


def test_other_suffixes_and_the_main_file(host: Host) -> None:
    main = host.supervisord.conf_file
    main.write_text(main.read_text().replace("conf.d/*.conf", "conf.d/*.ini") + host.user_file.read_text())
    host.user_file.unlink()
    assert host.install().returncode == 0
    names = sorted(file.name for file in host.supervisord.conf_dir.iterdir())
    assert names == ["supervisor-vllm.ini", "zz-supervisor-vllm-vllm.ini"]
    host.supervisord.start()
    host.wait_state("HEALTHY")


def test_shadow_mode_stays_what_the_file_says(host: Host) -> None:
    host.install(mode="shadow")
    assert host.override is None
    again = host.cli(
        "init", "--program", "vllm", "--conf-dir", str(host.supervisord.conf_dir), "--supervisord-conf",
        str(host.supervisord.conf_file),
    )  # fmt: skip
    assert again.returncode == 0
    assert host.override is None


def test_all_or_nothing(host: Host) -> None:
    """The second file can't be written: the first one is taken back."""
    (host.supervisord.conf_dir / "zz-supervisor-vllm-vllm.conf").mkdir()
    done = host.install()
    assert done.returncode == 2
    assert not (host.supervisord.conf_dir / "supervisor-vllm.conf").exists()


def test_the_state_directory(host: Host) -> None:
    host.install()
    assert host.state_dir.stat().st_mode & 0o777 == 0o700


def test_check(host: Host) -> None:
    assert "run supervisor-vllm init first" in refused(host.verb("check"))
    host.start()
    host.wait_state("HEALTHY")
    assert host.verb("check").returncode == 0
    listener = host.listener_pid()
    os.kill(listener, signal.SIGSTOP)  # first, so that it can't take the override away
    try:
        host.user_file.unlink()
        done = host.verb("check")
        assert done.returncode == 1
        assert "supervisord will not start" in done.stdout
    finally:
        os.kill(listener, signal.SIGCONT)


def test_nothing_to_undo(host: Host) -> None:
    host.install()
    done = host.verb("undo", "vllm")
    assert done.returncode == 0
    assert "nothing to undo" in done.stdout
    assert "doesn't look after" in refused(host.verb("undo", "other"))


@pytest.mark.parametrize(
    "arguments",
    [[], ["nonsense"], ["init"], ["init", "--program", "x"], ["init", "--program", "x", "--conf-dir", "/etc/passwd"],
     ["listen", "--config", "/nowhere"], ["status", "--config", "/etc/passwd"], ["explain"], ["explain", "/etc"],
     ["explain", "/etc/passwd", "--exit-status", "x"], ["undo"], ["history", "--conf-dir", "/nowhere"]],
)  # fmt: skip
def test_wrong_use_is_one_line(arguments: list[str]) -> None:
    refused(run_cli(*arguments))
