"""Host memory: the flag that takes it goes down by what is missing; nothing is tried that can't work."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from host import Host
from standin.figures import MIB
from test_plan import GIB, changed, plan
from world import MEMORY_CGROUPS, REPOSITORY, free_port, memory_cgroup

from supervisor_vllm.evidence import cgroup
from supervisor_vllm.evidence.roots import Roots
from supervisor_vllm.incident import Plan, Verdict
from supervisor_vllm.policy.plan import Attempt, plan_next
from supervisor_vllm.settings import Settings

MakeHost = Callable[..., Host]
SWAP, KV_OFFLOAD, MM_CACHE, OFFLOAD = (
    "--swap-space",
    "--kv-offloading-size",
    "--mm-processor-cache-gb",
    "--cpu-offload-gb",
)


def killed(flags: str, *, limit: float, base: float, held: float = 0.0, **options: Any) -> dict[str, str | None]:
    """What is changed after a kill at the cgroup's limit; the processes held `base` beside what the flags took."""
    numbers = {
        "limit_bytes": int(limit * GIB),
        "host_available_bytes": 500 * GIB,
        "host_total_bytes": 512 * GIB,
        "host_anonymous_bytes": int(base * GIB),
        "host_shared_bytes": int((held or limit - base) * GIB),
    }
    return changed(plan("host_oom_kill", f"vllm serve M {flags}", **{**numbers, **options}))


def test_the_flag_goes_down_by_what_is_missing() -> None:
    # 100 GiB less a margin of 5, less 20 of their own: 75 for a KV cache that takes 1.92 times its size
    assert killed(f"{KV_OFFLOAD} 60", limit=100, base=20) == {KV_OFFLOAD: "39"}
    # two ranks with 16 GiB each, of 40
    assert killed(f"{SWAP} 16 -tp 2", limit=40, base=10, version="0.6.6") == {SWAP: "14"}
    # small sizes in quarters
    assert killed(f"{KV_OFFLOAD} 4", limit=8, base=2) == {KV_OFFLOAD: "2.75"}


def test_the_least_loss_first_and_several_where_one_is_not_enough() -> None:
    assert killed(f"{MM_CACHE} 8 {KV_OFFLOAD} 10", limit=40, base=10) == {MM_CACHE: "4"}
    assert killed(f"{MM_CACHE} 4 {KV_OFFLOAD} 10", limit=24, base=6) == {MM_CACHE: "0", KV_OFFLOAD: "8"}
    assert killed(f"{MM_CACHE} 8 {KV_OFFLOAD} 10", limit=40, base=10, given=Settings(pin=(MM_CACHE,))) == {
        KV_OFFLOAD: "6"
    }


def test_each_process_has_its_own_cache() -> None:
    """4 GiB in each of 3 API servers and one engine: a quarter of the 3.8 GiB that are missing, in each."""
    assert killed(f"{MM_CACHE} 4 --api-server-count 3", limit=16, base=3) == {MM_CACHE: "3"}


def test_swap_space_by_version() -> None:
    """V0 pinned 4 GiB a rank even where nobody asked for it; V1 has none; from 0.18 on the flag is gone."""
    assert killed("-tp 4", limit=20, base=8, version="0.6.6") == {SWAP: "2.75"}
    assert killed(f"{SWAP} 16", limit=20, base=8, version="0.12.0") == {}
    assert killed(f"{SWAP} 16", limit=20, base=8, version="0.32.0") == {}


def test_vllms_own_line_for_swap_space() -> None:
    made = plan(
        "host_alloc", f"vllm serve M {SWAP} 32 -tp 2", version="0.10.0",
        swap_space_bytes=64 * GIB, host_total_bytes=int(62.7 * GIB),
    )  # fmt: skip
    assert changed(made) == {SWAP: "21"}  # 2 × 21 GiB are 67 % of 62.7 GiB


def test_what_was_not_enough_goes_down_further() -> None:
    """The death proves that more than this is needed beside the flags, whatever was seen."""
    attempts: tuple[Attempt, ...] = ()
    flags, values = f"{KV_OFFLOAD} 60", []
    for _ in range(4):
        made = plan(
            "host_oom_kill", f"vllm serve M {flags}", attempts=attempts, limit_bytes=100 * GIB,
            host_anonymous_bytes=10 * GIB, host_shared_bytes=60 * GIB,
        )  # fmt: skip
        values.append(float(changed(made)[KV_OFFLOAD] or 0))
        attempts = (*attempts, Attempt("host_oom_kill", made.changes))
        flags = f"{KV_OFFLOAD} {values[-1]:g}"
    assert values == sorted(values, reverse=True)
    assert values[0] == 44  # 85 GiB
    assert 60 - 44 > values[0] - values[1] < values[1] - values[2]  # by a small step, and then by larger ones


def test_another_programs_memory_is_waited_for_first() -> None:
    """The host ran out, and the server held a tenth of it: its flags aren't the cause."""
    numbers = {"host_available_bytes": 400 * GIB, "host_anonymous_bytes": 20 * GIB, "host_shared_bytes": 10 * GIB}
    command = f"vllm serve M {KV_OFFLOAD} 10"
    first = plan("host_oom_kill", command, **numbers)
    assert (first.action, first.changes) == ("retry", ())
    again = plan("host_oom_kill", command, attempts=(Attempt("host_oom_kill"),), **numbers)
    assert changed(again).keys() == {KV_OFFLOAD}


