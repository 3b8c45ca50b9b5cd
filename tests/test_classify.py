"""Incident → Verdict where more than the log is known, and what must hold for every log."""

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from supervisor_vllm.classify import classify
from supervisor_vllm.evidence.vllm_log import read_file
from supervisor_vllm.explain import incident_from_log
from supervisor_vllm.incident import (
    CgroupMemory,
    GpuHolder,
    GpuMemory,
    Incident,
    LogLine,
    ProcessRef,
    Verdict,
    from_json,
    to_json,
)
from supervisor_vllm.kinds import KINDS

CORPUS = Path(__file__).parent / "corpus"
OWN = json.loads((CORPUS / "own" / "cases.json").read_text())
OOM_LINE = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB "
    "of which 312.00 MiB is free. Process 900 has 60.00 GiB memory in use. Including non-PyTorch memory, this process "
    "has 18.79 GiB memory in use. Of the allocated memory 16.31 GiB is allocated by PyTorch, and 1.21 GiB is reserved "
    "by PyTorch but unallocated."
)
KILL = (
    "[ 2220.604297] Memory cgroup out of memory: Killed process {pid} ({name}) total-vm:1kB, anon-rss:1kB, "
    "file-rss:0kB, shmem-rss:0kB, UID:0 pgtables:1kB oom_score_adj:0"
)
CONSTRAINT = (
    "[ 2220.604174] oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),oom_memcg={cgroup},task_memcg={cgroup},"
    "task={name},pid={pid},uid=0"
)


def incident(*log: str, **known: object) -> Incident:
    lines = tuple(LogLine(number, text) for number, text in enumerate(log, 1))
    base = Incident(program="vllm", time="2026-05-01T12:00:00+00:00", log=lines, command="vllm serve /m/q")
    return dataclasses.replace(base, **known)  # type: ignore[arg-type]


def counters(count: int, path: str = "/a", limit: int = 2**30) -> CgroupMemory:
    return CgroupMemory(path, oom_kill_count=count, limit_bytes=limit)


def test_a_persons_stop_goes_first() -> None:
    verdict = classify(incident(OOM_LINE, stop_requested=True, signal="SIGKILL"))
    assert (verdict.kind, verdict.confidence) == ("stopped", "proven")


def test_kernel_kill_of_a_process_of_the_tree() -> None:
    verdict = classify(
        incident(
            "Worker proc VllmWorker-0 died unexpectedly, shutting down executor.",
            exit_status=0,
            pid=10,
            tree=(ProcessRef(10, 1.0), ProcessRef(12, 2.0, "VLLM::Worker")),
            kernel_log=(KILL.format(pid=12, name="VLLM::Worker"),),
            cgroup_after=counters(1),
        )
    )
    assert (verdict.kind, verdict.confidence) == ("host_oom_kill", "proven")
    assert verdict.evidence[0].source == "kernel-log"
    assert verdict.numbers["limit_bytes"] == 2**30
    assert "VLLM::Worker" in verdict.summary


def test_kernel_kill_of_a_stranger() -> None:
    verdict = classify(
        incident(signal="SIGKILL", tree=(ProcessRef(10, 1.0),), kernel_log=(KILL.format(pid=99, name="VLLM::Worker"),))
    )
    assert verdict.kind == "killed"


def test_kernel_record_without_any_pid_to_compare_is_only_likely() -> None:
    died = "ERROR 05-01 12:00:00 [a.py:1] Worker proc VllmWorker-0 died unexpectedly, shutting down executor."
    verdict = classify(incident(died, kernel_log=(KILL.format(pid=99, name="VLLM::Worker"),)))
    assert (verdict.kind, verdict.confidence) == ("host_oom_kill", "likely")
    assert classify(incident(died, kernel_log=(KILL.format(pid=99, name="mysqld"),))).kind == "killed"


def test_cgroup_counter_that_went_up() -> None:
    verdict = classify(incident(signal="SIGKILL", cgroup_before=counters(3), cgroup_after=counters(4)))
    assert (verdict.kind, verdict.confidence) == ("host_oom_kill", "proven")
    assert verdict.evidence[0].source == "cgroup"


@pytest.mark.parametrize(
    ("before", "after"),
    [(counters(3), counters(3)), (counters(3), counters(9, path="/b")), (counters(3), None), (None, counters(4))],
)
def test_cgroup_counter_that_proves_nothing(before: CgroupMemory | None, after: CgroupMemory | None) -> None:
    assert classify(incident(signal="SIGKILL", cgroup_before=before, cgroup_after=after)).kind == "killed"


