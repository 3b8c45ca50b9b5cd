"""`make demo` on real vLLM: the three scenes end as promised, and nothing is left running."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.mark.vllm
@pytest.mark.timeout(1500)
def test_the_three_scenes(tmp_path: Path, vllm_python: Path) -> None:
    result = tmp_path / "result.json"
    done = subprocess.run(
        [sys.executable, "demo/demo.py", "--vllm-python", str(vllm_python), "--json", str(result)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=1440,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    first, second, third = json.loads(result.read_text())["incidents"]
    assert [incident["outcome"] for incident in (first, second, third)] == ["healthy"] * 3
    assert [incident["launches"] for incident in (first, second, third)] == [1] * 3

    assert first["verdict"]["kind"] == "gpu_neighbour"
    (change,) = first["plan"]["changes"]
    assert change["flag"] == "--gpu-memory-utilization"
    assert 0.5 <= float(change["to"]) < 0.92

    kernel_kill = os.geteuid() == 0 and "no memory cgroup" not in done.stdout
    assert second["verdict"]["kind"] == ("host_oom_kill" if kernel_kill else "killed")
    assert second["verdict"]["confidence"] == ("proven" if kernel_kill else "likely")

    assert third["verdict"]["kind"] == "killed"
    assert third["plan"]["changes"] == []
    assert "nothing is left running" in done.stdout
    assert not [p for p in psutil.process_iter(["cmdline"]) if "sv-demo-" in " ".join(p.info["cmdline"] or ())]
