"""The kernel's lines, of all ages and in all shapes in which people have them."""

import os
from pathlib import Path

import pytest

from supervisor_vllm.evidence.kernel_log import gpu_faults, parse_kills, read_kernel_log
from supervisor_vllm.evidence.roots import Roots

REAL = Path(__file__).parent / "corpus" / "real"
TAIL = "total-vm:3448708kB, anon-rss:1219004kB, file-rss:303520kB, shmem-rss:0kB, UID:0 pgtables:3736kB oom_score_adj:0"


@pytest.mark.parametrize(
    ("line", "pid", "name"),
    [
        ("Killed process 9163, UID 27, (mysqld) total-vm:1kB, anon-rss:1kB, file-rss:1kB", 9163, "mysqld"),
        ("Killed process 1234 (httpd), UID 48, total-vm:1kB, anon-rss:1kB", 1234, "httpd"),
        ("Killed process 4249 (python) total-vm:1kB, anon-rss:1kB", 4249, "python"),
        (f"Memory cgroup out of memory: Killed process 16887 (VLLM::Worker) {TAIL}", 16887, "VLLM::Worker"),
        (f"Out of memory: Killed process 7 (a) b) (c) {TAIL}", 7, "a) b) (c"),
        (f"Out of memory (oom_kill_allocating_task): Killed process 8 (x) {TAIL}", 8, "x"),
        ('sending SIGTERM to process 55 uid 1000 "vllm": oom_score 900, VmRSS 90000 MiB', 55, "vllm"),
    ],
)
@pytest.mark.parametrize(
    "stamp",
    [
        "",
        "[ 2220.604297] ",
        "[Fri May  1 12:00:00 2026] ",
        "6,1234,2220604297,-;",
        "May  1 12:00:00 node7 kernel: ",
        "May 01 12:00:00 node7 kernel: [ 2220.604297] ",
        "2026-05-01T12:00:00+0200 node7 kernel: ",
        "<6>[ 2220.604297] ",
    ],
    ids=["bare", "dmesg", "dmesg-T", "kmsg", "journal", "syslog", "journal-iso", "level"],
)
def test_kill(stamp: str, line: str, pid: int, name: str) -> None:
    (kill,) = parse_kills([stamp + line])
    assert (kill.pid, kill.name) == (pid, name)
    if "2220" in stamp:
        assert kill.boot_seconds == 2220.604297


def test_constraint_and_kill_are_one() -> None:
    (kill,) = parse_kills((REAL / "memcg.kernel").read_text().splitlines())
    assert (kill.pid, kill.name, kill.constraint) == (16887, "VLLM::Worker", "CONSTRAINT_MEMCG")
    assert (kill.oom_memcg, kill.task_memcg) == ("/vt", "/vt")


@pytest.mark.parametrize(
    "keys",
    [
        "nodemask=(null),cpuset=/,mems_allowed=0,oom_memcg=/a,task_memcg=/a/b,task=py,pid=5,uid=0",
        "nodemask=(null),oom_memcg=/a,task_memcg=/a/b,task=py,pid=5,uid=0",
        "nodemask=(null),cpuset=x,global_oom,task_memcg=/a/b,task=py,pid=5,uid=0",
        "task_memcg=/a/b,task=py,pid=5",
    ],
)
def test_any_key_may_be_absent(keys: str) -> None:
    (kill,) = parse_kills([f"oom-kill:constraint=CONSTRAINT_BPF,{keys}"])
    assert (kill.pid, kill.name, kill.task_memcg) == (5, "py", "/a/b")


def test_a_whole_group() -> None:
    kills = parse_kills(
        [
            "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),oom_memcg=/a,task_memcg=/a,task=p,pid=5,uid=0",
            f"Memory cgroup out of memory: Killed process 5 (p) {TAIL}",
            "Tasks in /a are going to be killed due to memory.oom.group set",
            f"Memory cgroup out of memory: Killed process 6 (q) {TAIL}",
            "oom_reaper: reaped process 5 (p), now anon-rss:0kB, file-rss:0kB, shmem-rss:0kB",
        ]
    )
    assert [(kill.pid, kill.task_memcg) for kill in kills] == [(5, "/a"), (None, "/a"), (6, "/a")]
    assert [kill.whole_cgroup for kill in kills] == [False, True, False]


def test_4_x_pair_counts_once() -> None:
    (kill,) = parse_kills(
        [
            "Task in /docker/ab killed as a result of limit of /docker/ab",
            "Memory cgroup out of memory: Kill process 4249 (python) score 1987 or sacrifice child",
            "Killed process 4249 (python) total-vm:1kB, anon-rss:1kB, file-rss:0kB",
        ]
    )
    assert (kill.pid, kill.task_memcg) == (4249, "/docker/ab")


def test_systemd_oomd_names_a_cgroup() -> None:
    (kill,) = parse_kills(
        [
            "May 01 12:00:00 n systemd-oomd[600]: Killed /system.slice/v.service due to memory pressure for "
            "/system.slice being 55.71% > 50.00% for > 20s with reclaim activity"
        ]
    )
    assert (kill.pid, kill.task_memcg) == (None, "/system.slice/v.service")


@pytest.mark.parametrize(
    "line",
    [
        "Killed",
        "vllm invoked oom-killer: gfp_mask=0x1, order=0",
        "oom_reaper: reaped process 5 (p), now anon-rss:0kB",
        "usb 1-1: Killed process monitor",
        "a program says: Killed process 5 (p) total-vm:",
        "",
    ],
)
def test_no_kill(line: str) -> None:
    assert parse_kills([line]) == ()


def test_kmsg_from_a_time_on(tmp_path: Path) -> None:
    kmsg = tmp_path / "kmsg"
    kmsg.write_text(
        "6,1,999999,-;before\n6,2,2220604174,-;Out of memory: first\n SUBSYSTEM=x\n6,3,2220604297,c;second\n"
    )
    assert read_kernel_log(Roots(kmsg=kmsg), 2.0) == ("[ 2220.604174] Out of memory: first", "[ 2220.604297] second")
    assert read_kernel_log(Roots(kmsg=kmsg), 1e9) == ()


def test_can_not_see_is_not_nothing(tmp_path: Path) -> None:
    assert read_kernel_log(Roots(kmsg=tmp_path / "none"), 0) is None


@pytest.mark.skipif(not os.access("/dev/kmsg", os.R_OK), reason="/dev/kmsg can't be read here")
def test_the_real_device_does_not_block() -> None:
    lines = read_kernel_log(Roots(), 0)
    assert lines is None or all(line.startswith("[") for line in lines)


def test_gpu_faults() -> None:
    lines = [
        "[1.0] NVRM: Xid (PCI:0000:41:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
        "[1.0] NVRM: Xid (PCI:0000:41:00): 31, pid=5, name=python, Ch 00000008, MMU Fault",
    ]
    assert len(gpu_faults(lines)) == 1