def test_cgroup_counter_of_a_strangers_kill() -> None:
    verdict = classify(
        incident(
            signal="SIGKILL",
            tree=(ProcessRef(10, 1.0),),
            cgroup_before=counters(0),
            cgroup_after=counters(1),
            kernel_log=(CONSTRAINT.format(pid=99, name="mysqld", cgroup="/a"), KILL.format(pid=99, name="mysqld")),
        )
    )
    assert verdict.kind == "killed"


def test_an_error_in_the_log_is_more_than_a_counter() -> None:
    error = "ValueError: No available memory for the cache blocks."
    verdict = classify(incident(error, exit_status=1, cgroup_before=counters(0), cgroup_after=counters(1)))
    assert verdict.kind == "gpu_kv_none"


def test_who_holds_the_memory() -> None:
    gpu = GpuMemory(0, "u", "H", 85 * 10**9, 10**9, (GpuHolder(901, 50 * 10**9, "VLLM::EngineCor"), GpuHolder(7, 9)))
    verdict = classify(
        incident(
            "ValueError: Free memory on device cuda:0 (0.9/79.1 GiB) on startup is less than desired GPU memory "
            "utilization (0.9, 71.19 GiB).",
            exit_status=1,
            gpus=(gpu,),
            orphans=(ProcessRef(901, 1.0),),
        )
    )
    assert [(holder["pid"], holder["owner"]) for holder in verdict.numbers["holders"]] == [
        (901, "orphan"),
        (7, "neighbour"),
    ]
    assert "own leftover pid 901 (VLLM::EngineCor)" in verdict.summary


def test_holders_in_torchs_sentence() -> None:
    start = "INFO 05-01 12:00:00 [a.py:1] Starting to load model /m/q..."
    verdict = classify(incident(start, OOM_LINE, exit_status=1))
    assert verdict.kind == "gpu_neighbour"
    assert verdict.numbers["holders"] == [{"pid": 900, "bytes": 60 * 2**30, "name": "", "owner": "neighbour"}]
    own = classify(incident(start, OOM_LINE, exit_status=1, tree=(ProcessRef(900, 1.0),)))
    assert own.kind == "gpu_weights"
    assert own.numbers["holders"][0]["owner"] == "own"


@pytest.mark.parametrize(
    ("signal", "exit_status", "kind"),
    [
        ("SIGKILL", None, "killed"),
        ("9", None, "killed"),
        ("TERM", None, "stopped"),
        ("SIGINT", None, "stopped"),
        ("SIGSEGV", None, "engine_crash"),
        ("SIGABRT", None, "engine_crash"),
        ("SIGFPE", None, "engine_crash"),
        ("SIGILL", None, "engine_crash"),
        ("SIGBUS", None, "shm_full"),
        (None, 137, "killed"),
        (None, -9, "killed"),
        (None, 139, "engine_crash"),
        (None, 134, "engine_crash"),
        (None, 135, "shm_full"),
        (None, 1, "unknown"),
        (None, None, "unknown"),
        ("SIGNONSENSE", None, "killed"),
    ],
)
def test_ends_without_a_word(signal: str | None, exit_status: int | None, kind: str) -> None:
    assert classify(incident(signal=signal, exit_status=exit_status)).kind == kind


def test_one_shot_program() -> None:
    assert classify(incident("done", exit_status=0, command="python offline.py")).kind == "exited"
    assert classify(incident("done", exit_status=0, command="vllm serve /m/q")).kind == "unknown"


def test_explain_needs_nothing_but_the_log(tmp_path: Path) -> None:
    known = incident_from_log(str(CORPUS / "real" / "memcg.log"))
    assert known.dead is None
    assert known.vllm_version == "0.32.0"
    assert known.tree == ()
    known = incident_from_log(str(CORPUS / "real" / "memcg.log"), exit_status=1, pids=(5,), gpu_total=10, gpu_free=4)
    assert known.dead is True
    assert known.tree[0].pid == 5
    assert (known.gpus[0].total_bytes, known.gpus[0].free_bytes) == (10, 4)


