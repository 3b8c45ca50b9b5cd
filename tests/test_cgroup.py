"""Memory cgroups: the kernel's own layout, version 1 and 2."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from supervisor_vllm.evidence.cgroup import memory_cgroup_of, read_cgroup
from supervisor_vllm.evidence.roots import ROOTS, Roots


def lay_out(tmp_path: Path, files: dict[str, str]) -> Roots:
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Roots(proc=tmp_path / "proc", cgroup=tmp_path / "cgroup")


def test_version_1_in_a_hybrid_host(tmp_path: Path) -> None:
    base = "cgroup/memory/a/b/memory"
    files = {
        "proc/7/cgroup": "4:memory:/a/b\n1:name=systemd:/x\n0::/y\n",
        f"{base}.limit_in_bytes": "4096\n",
        f"{base}.usage_in_bytes": "1024\n",
        f"{base}.failcnt": "5\n",
        f"{base}.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n",
    }
    roots = lay_out(tmp_path, files)
    path = memory_cgroup_of(7, roots)
    assert path == "/a/b"
    memory = read_cgroup(path, roots)
    assert memory is not None
    assert (memory.oom_kill_count, memory.limit_bytes, memory.usage_bytes, memory.fail_count) == (2, 4096, 1024, 5)


def test_version_1_without_a_limit(tmp_path: Path) -> None:
    roots = lay_out(tmp_path, {"cgroup/memory/a/memory.limit_in_bytes": "9223372036854771712\n"})
    memory = read_cgroup("/a", roots)
    assert memory is not None and memory.limit_bytes is None and memory.oom_kill_count is None


def test_version_2(tmp_path: Path) -> None:
    files = {
        "proc/7/cgroup": "0::/s/v\n",
        "cgroup/s/v/memory.events": "low 0\nhigh 0\nmax 4\noom 1\noom_kill 1\n",
        "cgroup/s/v/memory.max": "max\n",
        "cgroup/s/v/memory.current": "77\n",
    }
    roots = lay_out(tmp_path, files)
    memory = read_cgroup(memory_cgroup_of(7, roots) or "", roots)
    assert memory is not None
    assert (memory.oom_kill_count, memory.limit_bytes, memory.usage_bytes) == (1, None, 77)


def test_a_cgroup_that_is_gone_and_a_process_that_is_gone(tmp_path: Path) -> None:
    roots = lay_out(tmp_path, {"cgroup/memory.stat": ""})
    assert read_cgroup("/gone", roots) is None
    assert memory_cgroup_of(7, roots) is None


@pytest.mark.root
def test_a_real_kernel_kill_is_counted() -> None:
    parent = ROOTS.cgroup / "memory"
    if not (parent / "memory.limit_in_bytes").exists() or not os.access(parent, os.W_OK):
        pytest.skip("no writable memory cgroup of version 1")
    name = f"supervisor-vllm-test-{os.getpid()}"
    try:
        (parent / name).mkdir()
    except OSError as why:
        pytest.skip(f"no memory cgroup can be made: {why}")
    try:
        (parent / name / "memory.limit_in_bytes").write_text(str(32 * 2**20))
        before = read_cgroup(f"/{name}", ROOTS)
        code = f"open({str(parent / name / 'cgroup.procs')!r}, 'w').write('0'); b = b'x' * (256 * 2**20)"
        done = subprocess.run([sys.executable, "-c", code], timeout=30, check=False)
        if done.returncode != -signal.SIGKILL:
            pytest.skip(f"this kernel doesn't enforce the limit (exit {done.returncode})")
        after = read_cgroup(f"/{name}", ROOTS)
        assert before and after and after.limit_bytes == 32 * 2**20
        if after.oom_kill_count is not None:  # Linux 4.13 and later
            assert after.oom_kill_count == (before.oom_kill_count or 0) + 1
        assert (after.fail_count or 0) > 0
    finally:
        (parent / name).rmdir()
    assert read_cgroup(f"/{name}", ROOTS) is None
