"""The host's memory from the kernel's files."""

from __future__ import annotations

from pathlib import Path

from supervisor_vllm.evidence.host import read_host
from supervisor_vllm.evidence.roots import ROOTS, Roots


def test_reads_the_kernels_files(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal:  100 kB\nMemFree: 10 kB\nMemAvailable:  60 kB\nHugePages_Total: 0\n")
    (tmp_path / "vmstat").write_text("nr_free_pages 5\noom_kill 3\n")
    host = read_host(Roots(proc=tmp_path, shm=tmp_path / "none"))
    assert (host.total_bytes, host.available_bytes, host.oom_kill_count) == (102400, 61440, 3)
    assert host.shm_total_bytes is None


def test_this_host() -> None:
    host = read_host(ROOTS)
    assert 0 < host.available_bytes <= host.total_bytes