@pytest.mark.parametrize("cgroup", ["/a/b", "a/b", "/sys/fs/cgroup/a/b", "/sys/fs/cgroup/memory/a/b", "/a/b/"])
def test_explain_with_a_cgroup(cgroup: str, tmp_path: Path) -> None:
    kernel = tmp_path / "kernel.log"
    kernel.write_text(CONSTRAINT.format(pid=99, name="VLLM::Worker", cgroup="/a/b/c") + "\n")
    log = str(CORPUS / "real" / "kill9worker.log")
    known = incident_from_log(log, exit_status=0, cgroup=cgroup, kernel_log=str(kernel))
    assert classify(known).kind == "host_oom_kill"
    assert classify(incident_from_log(log, exit_status=0, cgroup="/a/bc", kernel_log=str(kernel))).kind == "killed"
    assert classify(incident_from_log(log, exit_status=0, cgroup="/", kernel_log=str(kernel))).kind == "killed"


def test_an_incident_can_be_replayed() -> None:
    known = incident_from_log(str(CORPUS / "real" / "free_check.log"), exit_status=1)
    again = from_json(Incident, json.loads(json.dumps(to_json(known))))
    verdict = classify(again)
    assert verdict == classify(known)
    assert from_json(Verdict, json.loads(json.dumps(to_json(verdict)))).kind == verdict.kind


# -- what must hold for every log


def _log_of(case: dict) -> tuple[LogLine, ...]:
    return tuple(LogLine(number, text) for number, text in enumerate(case["log"], 1))


def _incident_of(case: dict, log: tuple[LogLine, ...]) -> Incident:
    return incident(
        log=log,
        exit_status=case["exit_status"],
        signal=case.get("signal"),
        kernel_log=tuple(case.get("kernel", ())),
        tree=tuple(ProcessRef(pid, 0.0) for pid in case.get("pids", ())),
        cgroup_after=CgroupMemory(case["cgroup"]) if "cgroup" in case else None,
        command=case.get("command", "vllm serve /m/q"),
    )


#: Its two lives are told apart in a file, not in an Incident.
ONE_LIFE = [case for case in OWN if case["id"] != "trap-old-life"]


@pytest.mark.parametrize("case", ONE_LIFE, ids=lambda case: case["id"])
def test_colour_and_foreign_prefixes_change_nothing(case: dict) -> None:
    for before, after in (
        ("\x1b[0;36m", "\x1b[0m"),
        ("2025-05-01T12:00:00.123Z ", ""),
        ("vllm-1  | ", ""),
        ("May 01 12:00:00 node7 vllm[123]: ", ""),
    ):
        log = tuple(LogLine(line.number, before + line.text + after) for line in _log_of(case))
        if any(line.text.startswith("{") for line in _log_of(case)) and after:
            continue
        assert classify(_incident_of(case, log)).kind == case["kind"], before


@given(data=st.data(), case=st.sampled_from(ONE_LIFE))
@settings(max_examples=150, deadline=None)
def test_truncated_doubled_and_shuffled_lines_never_raise(data: st.DataObject, case: dict) -> None:
    lines = [text for text in case["log"] if len(text) < 4000] or [""]
    chosen = data.draw(st.lists(st.sampled_from(lines), max_size=30))
    cut = data.draw(st.integers(0, 400))
    log = tuple(LogLine(number, text[:cut] if number % 3 == 0 else text) for number, text in enumerate(chosen, 1))
    verdict = classify(_incident_of(case, log))
    assert verdict.kind in KINDS
    assert verdict.summary
    json.dumps(to_json(verdict))


