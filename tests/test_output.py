"""The output listener's parts: supervisord's protocol, the bytes behind an event, the bounded files, a full disk."""

from __future__ import annotations

import io
import os
import re
import signal
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from host import Host
from hypothesis import given
from hypothesis import strategies as st
from world import Supervisord, wait_until

from supervisor_vllm.evidence.vllm_log import mark_end, read_life
from supervisor_vllm.output import captured_channels, is_log_file
from supervisor_vllm.output_file import BACKUPS, OutputFile
from supervisor_vllm.output_listener import raw_bytes
from supervisor_vllm.protocol import read_events
from supervisor_vllm.supervisord_conf import ProgramSection

MakeHost = Callable[..., Host]
LINE = "INFO 07-01 12:00:00 [loggers.py:259] 你好 line %d\n"


def envelope(payload: str, serial: int = 7) -> bytes:
    """As supervisor 4.3.0 process.py makes it: `len` is that of a str."""
    head = f"ver:3.0 server:你 serial:{serial} pool:p poolserial:1 eventname:PROCESS_LOG_STDOUT len:{len(payload)}\n"
    return (head + payload).encode()


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"])), max_size=5))
def test_the_protocol_counts_characters(payloads: list[str]) -> None:
    stream = io.TextIOWrapper(io.BytesIO(b"".join(map(envelope, payloads))), encoding="utf-8", newline="\n")
    answers = io.StringIO()
    events = list(read_events(stream, answers))
    assert [event.payload for event in events] == payloads
    assert all(event.serial == 7 for event in events)
    assert answers.getvalue() == "READY\n" + "RESULT 2\nOKREADY\n" * len(payloads)


@given(st.binary())
def test_the_bytes_are_those_that_the_program_wrote(data: bytes) -> None:
    """As supervisor events.py hands them out."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        text = f"Undecodable: {data!r}"
    assert raw_bytes(text) == data


@pytest.mark.parametrize(
    "text", ["Undecodable: b'abc'", "Undecodable: b'abc", "Undecodable: b'' + b'\\xff'", "Undecodable: b'\0'"]
)
def test_a_program_that_writes_these_words_itself(text: str) -> None:
    assert raw_bytes(text) == text.encode()


@pytest.mark.parametrize(
    ("options", "shadow", "channels"),
    [
        ({}, False, ()),
        ({"stdout_logfile": "NONE"}, False, ("stdout",)),
        ({"stdout_logfile": "none", "redirect_stderr": "true"}, False, ("stdout",)),
        ({"stdout_logfile": "/dev/stdout", "stderr_logfile": "/dev/stderr"}, False, ("stdout", "stderr")),
        ({"stdout_logfile": "/var/log/v.log", "stderr_logfile": "syslog"}, False, ("stderr",)),
        ({"stdout_syslog": "true"}, False, ()),  # AUTO's file is there as well
        ({"stdout_logfile": "NONE", "stdout_events_enabled": "false"}, False, ()),
        ({"stdout_logfile": "NONE"}, True, ()),
        ({"stdout_logfile": "NONE", "stdout_events_enabled": "on"}, True, ("stdout",)),
    ],
)  # fmt: skip
def test_the_channels_that_only_events_can_tell_of(
    options: dict[str, str], shadow: bool, channels: tuple[str, ...]
) -> None:
    section = ProgramSection("v", "vllm serve M", Path("v.conf"), options, "v", ("v:v",))
    assert captured_channels(section, shadow=shadow) == channels


def test_what_is_a_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "log").touch()
    assert is_log_file(str(tmp_path / "log"))
    assert is_log_file(str(tmp_path / "not yet"))
    assert is_log_file("/dev/shm/vllm.log")
    assert not any(map(is_log_file, [str(tmp_path / "fifo"), "/dev/stdout", "/proc/self/fd/1", "NONE", "syslog", ""]))


def numbers(path: Path, mark: object) -> list[int]:
    return [int(match[1]) for line in read_life((mark,)) if (match := re.search(r"line (\d+)", line.text))]


def test_a_long_life_keeps_its_beginning_and_its_end(tmp_path: Path) -> None:
    file = OutputFile(tmp_path / "v.out", pytest.fail, file_bytes=4000)
    for number in range(30):
        file.append(1, (LINE % number).encode())
    mark = mark_end(str(file.path))
    for number in range(10_000):
        file.append(2, (LINE % number).encode())
    kept = numbers(file.path, mark)
    assert kept[:40] == list(range(40))
    assert kept[-40:] == list(range(9_960, 10_000))
    files = list(tmp_path.iterdir())
    assert len(files) == BACKUPS + 1
    assert sum(path.stat().st_size for path in files) < (BACKUPS + 2) * 4000
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in files)


def test_many_short_lives(tmp_path: Path) -> None:
    file = OutputFile(tmp_path / "v.out", pytest.fail, file_bytes=4000)
    for pid in range(1, 100):
        mark = mark_end(str(file.path))
        for number in range(25):
            file.append(pid, (LINE % number).encode())
        assert numbers(file.path, mark) == list(range(25))
    assert len(list(tmp_path.iterdir())) == BACKUPS + 1


def test_a_full_disk_costs_the_output_and_is_said_once() -> None:
    said: list[str] = []
    file = OutputFile(Path("/dev/full"), said.append)
    for _ in range(5):
        file.append(1, b"text\n")
    assert len(said) == 1
    assert "No space left" in said[0]


def test_a_folder_that_is_not_there_and_then_is(tmp_path: Path) -> None:
    said: list[str] = []
    file = OutputFile(tmp_path / "gone" / "v.out", said.append)
    file.append(1, b"lost\n")
    (tmp_path / "gone").mkdir()
    file.append(1, b"kept\n")
    assert file.path.read_bytes() == b"kept\n"
    assert [("can't be written" in text, "again" in text) for text in said] == [(True, False), (False, True)]


def test_a_file_that_somebody_removed(tmp_path: Path) -> None:
    file = OutputFile(tmp_path / "v.out", pytest.fail)
    file.append(1, b"one\n")
    file.path.unlink()
    file.look_after()
    file.append(1, b"two\n")
    assert file.path.read_bytes() == b"two\n"


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / "v.out").symlink_to(tmp_path / "elsewhere")
    OutputFile(tmp_path / "v.out", said.append).append(1, b"text\n")
    assert said
    assert not (tmp_path / "elsewhere").exists()


def test_a_flood_is_kept_whole(supervisord: Supervisord, tmp_path: Path) -> None:
    """5,000 lines a second, cut anywhere, with progress bars: nothing is lost, supervisord's buffer never overflows."""
    program = tmp_path / "flood.py"
    program.write_text(
        "import os, time\n"
        "begin, done = time.monotonic(), 0\n"
        "while done < 15000:\n"
        "    due = min(15000, int((time.monotonic() - begin) * 5000))\n"
        "    for done in range(done, due):\n"
        f"        text = ({LINE!r} % done).encode() + '\\r进度 50%\\r'.encode()\n"
        "        os.write(1, text[:40]); os.write(1, text[40:])\n"
        "    done = due\n"
        "    time.sleep(0.001)\n"
        "time.sleep(600)\n"
    )
    config = tmp_path / "sv.ini"
    state = tmp_path / "state"
    config.write_text(
        f"[supervisor-vllm]\nstate_dir={state}\nsupervisord_conf={supervisord.conf_file}\n"
        "[supervisor-vllm:flood]\noverride=zz.ini\n"
    )
    supervisord.write_program(
        "flood", f"{sys.executable} {program}", stdout_logfile="NONE", stdout_events_enabled="true"
    )
    supervisord.write(
        "output.conf",
        f"[eventlistener:output]\ncommand={sys.executable} -m supervisor_vllm.output_listener --config {config}\n"
        "events=PROCESS_LOG,PROCESS_STATE,TICK_5\nbuffer_size=10000\nstartsecs=0\ndirectory=/\n"
        f"stderr_logfile={tmp_path}/output.log\n",
    )
    supervisord.start()
    file = state / "output" / "flood.out"
    wait_until(lambda: file.exists() and b"line 14999\n" in file.read_bytes()[-200:], 60, "the last line")
    wait_until(lambda: file.read_bytes().endswith("\r进度 50%\r".encode()), 10, "the very end")
    assert "overflowed" not in supervisord.output()
    kept = file.read_bytes()
    for n in range(15_000):
        line = (LINE % n).encode() + "\r进度 50%\r".encode()
        # line by line: pytest takes minutes to show how two texts of a megabyte differ
        assert kept[: len(line)] == line
        kept = kept[len(line) :]
    assert not kept


