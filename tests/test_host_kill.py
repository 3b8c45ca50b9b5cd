"""Whose kill was it? A kill for memory counts only where it fits the end of this very server."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest

from supervisor_vllm.classify import classify
from supervisor_vllm.evidence import life, processes
from supervisor_vllm.evidence.roots import Roots
from supervisor_vllm.explain import incident_from_log
from supervisor_vllm.incident import CgroupMemory, Incident, LogLine, ProcessRef, Verdict, to_json

DIED = "ERROR 05-01 12:00:00 [a.py:1] Worker proc VllmWorker-0 died unexpectedly, shutting down executor."
TREE = (ProcessRef(10, 1.0, "vllm"), ProcessRef(12, 2.0, "VLLM::Worker"))
DAY_SEC = 86400.0


def killed(
    pid: int, name: str = "VLLM::Worker", at: str = "2220.604297", kind: str = "Memory cgroup out of memory"
) -> str:
    return f"[{at}] {kind}: Killed process {pid} ({name}) total-vm:1kB, anon-rss:1kB, file-rss:0kB, shmem-rss:0kB"


def chosen(pid: int, name: str, cgroup: str, at: str = "2220.604174") -> str:
    return (
        f"[{at}] oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),oom_memcg={cgroup},task_memcg={cgroup},"
        f"task={name},pid={pid},uid=0"
    )


def counters(count: int, path: str = "/system.slice/supervisor.service") -> CgroupMemory:
    return CgroupMemory(path, oom_kill_count=count, limit_bytes=2**30)


def incident(*log: str, **known: object) -> Incident:
    lines = tuple(LogLine(number, text) for number, text in enumerate(log, 1))
    base = Incident(program="vllm", time="2026-05-01T12:00:00+00:00", log=lines, command="vllm serve /m/q", tree=TREE)
    return dataclasses.replace(base, **known)  # type: ignore[arg-type]


def counted(*log: str, rise: int = 1, **known: object) -> Incident:
    return incident(*log, cgroup_before=counters(3), cgroup_after=counters(3 + rise), **known)


def judged(verdict: Verdict) -> tuple[str, str]:
    return verdict.kind, verdict.confidence


# -- a counter says that something was killed in the cgroup: only an end that nothing else explains is its work


def test_a_counter_beside_a_process_that_vanished() -> None:
    assert judged(classify(counted(DIED, exit_status=0))) == ("host_oom_kill", "proven")
    assert judged(classify(counted(signal="SIGKILL"))) == ("host_oom_kill", "proven")
    assert judged(classify(counted(exit_status=137))) == ("host_oom_kill", "proven")


@pytest.mark.parametrize(
    ("log", "known", "kind"),
    [
        (
            ("Traceback (most recent call last):", "ZeroDivisionError: division by zero"),
            {"exit_status": 1},
            "engine_crash",
        ),
        ((), {"signal": "SIGSEGV"}, "engine_crash"),
        ((), {"signal": "SIGTERM"}, "stopped"),
        ((), {"signal": "SIGBUS"}, "shm_full"),
        (("OSError: [Errno 98] Address already in use",), {"exit_status": 1}, "port_in_use"),
    ],
)
def test_a_counter_beside_an_end_that_has_its_own_reason(log: tuple[str, ...], known: dict, kind: str) -> None:
    assert classify(counted(*log, **known)).kind == kind


def test_a_counter_whose_kills_were_all_others() -> None:
    """Two servers under one supervisord share its cgroup: the other one's worker has the same name."""
    other = counted(DIED, exit_status=0, kernel_log=(killed(99),))
    assert classify(other).kind == "killed"
    in_ours = (chosen(99, "VLLM::Worker", "/system.slice/supervisor.service/a"), killed(99))
    assert classify(counted(DIED, exit_status=0, kernel_log=in_ours)).kind == "killed"
    assert classify(counted(DIED, exit_status=0, rise=2, kernel_log=in_ours)).kind == "host_oom_kill"
    elsewhere = (chosen(99, "VLLM::Worker", "/machine.slice/other"), killed(99))
    assert classify(counted(DIED, exit_status=0, kernel_log=elsewhere)).kind == "host_oom_kill"


def test_one_kill_that_is_said_three_times_is_one() -> None:
    said = (
        chosen(99, "python3", "/system.slice/supervisor.service"),
        killed(99, "python3"),
        "May 01 12:00:00 node7 kubelet[900]: System OOM encountered, victim process: python3, pid: 99",
    )
    assert classify(counted(DIED, exit_status=0, rise=2, kernel_log=said)).kind == "host_oom_kill"


# -- in a pid namespace the kernel's numbers are others than ours


def test_a_strangers_pid_that_is_ours_by_chance_in_a_pid_namespace() -> None:
    known = {"exit_status": 0, "kernel_log": (killed(12, "mysqld"),), "in_pid_namespace": True}
    assert classify(incident(DIED, **known)).kind == "killed"


def test_a_kill_that_fits_in_a_pid_namespace() -> None:
    known = {"exit_status": 0, "kernel_log": (killed(99123),), "in_pid_namespace": True}
    assert judged(classify(incident(DIED, **known))) == ("host_oom_kill", "likely")
    assert judged(classify(counted(DIED, **known))) == ("host_oom_kill", "proven")


def test_a_number_of_the_log_alone_needs_a_name_that_fits() -> None:
    """Small pids in a container's log are those of daemons on the host."""
    log = ("(EngineCore pid=31) INFO 05-01 12:00:00 [a.py:1] up", DIED)
    assert (
        classify(incident(*log, tree=(), exit_status=0, kernel_log=(killed(31, "systemd-journal"),))).kind == "killed"
    )
    assert classify(incident(*log, tree=(), exit_status=0, kernel_log=(killed(31),))).kind == "host_oom_kill"


