"""`explain` as people use it: a file, a pipe, a folder, another life; in two languages; what it rules out."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from supervisor_vllm.kinds import KINDS

REAL = Path(__file__).parent / "corpus" / "real"


def explain(*arguments: str, stdin: bytes = b"", **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if name not in ("LANG", "LC_ALL", "LC_MESSAGES")}
    done = subprocess.run(
        [sys.executable, "-m", "supervisor_vllm", "explain", *arguments],
        input=stdin,
        capture_output=True,
        timeout=60,
        check=False,
        env={**clean, **environment},
    )
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


def explained(*arguments: str, stdin: bytes = b"") -> dict:
    return json.loads(explain(*arguments, "--json", stdin=stdin).stdout)


def test_a_pipe_says_what_the_file_says() -> None:
    path = REAL / "free_check.log"
    piped = explained("-", "--exit-status", "1", stdin=path.read_bytes())
    assert piped == explained(str(path), "--exit-status", "1")


def test_a_compressed_file(tmp_path: Path) -> None:
    path = tmp_path / "vllm.log.2.gz"
    path.write_bytes(gzip.compress((REAL / "free_check.log").read_bytes()))
    assert explained(str(path), "--exit-status", "1")["kind"] == "gpu_neighbour"


def test_a_folder_is_a_table(tmp_path: Path) -> None:
    for name in ("free_check", "badarg", "port"):
        (tmp_path / f"{name}.log").write_bytes((REAL / f"{name}.log").read_bytes())
    (tmp_path / "notes.md").write_text("CUDA out of memory")
    (tmp_path / "empty.log").touch()
    rows = explained("--dir", str(tmp_path))["explanations"]
    assert [(row["file"], row["kind"]) for row in rows] == [
        ("badarg.log", "bad_arguments"),
        ("free_check.log", "gpu_neighbour"),
        ("port.log", "port_in_use"),
    ]
    shown = explain("--dir", str(tmp_path)).stdout
    assert all(name in shown for name in ("badarg.log", "gpu_neighbour", "port_in_use"))


def test_several_lives_in_one_file(tmp_path: Path) -> None:
    path = tmp_path / "vllm.log"
    names = ("free_check", "badarg", "port")
    path.write_bytes(b"".join((REAL / f"{name}.log").read_bytes() for name in names))
    kinds = [explained(str(path), "--life", number, "--exit-status", "1")["kind"] for number in ("1", "2", "3", "-1")]
    assert kinds == ["gpu_neighbour", "bad_arguments", "port_in_use", "port_in_use"]
    assert explained(str(path), "--exit-status", "1")["kind"] == "port_in_use"
    evidence = explained(str(path), "--life", "3", "--exit-status", "1")["evidence"][0]
    assert path.read_text().split("\n")[evidence["line"] - 1].startswith(evidence["text"][:100])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "explain needs one LOG"),
        (("a.log", "--dir", "."), "explain needs one LOG"),
        (("--dir", "/nowhere/at/all"), "is no directory"),
        ((str(REAL / "port.log"), "--life", "9"), "there is no life 9"),
        ((str(REAL / "port.log"), "--life", "0"), "there is no life 0"),
        ((str(REAL),), "--dir"),
        ((str(REAL / "port.log"), "--signatures", "/nowhere"), "is no directory"),
        ((str(REAL / "port.log"), "--lang", "fr"), "fr"),
    ],
)
def test_wrong_use_is_one_line(arguments: tuple[str, ...], says: str) -> None:
    done = explain(*arguments)
    assert done.returncode == 2
    assert says in done.stderr
    assert done.stderr.count("\n") == 1


def test_asked_whether_memory_ran_out() -> None:
    assert explain(str(REAL / "free_check.log"), "--oom").returncode == 0
    assert explain(str(REAL / "badarg.log"), "--oom").returncode == 1
    assert explain(str(REAL / "badarg.log")).returncode == 0


def test_chinese() -> None:
    log = str(REAL / "free_check.log")
    asked = explain(log, "--exit-status", "1", "--lang", "zh").stdout
    assert "启动时显存被其他进程占用" in asked
    assert "9.34 GiB 中有 7.91 GiB 空闲" in asked
    assert explain(log, "--exit-status", "1", LANG="zh_CN.UTF-8").stdout == asked
    assert "启动时" not in explain(log, "--exit-status", "1", LANG="zh_CN.UTF-8", LC_ALL="C").stdout
    # programs get what they always got, unless they ask
    assert "显存" not in explain(log, "--exit-status", "1", "--json", LANG="zh_CN.UTF-8").stdout
    assert "显存" in explain(log, "--exit-status", "1", "--json", "--lang", "zh").stdout


def test_chinese_knows_every_kind_and_every_exclusion() -> None:
    from supervisor_vllm import chinese, explanation

    assert set(chinese._KINDS) == set(KINDS)
    assert set(chinese.RULED_OUT) == set(explanation._SENTENCES)


def test_what_is_ruled_out_and_why(tmp_path: Path) -> None:
    kernel = tmp_path / "kernel.log"
    kernel.write_text("[    1.000000] Linux version 6.1\n")
    log = str(REAL / "kill9worker.log")
    without = explained(log, "--exit-status", "0")["ruled_out"]
    assert any("no kernel log was given" in sentence for sentence in without)
    kernel.write_text(
        "[ 2220.604297] Out of memory: Killed process 99 (mysqld) total-vm:1kB, anon-rss:1kB, file-rss:0kB, "
        "shmem-rss:0kB, UID:0 pgtables:1kB oom_score_adj:0\n"
    )
    stranger = explained(log, "--exit-status", "0", "--kernel-log", str(kernel))
    assert stranger["kind"] == "killed"
    assert any("the kernel killed mysqld (pid 99), which is not one of its" in text for text in stranger["ruled_out"])
    shown = explain(str(REAL / "badarg.log"), "--exit-status", "2").stdout
    assert "not device memory: no allocation failed in the log" in shown
