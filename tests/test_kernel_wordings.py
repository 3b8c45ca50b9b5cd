"""What the kernel and the daemons beside it say of a kill, from 2.6.18 to 6.18, and what only looks like one."""

from __future__ import annotations

import bz2
import gzip
import lzma
import random
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from supervisor_vllm.evidence.gpu_events import gpu_events
from supervisor_vllm.evidence.kernel_log import gpu_faults, parse_kills, read_kernel_file

TAIL = "total-vm:1kB, anon-rss:1kB, file-rss:0kB, shmem-rss:0kB, UID:0 pgtables:1kB oom_score_adj:0"
KEYS = "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0,oom_memcg={0},task_memcg={0},"


@pytest.mark.parametrize(
    ("line", "pid", "name"),
    [
        ("Out of memory: Killed process 5 (httpd).", 5, "httpd"),  # RHEL 5
        ("Out of memory (oom_kill_allocating_task): Killed process 5 (x) total-vm:1kB, anon-rss:1kB", 5, "x"),
        ("No available memory (MPOL_BIND): Killed process 5 (x).", 5, "x"),
        ("Killed process 5 (x) vsz:1kB, anon-rss:1kB, file-rss:1kB", 5, "x"),  # 2.6.3x
        ("Killed process 5, UID 27, (mysqld) total-vm:1kB, anon-rss:1kB", 5, "mysqld"),  # RHEL 6
        ("Killed process 5 (httpd), UID 48, total-vm:1kB", 5, "httpd"),  # RHEL 7
        ('Killed process 5 (x) in VE "101" total-vm:1kB, anon-rss:1kB', 5, "x"),  # OpenVZ
        ("Kill process 5 (x) sharing same memory", 5, "x"),
        (f"Memory cgroup out of memory: Killed process 5 (VLLM::Worker TP) {TAIL}", 5, "VLLM::Worker TP"),
        (f"Out of memory: Killed process 5 (a, b) (c) {TAIL}", 5, "a, b) (c"),
        (f'Out of memory: Killed process 5 ("it\'s") {TAIL}', 5, '"it\'s"'),
        (f"Out of memory: Killed process 5 () {TAIL}", 5, ""),
        ('sending SIGTERM to process 5 "python": badness 900, VmRSS 1234 MiB', 5, "python"),
        ('sending SIGKILL to process 5 uid 0 "a b": oom_score 9, oom_score_adj 0, VmRSS 1 MiB, cmdline "x"', 5, "a b"),
        ("System OOM encountered, victim process: python3, pid: 5", 5, "python3"),
        ("Warning  SystemOOM  6m57s  kubelet  System OOM encountered, victim process: a, b, pid: 5", 5, "a, b"),
        (
            'I0501 12:00:00.123456    1234 oom_watcher_linux.go:79] "Got sys oom event" event={"Pid":5,'
            '"ProcessName":"python3","TimeOfDeath":"2026-05-01T12:00:00Z","ContainerName":"/"}',
            5,
            "python3",
        ),
    ],
)
def test_a_process(line: str, pid: int, name: str) -> None:
    (kill,) = parse_kills([line])
    assert (kill.pid, kill.name, kill.whole_cgroup) == (pid, name, False)


@pytest.mark.parametrize(
    ("line", "path"),
    [
        ("Killed /a.slice/b.service due to memory pressure for /a.slice being 55% > 50%", "/a.slice/b.service"),
        ("Killed /a/b.scope due to memory used (1) / total (2) and swap used (3) / total (4)", "/a/b.scope"),
        ("Marked /a/b.scope for killing due to memory pressure for /a being 1% > 0%", "/a/b.scope"),
        ("oomd kill: 81.28 80.05 42.78 a.slice/b 1000 ruleset:[r] detectorgroup:[d] killer:k v2", "/a.slice/b"),
        ("Tasks in /a b/c are going to be killed due to memory.oom.group set", "/a b/c"),
    ],
)  # fmt: skip
def test_a_whole_cgroup(line: str, path: str) -> None:
    (kill,) = parse_kills([line])
    assert (kill.pid, kill.task_memcg, kill.whole_cgroup) == (None, path, True)


HEX = "c44d2f7a9f1f16bb3f6922e7c02215d9618db819fc89f254817b5f52d91f74ea"


