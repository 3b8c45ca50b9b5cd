"""Verdict → plan: the right direction, the right number, and never past a floor, a ceiling or a pin."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from supervisor_vllm.incident import Evidence, Plan, Verdict
from supervisor_vllm.kinds import KINDS
from supervisor_vllm.policy.flags import knows
from supervisor_vllm.policy.launch_command import parse_launch
from supervisor_vllm.policy.model_shape import ModelShape, model_shape
from supervisor_vllm.policy.plan import Attempt, plan_next
from supervisor_vllm.settings import Settings

GIB = 2**30
DEFAULT = Settings()


def plan(kind: str, command: str = "vllm serve M", *, given: Settings = DEFAULT, version: str | None = "0.32.0",
         text: str = "", attempts: tuple[Attempt, ...] = (), waited: bool = False, **numbers: Any) -> Plan:  # fmt: skip
    evidence = (Evidence("vllm-log", text, 1),) if text else ()
    verdict = Verdict(kind, "proven", "It died.", None, evidence, numbers)
    return plan_next(verdict, command, given, attempts=attempts, waited=waited, vllm_version=version)


def changed(made: Plan) -> dict[str, str | None]:
    return {change.flag: change.to for change in made.changes}


UTIL, LEN, SEQS, TOKENS = "--gpu-memory-utilization", "--max-model-len", "--max-num-seqs", "--max-num-batched-tokens"


@pytest.mark.parametrize(
    ("made", "action", "changes"),
    [
        # vLLM's own estimate, as it stands
        (plan("gpu_kv_small", f"vllm serve M {LEN} 131072", estimated_max_model_len=104000), "adjust", {LEN: "104000"}),
        # without one: by proportion, a little less, in whole blocks
        (plan("gpu_kv_small", f"vllm serve M {LEN} 1000", kv_needed_bytes=10 * GIB, kv_available_bytes=5 * GIB), "adjust", {LEN: "480"}),
        (plan("gpu_kv_small", f"vllm serve M {LEN} 4096 {UTIL} 0.5", given=Settings(prefer="context"), kv_needed_bytes=6 * GIB,
              kv_available_bytes=4 * GIB, total_bytes=20 * GIB, estimated_max_model_len=2000), "adjust", {UTIL: "0.61"}),
        (plan("gpu_kv_small", f"vllm serve M {LEN} 4096", given=Settings(max_model_len_min=4096), estimated_max_model_len=2000),
         "adjust", {TOKENS: "1024"}),
        # up, as far as memory is free
        (plan("gpu_kv_none", f"vllm serve M {UTIL} 0.5"), "adjust", {UTIL: "0.95"}),
        (plan("gpu_kv_none", f"vllm serve M {UTIL} 0.5", free_bytes=18 * GIB, total_bytes=24 * GIB), "adjust", {UTIL: "0.74"}),
        (plan("gpu_kv_none", f"vllm serve M {UTIL} 0.5", utilization_min=0.62), "adjust", {UTIL: "0.67"}),
        (plan("gpu_kv_none", f"vllm serve M {UTIL} 0.95"), "adjust", {TOKENS: "1024"}),
        # waited for first
        (plan("gpu_neighbour", free_bytes=18 * GIB, total_bytes=24 * GIB), "wait", {UTIL: "0.74"}),
        (plan("gpu_neighbour", waited=True, free_bytes=18 * GIB, total_bytes=24 * GIB), "adjust", {UTIL: "0.74"}),
        (plan("gpu_neighbour", waited=True, free_bytes=18 * GIB, total_bytes=24 * GIB, text="memory on node 0 (1/2)"), "adjust", {UTIL: "0.73"}),
        (plan("gpu_neighbour", waited=True, free_bytes=3 * GIB, total_bytes=24 * GIB), "hold", {}),
        (plan("gpu_weights", tried_bytes=GIB, free_bytes=1, total_bytes=24 * GIB), "hold", {}),
        (plan("gpu_weights", given=Settings(allow=("cpu_offload",)), total_bytes=20 * GIB), "adjust", {"--cpu-offload-gb": "2"}),
        (plan("gpu_weights", given=Settings(allow=("cpu_offload",)), total_bytes=20 * GIB, version="0.15.0"), "hold", {}),
        (plan("gpu_profile"), "adjust", {TOKENS: "1024"}),
        (plan("gpu_profile", total_bytes=80 * GIB), "adjust", {TOKENS: "4096"}),
        (plan("gpu_profile", f"vllm serve M {TOKENS} 256"), "adjust", {TOKENS: "128", SEQS: "128"}),
        (plan("gpu_warmup", dummy_requests=1024), "adjust", {SEQS: "256"}),
        (plan("gpu_warmup", mamba_blocks=114), "adjust", {SEQS: "114"}),
        (plan("gpu_warmup", given=Settings(pin=(SEQS,))), "adjust", {UTIL: "0.87"}),
        # by the deficit and a margin, or by a safe step
        (plan("gpu_runtime", f"vllm serve M {UTIL} 0.9", tried_bytes=2 * GIB, free_bytes=GIB, total_bytes=20 * GIB), "adjust", {UTIL: "0.83"}),
        (plan("gpu_runtime", f"vllm serve M {UTIL} 0.9"), "adjust", {UTIL: "0.85"}),
        (plan("gpu_graph", f"vllm serve M {UTIL} 0.9"), "adjust", {UTIL: "0.85"}),
        (plan("gpu_graph", given=Settings(pin=(UTIL,))), "adjust", {"--max-cudagraph-capture-size": "64"}),
        (plan("gpu_graph", given=Settings(pin=(UTIL,)), version="0.9.2"), "adjust", {SEQS: "128"}),
        (plan("gpu_graph", given=Settings(pin=(UTIL,), allow=("enforce_eager",)), version="0.9.2"), "adjust", {"--enforce-eager": "true"}),
        (plan("gpu_kv_alloc", f"vllm serve M {UTIL} 0.9", tried_bytes=2 * GIB, free_bytes=GIB, total_bytes=20 * GIB), "adjust", {UTIL: "0.83"}),
        (plan("gpu_oom", version="0.11.0"), "adjust", {UTIL: "0.85"}),
        (plan("gpu_runtime", tried_bytes=1029 * GIB, total_bytes=80 * GIB, free_bytes=GIB), "hold", {}),
        (plan("gpu_unstable"), "wait", {}),
        # host memory: the flag that takes it, never a GPU flag
        (plan("host_alloc", "vllm serve M --swap-space 16", version="0.10.0"), "adjust", {"--swap-space": "8"}),
        (plan("host_oom_kill", "vllm serve M --cpu-offload-gb 20"), "adjust", {"--cpu-offload-gb": "10"}),
        (plan("host_oom_kill", "vllm serve M --api-server-count 3"), "adjust", {"--api-server-count": "2"}),
        (plan("host_oom_kill"), "retry", {}),
        (plan("shm_full", shm_required_bytes=256 * 2**20, shm_free_bytes=64 * 2**20), "hold", {}),
        (plan("port_in_use"), "retry", {}),
        (plan("port_in_use", attempts=(Attempt("port_in_use"),)), "hold", {}),
        (plan("stopped"), "none", {}),
        (plan("exited"), "none", {}),
        *((plan(kind), "hold", {}) for kind in ("bad_arguments", "bad_model", "gpu_unavailable", "gpu_fault")),
        *((plan(kind), "retry", {}) for kind in ("engine_crash", "hung", "killed", "unknown")),
    ],
)  # fmt: skip
def test_each_kinds_remedy(made: Plan, action: str, changes: dict[str, str]) -> None:
    assert (made.action, changed(made)) == (action, changes)


def test_the_command_and_the_reason() -> None:
    made = plan("gpu_kv_small", f"env A=b vllm serve M {LEN}=131072 --port 1", estimated_max_model_len=104000)
    assert made.command == f"env A=b vllm serve M {LEN}=104000 --port 1"
    assert made.changes[0].from_ == "131072"
    assert "104000" in made.reason
    assert plan("gpu_profile").changes[0].from_ is None


def test_who_holds_the_memory_is_said() -> None:
    holders = [{"pid": 4711, "bytes": 18 * GIB, "name": "python", "owner": "neighbour"}]
    made = plan("gpu_neighbour", free_bytes=3 * GIB, total_bytes=24 * GIB, waited=True, holders=holders)
    assert "pid 4711 python (18.00 GiB, neighbour)" in made.reason


def test_too_much_and_too_little_close_in() -> None:
    """Down after a graph OOM, then nothing left for the KV cache: never back to where it was."""
    down = plan("gpu_graph", f"vllm serve M {UTIL} 0.9")
    attempts = (Attempt("gpu_graph", down.changes),)
    up = plan("gpu_kv_none", down.command, attempts=attempts)
    assert 0.85 < float(changed(up)[UTIL] or 0) < 0.9


# -- properties --------------------------------------------------------------------------------------------------------

BYTES = st.integers(1, 200 * GIB)


def shape_of_7b() -> ModelShape:
    config = {"model_type": "qwen2", "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28,
              "num_key_value_heads": 4, "intermediate_size": 18944, "vocab_size": 152064, "torch_dtype": "bfloat16",
              "max_position_embeddings": 32768}  # fmt: skip
    shape = model_shape(config)
    assert shape
    return shape


NUMBERS = st.fixed_dictionaries(
    {},
    optional={
        "estimated_max_model_len": st.integers(1, 200_000), "kv_needed_bytes": BYTES, "kv_available_bytes": BYTES,
        "free_bytes": BYTES, "total_bytes": BYTES, "tried_bytes": BYTES, "utilization": st.floats(0.1, 1),
        "dummy_requests": st.integers(1, 1024), "mamba_blocks": st.integers(1, 500), "utilization_min": st.floats(0, 1),
        "max_model_len": st.integers(1, 200_000), "weights_bytes": BYTES, "process_bytes": BYTES, "graph_bytes": BYTES,
        "kv_tokens": st.integers(1, 10**7),
    },
)  # fmt: skip
COMMANDS = st.sampled_from(
    [
        "vllm serve M",
        f"vllm serve M {UTIL} 0.9 {LEN} 32768 {SEQS} 256 {TOKENS} 8192",
        f"bash -c 'exec vllm serve M {UTIL}=0.6 {LEN}=4k'",
        f"vllm serve M {UTIL} 0.99 --enforce-eager --swap-space 8 --cpu-offload-gb 4",
        f"vllm serve M {UTIL} %(ENV_UTIL)s {LEN} auto",
    ]
)
SETTINGS = st.builds(
    Settings,
    pin=st.lists(st.sampled_from([UTIL, LEN, SEQS, TOKENS]), max_size=2).map(tuple),
    allow=st.lists(st.sampled_from(["cpu_offload", "enforce_eager"]), max_size=2).map(tuple),
    prefer=st.sampled_from(["context", "concurrency"]),
    max_model_len_min=st.sampled_from([1, 1024, 40000]),
    max_num_seqs_min=st.sampled_from([1, 64]),
    max_num_batched_tokens_min=st.sampled_from([1, 512]),
    gpu_memory_utilization_min=st.sampled_from([0.3, 0.5]),
    gpu_memory_utilization_max=st.sampled_from([0.9, 0.95]),
)
VERSIONS = st.sampled_from([None, "0.6.0", "0.8.5", "0.10.1", "0.17.0", "0.32.0"])


@settings(max_examples=400, deadline=None)
@given(
    st.sampled_from(sorted(KINDS)),
    COMMANDS,
    NUMBERS,
    SETTINGS,
    VERSIONS,
    st.booleans(),
    st.sampled_from([None, shape_of_7b()]),
    st.booleans(),
)
def test_no_plan_crosses_a_line_and_no_loop_is_endless(
    kind: str,
    command: str,
    numbers: dict[str, Any],
    given: Settings,
    version: str | None,
    waited: bool,
    shape: ModelShape | None,
    cpu_backend: bool,
) -> None:
    verdict = Verdict(kind, "proven", "It died.", None, (), numbers)
    attempts: tuple[Attempt, ...] = ()
    seen = {command}
    for _ in range(30):
        made = plan_next(
            verdict,
            command,
            given,
            attempts=attempts,
            waited=waited,
            vllm_version=version,
            shape=shape,
            cpu_backend=cpu_backend,
        )
        assert "\n" not in made.reason
        check_lines(made, command, given, version)
        if not made.changes:
            return
        assert made.command not in seen
        seen.add(made.command)
        attempts = (*attempts, Attempt(kind, made.changes))
        command = made.command
    raise AssertionError("it goes on for ever")


def check_lines(made: Plan, command: str, given: Settings, version: str | None) -> None:
    before = parse_launch(command)
    for change in made.changes:
        assert change.flag not in given.pin
        assert knows(version, change.flag)
        assert change.from_ == before.get(change.flag)
        if change.flag == UTIL:
            assert given.gpu_memory_utilization_min <= float(change.to or 0) <= given.gpu_memory_utilization_max
        if change.flag == LEN:
            assert int(change.to or 0) >= given.max_model_len_min
        if change.flag == SEQS:
            assert int(change.to or 0) >= given.max_num_seqs_min
        if change.flag == TOKENS:
            assert int(change.to or 0) >= given.max_num_batched_tokens_min
        assert change.flag != "--enforce-eager" or "enforce_eager" in given.allow
        assert parse_launch(made.command).get(change.flag) == change.to


KV_BYTES = "--kv-cache-memory-bytes"


@pytest.mark.parametrize(
    ("kind", "numbers", "flags", "prefer", "changed"),
    [
        # 8 GiB were asked for in one piece and 7 are free
        (
            "gpu_kv_alloc",
            {"free_bytes": 7 * GIB, "total_bytes": 14 * GIB, "tried_bytes": 8 * GIB},
            "",
            "context",
            "down",
        ),
        ("gpu_graph", {"free_bytes": GIB // 4, "total_bytes": 24 * GIB, "tried_bytes": GIB}, "", "context", "down"),
        ("gpu_runtime", {"free_bytes": GIB // 4, "total_bytes": 24 * GIB, "tried_bytes": GIB}, "", "context", "down"),
        (
            "gpu_kv_small",
            {
                "free_bytes": 14 * GIB,
                "total_bytes": 24 * GIB,
                "kv_needed_bytes": 9 * GIB,
                "kv_available_bytes": 8 * GIB,
                "max_model_len": 32768,
            },
            "",
            "context",
            "up",
        ),
    ],
)
def test_a_given_size_of_the_kv_cache_is_what_moves(
    kind: str, numbers: dict[str, Any], flags: str, prefer: str, changed: str
) -> None:
    """vLLM doesn't look at utilisation then."""
    command = f"vllm serve M {KV_BYTES} {8 * GIB} {flags}".strip()
    verdict = Verdict(kind, "proven", "It died.", None, (), numbers)
    made = plan_next(verdict, command, Settings(prefer=prefer), vllm_version="0.32.0")
    (change,) = made.changes
    assert change.flag == KV_BYTES
    assert (int(change.to or 0) < 8 * GIB) is (changed == "down")