@given(data=st.binary(max_size=3000), exit_status=st.sampled_from([None, 0, 1, 137]))
@settings(max_examples=150, deadline=None)
def test_random_bytes_never_raise_and_never_become_oom(
    data: bytes, exit_status: int | None, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "random.log"
    path.write_bytes(data)
    verdict = classify(incident(log=read_file(str(path)), exit_status=exit_status))
    assert not KINDS[verdict.kind].oom


_WORDS = st.sampled_from(
    [
        "memory",
        "out",
        "of",
        "CUDA",
        "OOM",
        "killed",
        "Killed",
        "kill",
        "oom",
        "room_id",
        "bloom",
        "error",
        "Error:",
        "allocate",
        "GPU",
        "free",
        "INFO",
        "WARNING",
        "cache",
        "blocks",
        "KV",
        "shm",
        "137",
        "-9",
        "leaked",
        "prompt",
    ]
)


@given(st.lists(st.lists(_WORDS, max_size=8).map(" ".join), max_size=30))
@settings(max_examples=150, deadline=None)
def test_words_are_not_an_error(texts: list[str]) -> None:
    """The words of memory in any order but an error's own: no alarm."""
    texts = [text for text in texts if "out of memory" not in text.lower()]
    assert not KINDS[classify(incident(*texts, exit_status=1)).kind].oom


@given(st.sampled_from(ONE_LIFE), st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_what_users_write_changes_nothing(case: dict, seed: int) -> None:
    if case["exit_status"] == 0 and case["kind"] == "exited":
        return
    noise = (
        f"INFO 05-01 12:10:00 [logger.py:43] Received request cmpl-{seed}: prompt: {OOM_LINE!r}, params: x",
        f'INFO:     10.0.0.1:{seed % 60000} - "GET /?q=OutOfMemoryError:%20CUDA%20out%20of%20memory HTTP/1.1" 404',
    )
    log = _log_of(case)
    at = seed % (len(log) + 1)
    lines = (*log[:at], *(LogLine(0, text) for text in noise), *log[at:])
    assert classify(_incident_of(case, lines)).kind == case["kind"]


@pytest.mark.parametrize(
    ("process", "rank"),
    [
        ("(VllmWorker rank=1 pid=12) ", 1),
        ("(EngineCore_0 pid=5) (VllmWorker TP3 pid=9) ", 3),
        ("(Worker_TP1 pid=9) ", 1),
        ("(Worker_DP0_TP2_EP2 pid=9) ", 2),
        ("(EngineCore_DP0 pid=9) ", None),
        ("", None),
    ],
)
def test_which_rank_died(process: str, rank: int | None) -> None:
    verdict = classify(incident(f"{process}ERROR 05-01 12:00:00 [a.py:1] {OOM_LINE}", exit_status=1))
    assert verdict.numbers.get("rank") == rank


def test_a_message_counts_the_devices_that_the_program_sees() -> None:
    """CUDA_VISIBLE_DEVICES=2,3: GPU 1 of the message is the driver's GPU 3."""
    devices = tuple(
        GpuMemory(index, f"GPU-{index}", "x", 2**36, 2**30, (GpuHolder(900 + index, 2**35),)) for index in (2, 3)
    )
    line = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity"
    verdict = classify(incident(line, exit_status=1, gpus=devices))
    assert [holder["pid"] for holder in verdict.numbers["holders"]] == [903]


GLUED = "ERROR 05-01 12:00:00 [core.py:708] torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."


def test_a_record_behind_a_progress_bar() -> None:
    bar = "Capturing CUDA graphs:  99%|█████████▊| 66/67 [00:14<00:00,  4.39it/s]"
    for pid in ("", "(Worker_TP1 pid=48) "):
        assert classify(incident(f"{bar}{pid}{GLUED}", exit_status=1)).kind == "gpu_graph"


def test_a_record_in_a_users_text_is_none() -> None:
    received = (
        f"INFO 05-01 12:00:00 [logger.py:39] Received request chat-1: prompt: 'why? 3/4 [00:08<00:02, 2.8it/s]{GLUED}"
    )
    assert classify(incident(received, exit_status=1)).kind == "unknown"
    assert classify(incident(f"INFO 05-01 12:00:00 [a.py:3] why? {GLUED}", exit_status=1)).kind == "unknown"


@pytest.mark.parametrize(
    ("lines", "kind"),
    [
        (["nixl._bindings.nixlBackendError: NIXL_ERR_BACKEND"], "engine_crash"),
        (["ERROR 05-01 12:00:00 engine.py:160] ValueError('Attempted to assign 1 = 1 tokens')"], "engine_crash"),
        (["KeyError: 'model.layers.0.mlp.experts.w2_weight'"], "bad_model"),
        (["KeyError: 'w2_weight'"], "engine_crash"),
        # the other ranks' word for a rank that is gone
        (
            [
                "ERROR 05-01 12:00:00 [multiproc_executor.py:135] Worker proc VllmWorker-1 died unexpectedly.",
                "ncclRemoteError: A call failed possibly due to a network error.",
            ],
            "killed",
        ),
        # V0: the API server sees the death, the engine says why
        (
            [
                "CRITICAL 05-01 12:00:00 launcher.py:99] MQLLMEngine is already dead, terminating server process",
                "ERROR 05-01 12:00:00 engine.py:136] IndexError('list index out of range')",
            ],
            "engine_crash",
        ),
        (
            ["E0118 22:42:45.737331   20084 client.cc:1889] RESOURCE_EXHAUSTED: Attempting to allocate 1.96G."],
            "gpu_oom",
        ),
        (["RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem"], "engine_crash"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_how_others_write_an_error(lines: list[str], kind: str) -> None:
    assert classify(incident(*lines, exit_status=1)).kind == kind