@pytest.mark.parametrize(
    ("line", "unit"),
    [
        (
            "systemd[1]: supervisor.service: A process of this unit has been killed by the OOM killer.",
            "supervisor.service",
        ),
        (
            f"systemd[1]: cri-containerd-{HEX}.scope: A process of this unit has been killed by the OOM killer.",
            f"cri-containerd-{HEX}.scope",
        ),
        ("systemd[1]: vllm.service: Failed with result 'oom-kill'.", "vllm.service"),
        (f'containerd[9]: time="2026-05-01T12:00:00Z" level=info msg="TaskOOM event container_id:\\"{HEX}\\""', HEX),
        (f'containerd: level=info msg="TaskOOM event &TaskOOM{{ContainerID:{HEX},XXX_unrecognized:[],}}"', HEX),
    ],
)
def test_something_in_a_unit(line: str, unit: str) -> None:
    (kill,) = parse_kills([f"May 01 12:00:00 n {line}"])
    assert (kill.pid, kill.unit, kill.whole_cgroup) == (None, unit, False)


def test_nohang_needs_three_lines() -> None:
    lines = [
        "  PID:       5, name: python3, state: R, EUID: 0, SID: 1 (x), lifetime: 1s",
        "Implementing a corrective action:",
        "  Sending SIGTERM to the victim",
        "OK; total response time: 12ms",
    ]
    assert [(kill.pid, kill.name) for kill in parse_kills(lines)] == [(5, "python3")]
    assert parse_kills(lines[:3]) == ()
    assert parse_kills(["OK; total response time: 12ms"]) == ()


@pytest.mark.parametrize(
    "lines",
    [
        ["Out of memory: Kill process 5 (python) score 900 or sacrifice child"],
        ["Memory cgroup out of memory: kill process 5 (python) score 1 or a child"],
        ["Would have killed process 5 (python). But continuing instead."],
        ["Out of memory and no killable processes..."],
        ["Out of memory: OOM victim 5 (python) is already exiting. Skip killing the task"],
        [
            KEYS.format("/a") + "task=python,pid=5,uid=0",
            "Memory cgroup out of memory: OOM victim 5 (python) is already exiting. Skip killing the task",
        ],
        ["oom_reaper: reaped process 5 (python), now anon-rss:0kB, file-rss:0kB, shmem-rss:0kB"],
        ["oom_reaper: unable to reap pid:5 (python)"],
        ["oom_kill_process: 1520 callbacks suppressed"],
        ['sending 0 (no-op signal) to process 5 "python": badness 9, VmRSS 1 MiB'],
        ['sending SIGTERM to process 5 "python": badness 9, VmRSS 1 MiB', "kill failed: Operation not permitted"],
        ['sending SIGTERM to process 5 "python": badness 9, VmRSS 1 MiB', "dryrun, not actually sending any signal"],
        ["oomd kill: 81.28 80.05 42.78 a/b 1000 ruleset:[r] detectorgroup:[d] killer:(dry)kill_by_swap v2"],
        ["Memory pressure for /a is 55.71% > 50.00% for > 20s with reclaim activity"],
        ["python[5]: segfault at 0 ip 0 sp 0 error 4 in libcuda.so"],
        ["Killed process"],
        ["a program says: Killed process 5 (p) total-vm:1kB"],
        ["oom-kill:constraint=CONSTRAINT_NONE,task=x,pid=,uid=0"],
        ["oom-kill:constraint=CONSTRAINT_NONE,task=x,pid=²,uid=0"],
    ],
)
def test_no_kill(lines: list[str]) -> None:
    assert parse_kills(lines) == ()


def test_the_child_that_was_sacrificed() -> None:
    """5.0: the constraint names the process that was chosen, a child of it is killed."""
    (kill,) = parse_kills(
        [
            KEYS.format("/a") + "task=vllm,pid=5,uid=0",
            "Memory cgroup out of memory: Kill process 5 (vllm) score 900 or sacrifice child",
            "Killed process 6 (ninja) total-vm:1kB, anon-rss:1kB, file-rss:0kB, shmem-rss:0kB",
        ]
    )
    assert (kill.pid, kill.name, kill.oom_memcg, kill.task_memcg) == (6, "ninja", "/a", None)


def test_a_line_alone_isnt_of_the_cgroup_before() -> None:
    """The head of a kill is rationed, its last line isn't: 7 needn't have been in /a."""
    kills = parse_kills(
        [
            KEYS.format("/a") + "task=p,pid=5,uid=0",
            f"Memory cgroup out of memory: Killed process 5 (p) {TAIL}",
            f"Memory cgroup out of memory: Killed process 7 (q) {TAIL}",
        ]
    )
    assert [(kill.pid, kill.task_memcg) for kill in kills] == [(5, "/a"), (7, None)]