def test_a_neighbour_is_waited_for_even_where_nothing_fits_beside_it() -> None:
    numbers = {"free_bytes": 13 * GIB, "total_bytes": 24 * GIB, "weights_bytes": 14 * GIB, "kv_available_bytes": -GIB}
    verdict = Verdict("gpu_neighbour", "proven", "It died.", None, (), numbers)

    def plan(waited: bool) -> Plan:
        return plan_next(verdict, "vllm serve M", Settings(), waited=waited, vllm_version="0.32.0", shape=shape_of_7b())

    assert plan(False).action == "wait"
    assert plan(True).action == "hold"


def test_weights_that_are_larger_than_the_device_are_held_with_the_arithmetic() -> None:
    numbers = {"free_bytes": 7 * GIB, "total_bytes": 8 * GIB}
    for kind in ("gpu_neighbour", "gpu_profile", "gpu_kv_none", "gpu_runtime"):
        verdict = Verdict(kind, "proven", "It died.", None, (), numbers)
        made = plan_next(verdict, "vllm serve M", Settings(), vllm_version="0.32.0", shape=shape_of_7b())
        assert made.action == "hold"
        assert "needs --tensor-parallel-size" in made.reason, kind


def test_several_flags_at_once_where_one_would_not_do() -> None:
    """0.98 of a device on which it doesn't fit, and a length that would not fit into what is left."""
    numbers = {"free_bytes": 19 * GIB, "total_bytes": 24 * GIB}
    verdict = Verdict("gpu_neighbour", "proven", "It died.", None, (), numbers)
    command = "vllm serve M --gpu-memory-utilization 0.98 --max-model-len 131072"
    made = plan_next(verdict, command, Settings(), waited=True, vllm_version="0.32.0", shape=shape_of_7b())
    assert [change.flag for change in made.changes] == [UTIL, LEN]
    assert 0.6 < float(made.changes[0].to or 0) < 19 / 24
    assert 2048 < int(made.changes[1].to or 0) < 131072