def test_an_output_listener_that_is_killed_comes_back(vllm_host: MakeHost) -> None:
    fault = {"where": "first_completion", "what": "illegal_memory_access", "times": 1}
    host = vllm_host(figures={"fault": fault}, stdout_logfile="NONE").start()
    host.wait_healthy_again()
    before = int(host.supervisord.info("supervisor-vllm-output")["pid"])
    os.kill(before, signal.SIGKILL)
    wait_until(
        lambda: host.supervisord.info("supervisor-vllm-output").get("pid", 0) not in (0, before), 20, "a new one"
    )
    wait_until(lambda: host.verb("check").returncode == 0, 20, "the output listener to run")
    os.kill(host.pid, signal.SIGKILL)
    host.wait_healthy_again(2)
    assert [incident["verdict"]["kind"] for incident in host.history()] == ["engine_crash", "killed"]


def test_check_says_that_the_section_is_missing(vllm_host: MakeHost) -> None:
    host = vllm_host(stdout_logfile="NONE")
    assert host.install().returncode == 0
    assert host.override is not None
    assert "stdout_events_enabled=true" in host.override.read_text()
    file = host.supervisord.conf_dir / "supervisor-vllm.conf"
    text = file.read_text()
    begin = text.index("[eventlistener:supervisor-vllm-output]")
    file.write_text(text[:begin] + text[text.index("[supervisor-vllm]") :])
    assert "has no section [eventlistener:supervisor-vllm-output]" in host.verb("check").stdout
    assert host.install().returncode == 0
    assert "[eventlistener:supervisor-vllm-output]" in file.read_text()


def test_a_program_with_a_file_needs_none_of_it(vllm_host: MakeHost) -> None:
    host = vllm_host()
    host.install()
    assert "output" not in (host.supervisord.conf_dir / "supervisor-vllm.conf").read_text()
    assert "events_enabled" not in host.override.read_text()