def test_kills_whose_lines_are_mixed() -> None:
    kills = parse_kills(
        [
            KEYS.format("/a") + "task=p,pid=5,uid=0",
            KEYS.format("/b") + "task=q,pid=7,uid=0",
            f"Memory cgroup out of memory: Killed process 7 (q) {TAIL}",
            f"Memory cgroup out of memory: Killed process 5 (p) {TAIL}",
        ]
    )
    assert [(kill.pid, kill.task_memcg, "Killed" in kill.text) for kill in kills] == [(5, "/a", True), (7, "/b", True)]


def test_for_a_cgroup_or_for_the_host() -> None:
    kills = parse_kills(
        [
            KEYS.format("/a") + "task=p,pid=5,uid=0",
            "oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),global_oom,task_memcg=/b,task=q,pid=6,uid=0",
            f"Out of memory: Killed process 7 (r) {TAIL}",
            "Killed process 8 (s) total-vm:1kB",
        ]
    )
    assert [kill.for_cgroup for kill in kills] == [True, False, False, None]


# -- files


@pytest.mark.parametrize("pack", [bytes, gzip.compress, bz2.compress, lzma.compress], ids=["", "gz", "bz2", "xz"])
def test_files(tmp_path: Path, pack: object) -> None:
    path = tmp_path / "kern.log.2"
    path.write_bytes(pack(f"noise\r\nOut of memory: Killed process 7 (a\xff) {TAIL}\r\nmore".encode("latin-1")))  # type: ignore[operator]
    assert [kill.pid for kill in parse_kills(read_kernel_file(str(path)))] == [7]


def test_a_file_cut_while_it_was_packed(tmp_path: Path) -> None:
    text = f"Out of memory: Killed process 7 (a) {TAIL}\n".encode() + random.Random(1).randbytes(2**16)
    path = tmp_path / "kern.log.gz"
    path.write_bytes(gzip.compress(text)[:-1000])
    assert [kill.pid for kill in parse_kills(read_kernel_file(str(path)))] == [7]
    path.write_bytes(gzip.compress(text)[:12])
    with pytest.raises(OSError):
        read_kernel_file(str(path))


def test_64_mib_are_quick(tmp_path: Path) -> None:
    """A kernel log of firewalls' drops, an audit that says "kill" in each line, and one long line."""
    drop = "[12345.678901] [UFW BLOCK] IN=eth0 OUT= MAC=aa:bb SRC=10.0.0.1 DST=10.0.0.2 LEN=40 TTL=245 PROTO=TCP\n"
    audit = '[12345.678901] audit: type=1326 audit(1.1:1): auid=0 uid=0 pid=5 comm="x" sig=31 kill=1 syscall=435\n'
    text = drop * 300_000 + audit * 150_000 + "kill " * 2**20 + "\n" + f"Out of memory: Killed process 7 (a) {TAIL}\n"
    path = tmp_path / "kern.log"
    path.write_text(text)
    began = time.process_time()
    assert [kill.pid for kill in parse_kills(read_kernel_file(str(path)))] == [7]
    assert time.process_time() - began < 6.0


# -- the drivers


@pytest.mark.parametrize(
    ("line", "meaning", "code", "pid"),
    [
        ("NVRM: Xid (PCI:0000:41:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off", "fault", 79, None),
        ("NVRM: Xid (PCI:0000:41:00): 48, pid=5, name=python, DBE", "fault", 48, 5),
        ("NVRM: Xid (PCI:0000:41:00): 119, pid=5, name=python, Timeout after 6s of waiting for RPC", "fault", 119, 5),
        ("NVRM: GPU 0000:18:00.0: GPU has fallen off the bus.", "fault", 79, None),
        ("NVRM: Xid (PCI:0000:01:00): 149, NETIR_LINK_EVT Fatal XC0 i0 Link 08 (0x1 0x0)", "fault", 149, None),
        ("NVRM: Xid (PCI:0000:01:00): 149, NETIR_LINK_EVT Nonfatal XC0 i0 Link 08 (0x1 0x0)", "note", 149, None),
        (
            "NVRM: Xid (PCI:0000:01:00): 154, GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot)",
            "fault",
            154,
            None,
        ),
        ("NVRM: Xid (PCI:0000:01:00): 154, GPU recovery action changed from 0x1 (x) to 0x0 (None)", "note", 154, None),
        ("NVRM: Xid (PCI:0000:41:00): 31, pid=5, name=python, Ch 00000008, MMU Fault", "application", 31, 5),
        ("NVRM: Xid (PCI:0000:41:00): 13, pid='5', name=python, Graphics SM Warp Exception", "application", 13, 5),
        ("NVRM: Xid (PCI:0000:41:00): 94, pid=5, name=python, Contained: SM", "application", 94, 5),
        ("NVRM: Xid (PCI:0000:41:00): 69, pid=5, name=python, Class Error", "application", 69, 5),
        ("NVRM: Xid (PCI:0000:41:00): 43, pid=5, name=python, Ch 00000008", "echo", 43, 5),
        ("NVRM: Xid (PCI:0000:41:00): 45, pid=5, name=python, Ch 00000008", "echo", 45, 5),
        ("NVRM: Xid (PCI:0000:41:00): 63, pid=5, Row Remapper: New row marked for remapping", "note", 63, 5),
        ("NVRM: Xid (0000:03:00): 14, Channel 00000001", "echo", 14, None),
        (
            "amdgpu 0000:03:00.0: amdgpu: [gfxhub0] no-retry page fault (src_id:0 ring:40 vmid:8, for process python "
            "pid 5 thread python pid 5)",
            "application",
            None,
            5,
        ),
        ("amdgpu 0000:03:00.0: amdgpu: GPU reset(2) failed", "fault", None, None),
        ("amdgpu 0000:03:00.0: amdgpu: GPU reset begin!", "fault", None, None),
        ("[drm:amdgpu_job_timedout [amdgpu]] *ERROR* ring gfx_0.0.0 timeout, signaled seq=1", "fault", None, None),
    ],
)  # fmt: skip
def test_drivers(line: str, meaning: str, code: int | None, pid: int | None) -> None:
    (event,) = gpu_events([f"[    1.000000] {line}"])
    assert (event.meaning, event.code, event.pid) == (meaning, code, pid)
    assert bool(gpu_faults([line])) == (meaning == "fault")