def test_the_second_time_at_the_same_limit_a_person_is_called() -> None:
    """No flag takes the memory: another launch would run into the same wall."""
    numbers = {"limit_bytes": 8 * GIB, "host_anonymous_bytes": 7 * GIB}
    assert plan("host_oom_kill", **numbers).action == "retry"
    held = plan("host_oom_kill", attempts=(Attempt("host_oom_kill"),), **numbers)
    assert held.action == "hold"
    assert "8.00 GiB" in held.reason
    assert "7.00 GiB of it seen in use" in held.reason
    assert "raise the memory limit" in held.reason


def test_a_device_that_is_the_host() -> None:
    """vLLM's CPU backend takes its share of all the host's memory and knows no cgroup: utilisation goes down."""

    def made(limit: int, command: str = "vllm serve M --gpu-memory-utilization 0.5") -> Plan:
        numbers = {"limit_bytes": limit, "host_available_bytes": 60 * GIB, "host_total_bytes": 64 * GIB}
        verdict = Verdict("host_oom_kill", "proven", "It died.", None, (), numbers)
        floor = Settings(gpu_memory_utilization_min=0.3)
        return plan_next(verdict, command, floor, vllm_version="0.32.0", cpu_backend=True)

    (change,) = made(24 * GIB).changes
    assert change.flag == "--gpu-memory-utilization"
    assert 18 < float(change.to or 1) * 64 < 22
    too_small = made(8 * GIB)
    assert too_small.action == "hold"
    assert "would have to be 0.10, and may not go below 0.3" in too_small.reason


def test_the_lowest_limit_above_counts(tmp_path: Path) -> None:
    for path, limit in (("a", "4096"), ("a/b", "max"), ("a/b/c", "8192")):
        (tmp_path / path).mkdir()
        (tmp_path / path / "memory.max").write_text(f"{limit}\n")
        (tmp_path / path / "memory.stat").write_text("anon 100\nfile 900\nshmem 20\n")
    found = cgroup.read_cgroup("/a/b/c", Roots(cgroup=tmp_path))
    assert found is not None
    assert (found.limit_bytes, found.held_bytes) == (4096, 120)


@pytest.mark.root
@pytest.mark.skipif(not (MEMORY_CGROUPS / "memory.limit_in_bytes").exists(), reason="no memory cgroup of version 1")
def test_a_kv_cache_in_host_memory_that_the_container_has_no_room_for(vllm_host: MakeHost) -> None:
    """A real kill at a real limit; the next launch is healthy, with the size that fits."""
    host = vllm_host(flags=f"{KV_OFFLOAD} 1.75")
    with memory_cgroup("container", 1800 * MIB) as group:
        host.start(cgroup=group)
        host.wait_healthy_again()
        incident = host.history()[0]
        assert incident["verdict"]["kind"] == "host_oom_kill"
        assert [change["flag"] for change in incident["plan"]["changes"]] == [KV_OFFLOAD]
        assert 1 <= float(incident["plan"]["changes"][0]["to"]) < 1.5
        assert incident["outcome"] == "healthy"
        assert len(host.history()) == 1
        host.supervisord.stop()


@pytest.mark.vllm
@pytest.mark.root
@pytest.mark.timeout(900)
@pytest.mark.skipif(not (MEMORY_CGROUPS / "memory.limit_in_bytes").exists(), reason="no memory cgroup of version 1")
def test_real_vllm_in_a_container_that_is_smaller_than_its_share(
    vllm_host: MakeHost, vllm_python: Path, tmp_path: Path
) -> None:
    """0.32's CPU backend sees all of the node's memory: the kernel kills its worker, the second launch serves."""
    model = tmp_path / "real_model"
    subprocess.run(
        [str(vllm_python), str(REPOSITORY / "tests" / "real_vllm.py"), str(model)], check=True, capture_output=True
    )
    port, nodes_bytes = free_port(), psutil.virtual_memory().total
    share = 6 * GIB / nodes_bytes
    host = vllm_host(
        command=f"{vllm_python} -m vllm.entrypoints.openai.api_server --model {model} --host 127.0.0.1 --port {port} "
        f"--max-model-len 2048 --max-num-seqs 16 --enforce-eager --gpu-memory-utilization {share:.3f}",
        environment='HF_HUB_OFFLINE="1",VLLM_NO_USAGE_STATS="1",LD_LIBRARY_PATH=""',
        stopwaitsecs=20,
    )
    with memory_cgroup("vllm", 4 * GIB) as group:
        host.start(cgroup=group, gpu_memory_utilization_min="0.02", load_timeout_sec="300")
        host.wait_healthy_again(limit_sec=600)
        (incident,) = host.history()
        assert incident["verdict"]["kind"] == "host_oom_kill"
        (change,) = incident["plan"]["changes"]
        assert change["flag"] == "--gpu-memory-utilization"
        assert float(change["to"]) * nodes_bytes < 4 * GIB
        host.supervisord.stop()