# -- a kill of long ago is not this death's


def test_a_kill_long_before_the_death() -> None:
    """A process of the tree (a compiler's helper) was killed days ago, and the server lived on."""
    known = {"signal": "SIGKILL", "kernel_log": (killed(12),)}
    assert classify(incident(died_boot_seconds=2221.0, **known)).kind == "host_oom_kill"
    assert classify(incident(died_boot_seconds=2221.0 + 3 * DAY_SEC, **known)).kind == "killed"


def test_dates_tell_an_older_kill(tmp_path: Path) -> None:
    log = tmp_path / "vllm.log"
    log.write_text(f"(EngineCore pid=31) INFO 05-01 11:59:00 [a.py:1] up\n{DIED}\n")
    kernel = tmp_path / "kern.log"

    def kind(date: str) -> str:
        kernel.write_text(f"{date} node7 kernel: {killed(31)}\n")
        return classify(incident_from_log(str(log), exit_status=0, kernel_log=str(kernel))).kind

    assert kind("May  1 12:00:00") == "host_oom_kill"
    assert kind("May  1 22:00:00") == "host_oom_kill"  # another zone, maybe
    assert kind("Apr 12 12:00:00") == "killed"
    assert kind("May 20 12:00:00") == "killed"
    assert kind("2026-05-01T12:00:00.000000+00:00") == "host_oom_kill"
    assert kind("2026-04-12T12:00:00.000000+00:00") == "killed"


# -- whole cgroups


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/system.slice/supervisor.service", "host_oom_kill"),
        ("/system.slice", "host_oom_kill"),  # ours is in it
        ("/system.slice/super", "killed"),
        ("/user.slice", "killed"),
    ],
)
def test_systemd_oomd_kills_a_cgroup_with_all_that_is_in_it(path: str, kind: str) -> None:
    line = (
        f"May 01 12:00:00 node7 systemd-oomd[600]: Killed {path} due to memory pressure for {path} being 71.5% > 60.0%"
    )
    known = incident(signal="SIGKILL", kernel_log=(line,), cgroup_after=counters(0), cgroup_before=counters(0))
    assert classify(known).kind == kind


def test_systemds_word_about_our_unit_is_a_hint() -> None:
    word = "A process of this unit has been killed by the OOM killer."
    line = f"May 01 12:00:00 node7 systemd[1]: supervisor.service: {word}"
    known = incident(
        DIED, exit_status=0, kernel_log=(line,), cgroup_after=CgroupMemory("/system.slice/supervisor.service")
    )
    assert judged(classify(known)) == ("host_oom_kill", "likely")
    other = line.replace("supervisor.service", "mysql.service")
    assert classify(dataclasses.replace(known, kernel_log=(other,))).kind == "killed"
    crash = ("Traceback (most recent call last):", "ZeroDivisionError: division by zero")
    assert classify(incident(*crash, exit_status=1, kernel_log=(line,), cgroup_after=known.cgroup_after)).kind == (
        "engine_crash"
    )


# -- what is noted while it lives


def laid_out(root: Path, oom_kill: int, pid_namespace: int = 4026531836) -> Roots:
    """A host whose supervisord has one cgroup of version 2, for this process's pid."""
    roots = Roots(root / "proc", root / "cgroup", root / "shm", root / "kmsg")
    own = processes.process_ref(os.getpid())
    assert own
    for folder in (roots.proc / str(own.pid), roots.proc / "self" / "ns", roots.cgroup / "s", roots.shm):
        folder.mkdir(parents=True, exist_ok=True)
    (roots.proc / str(own.pid) / "cgroup").write_text("0::/s\n")
    namespace = roots.proc / "self" / "ns" / "pid"
    namespace.unlink(missing_ok=True)
    namespace.symlink_to(f"pid:[{pid_namespace}]")
    (roots.cgroup / "s" / "memory.events").write_text(f"low 0\nhigh 0\nmax 0\noom 0\noom_kill {oom_kill}\n")
    (roots.cgroup / "s" / "memory.stat").touch()
    roots.kmsg.touch()
    return roots


def gathered(born: life.Life, roots: Roots) -> Incident:
    return life.gather(
        born,
        roots,
        program="vllm",
        time="2026-05-01T12:00:00+00:00",
        command="vllm serve /m",
        exit_status=None,
        signal="SIGKILL",
        stop_requested=False,
    )


def test_a_neighbours_kill_of_long_ago_isnt_counted_for_this_death(tmp_path: Path) -> None:
    leader = processes.process_ref(os.getpid())
    assert leader
    born = life.begin(leader, (), laid_out(tmp_path, 0), launch_id=None)
    roots = laid_out(tmp_path, 1)
    seen = life.observe(born, roots)
    assert seen != born
    assert life.observe(seen, roots) == seen  # nothing new: nothing to write down
    recent = gathered(seen, roots)
    assert recent.cgroup_before and recent.cgroup_before.oom_kill_count == 0
    aged = dataclasses.replace(
        seen,
        kill_counts=tuple(
            dataclasses.replace(count, boot_seconds=count.boot_seconds - DAY_SEC) for count in seen.kill_counts
        ),
    )
    old = gathered(aged, roots)
    assert old.cgroup_before and old.cgroup_before.oom_kill_count == 1
    assert classify(dataclasses.replace(old, log=(), tree=TREE)).kind == "killed"
    assert json.dumps(to_json(seen))


def test_a_pid_namespace_is_known(tmp_path: Path) -> None:
    leader = processes.process_ref(os.getpid())
    assert leader
    for inode, inside in ((4026531836, False), (4026532900, True)):
        roots = laid_out(tmp_path, 0, inode)
        assert gathered(life.begin(leader, (), roots, launch_id=None), roots).in_pid_namespace is inside