def test_a_reset_that_succeeded_is_no_fault() -> None:
    lines = [
        "amdgpu 0000:03:00.0: amdgpu: ring comp_1.1.0 timeout, signaled seq=1, emitted seq=3",
        "amdgpu 0000:03:00.0: amdgpu: GPU reset begin!",
        "amdgpu 0000:03:00.0: amdgpu: GPU reset succeeded, trying to resume",
    ]
    assert len(gpu_faults(lines[:2])) == 2
    assert gpu_faults(lines) == ()


@pytest.mark.parametrize(
    "line",
    [
        "NVRM: nvAssertOkFailedNoLog: Assertion failed: Out of memory [NV_ERR_NO_MEMORY] (0x00000051)",
        "NVRM: loading NVIDIA UNIX x86_64 Kernel Module  560.35.03",
        "May  1 12:00:00 n app[5]: NVRM: Xid (PCI:0000:41:00): 79, GPU has fallen off the bus.",
        "amdgpu 0000:03:00.0: amdgpu: SMU is initialized successfully!",
    ],
)
def test_drivers_that_say_nothing_of_a_fault(line: str) -> None:
    assert gpu_events([line]) == ()


# -- noise


@given(st.lists(st.text(max_size=200), max_size=20))
@settings(max_examples=300, deadline=None)
def test_noise_is_no_kill(lines: list[str]) -> None:
    assert parse_kills(lines) == ()
    assert gpu_events(lines) == ()


_WORDS = st.sampled_from(
    [
        *("oom", "kill", "Killed", "process", "Kill", "memory:", "Out", "of", "memory", "5", "(python)", "score"),
        *("total-vm:", "cgroup", "SIGTERM", "sending", "to", "constraint=", "pid=5", "task=x", "oom-kill:", "NVRM:"),
        *("Xid", "31", "fallen", "killed", "OOM", "PID:", "victim", "OK;", "due", "Tasks", "in", "/a"),
    ]
)


@given(st.lists(st.lists(_WORDS, max_size=6).map(" ".join), max_size=12))
@settings(max_examples=300, deadline=None)
def test_its_words_in_any_order_are_read_without_a_word(lines: list[str]) -> None:
    texts = [text for text in lines if "Killed process 5 (python)" not in text]
    assert all(kill.text in texts for kill in parse_kills(texts))


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_cut_lines_never_name_another_process(data: st.DataObject) -> None:
    whole = [
        KEYS.format("/a") + "task=python,pid=54321,uid=0",
        f"Memory cgroup out of memory: Killed process 54321 (python) {TAIL}",
        "Tasks in /a are going to be killed due to memory.oom.group set",
        f"Memory cgroup out of memory: Killed process 54322 (python) {TAIL}",
    ]
    lines = [line[: data.draw(st.integers(0, len(line)))] for line in data.draw(st.permutations(whole))]
    for kill in parse_kills(lines):
        assert kill.pid in (None, 54321, 54322) or kill.text.startswith("oom-kill:")
