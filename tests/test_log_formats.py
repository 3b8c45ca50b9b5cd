"""Whoever carried the log, and however it was written: the verdict is the same."""

import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from cases import CORPUS, Case, load, verdict_of
from hypothesis import given, settings
from hypothesis import strategies as st

from supervisor_vllm.classify import classify
from supervisor_vllm.evidence.vllm_log import read_file
from supervisor_vllm.explain import incident_from_log
from supervisor_vllm.kinds import KINDS

#: Their own log is one of a carrier's, or is about one.
CASES = [
    case
    for case in [*load("own"), *load("public")]
    if case.name != "trap-old-life" and not any(line.startswith(("{", "ver:3.0")) for line in case.row["log"])
]
STAMP = "2026-05-01T12:00:00.123456789Z"

OWN_BEGINNINGS = ("(", "INFO 0", "ERROR 0", "WARNING 0")
OUT_OF_MEMORY = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB "
    "of which 312.00 MiB is free."
)

Carrier = Callable[[list[str]], str]


def _prefixed(prefix: str) -> Carrier:
    return lambda lines: "".join(f"{prefix}{line}\n" for line in lines)


def _docker_file(lines: list[str]) -> str:
    """Docker's json-file: a long line in parts (16 KiB there, 40 characters here: in the middle of words)."""
    records = []
    for line in lines:
        parts = [line[start : start + 40] for start in range(0, len(line), 40)] or [""]
        parts[-1] += "\n"
        records += [json.dumps({"log": part, "stream": "stdout", "time": STAMP}) for part in parts]
    return "\n".join(records) + "\n"


def _cri(lines: list[str]) -> str:
    records = []
    for line in lines:
        parts = [line[start : start + 60] for start in range(0, len(line), 60)] or [""]
        records += [f"{STAMP} stdout P {part}" for part in parts[:-1]] + [f"{STAMP} stdout F {parts[-1]}"]
    return "\n".join(records) + "\n"


def _journal_json(lines: list[str]) -> str:
    fields = {"_PID": "71", "_HOSTNAME": "gpu1", "PRIORITY": "6", "__REALTIME_TIMESTAMP": "1777777777000000"}
    return "".join(
        json.dumps({**fields, "MESSAGE": list(line.encode()) if number % 3 == 0 else line}) + "\n"
        for number, line in enumerate(lines)
    )


def _supervisord_events(lines: list[str]) -> str:
    """The event stream as a listener gets it: supervisord cuts the output anywhere."""
    output = "".join(f"{line}\n" for line in lines)
    events = []
    for serial, start in enumerate(range(0, len(output), 97), 1):
        body = f"processname:vllm groupname:vllm pid:71 channel:stdout\n{output[start : start + 97]}"
        events.append(
            f"ver:3.0 server:supervisor serial:{serial} pool:listener poolserial:{serial} "
            f"eventname:PROCESS_LOG_STDOUT len:{len(body)}\n{body}"
        )
    return "".join(events)


def _unknown(lines: list[str]) -> str:
    """A carrier that nobody knows; vLLM's own lines stand before, as in any real log."""
    before = [
        f"INFO 05-01 12:00:0{number} [__init__.py:244] Automatically detected platform cuda." for number in range(8)
    ]
    return "".join(
        f"node{number % 3} / vllm-0 / 12h{number % 60:02}m =>  {line}\n" for number, line in enumerate(before + lines)
    )


CARRIERS: dict[str, Carrier] = {
    "docker logs -t": _prefixed(f"{STAMP} "),
    "docker compose": _prefixed("vllm-1  | "),
    "docker compose -t": _prefixed(f"vllm-1  | {STAMP} "),
    "docker json-file": _docker_file,
    "CRI": _cri,
    "kubectl --prefix --timestamps": _prefixed(f"[pod/vllm-7d9c/vllm] {STAMP} "),
    "journalctl": _prefixed("May 01 12:00:00 gpu1 vllm[71]: "),
    "journalctl -o short-iso": _prefixed("2026-05-01T12:00:00+0200 gpu1 vllm[71]: "),
    "journalctl -o short-precise": _prefixed("May 01 12:00:00.123456 gpu1 vllm[71]: "),
    "journalctl -o short-full": _prefixed("Fri 2026-05-01 12:00:00 UTC gpu1 vllm[71]: "),
    "journalctl -o short-unix": _prefixed("1777777777.123456 gpu1 vllm[71]: "),
    "journalctl -o short-monotonic": _prefixed("[ 1234.567890] gpu1 vllm[71]: "),
    "journalctl -o json": _journal_json,
    "syslog RFC 5424": _prefixed(f"<30>1 {STAMP} gpu1 vllm 71 - - "),
    "supervisord's events": _supervisord_events,
    "pm2": _prefixed("0|vllm  | "),
    "srun -l": _prefixed("0: "),
    "an unknown carrier": _unknown,
    "colours": _prefixed("\x1b[1;36m\x1b[0;0m"),
    "CRLF": lambda lines: "".join(f"{line}\r\n" for line in lines),
    "byte order mark": lambda lines: "\ufeff" + "".join(f"{line}\n" for line in lines),
    "no last newline": lambda lines: "\n".join(lines),
    "blank lines between": lambda lines: "".join(f"{line}\n\n" for line in lines),
    "Ray's folding": lambda lines: "".join(
        f"{line} [repeated 3x across cluster]\n" if "pid=" in line else f"{line}\n" for line in lines
    ),
    "a progress bar before": lambda lines: (
        "".join(f"\rFetching 8 files:  {number}%|#  | 1/8 [00:01<?, ?it/s]" for number in range(99))
        + "\n"
        + "".join(f"{line}\n" for line in lines)
    ),
    "Chinese lines between": lambda lines: "".join(f"{line}\n2026年5月1日 显存不足？请检查日志 🤖\n" for line in lines),
    "broken UTF-8 between": lambda lines: "".join(f"{line}\n\udcff\udcfe\udce4\udcb8 x\n" for line in lines),
}


@pytest.mark.parametrize("name", CARRIERS)
def test_the_carrier_changes_nothing(name: str, tmp_path: Path) -> None:
    path = tmp_path / "vllm.log"
    different = []
    for case in CASES:
        lines = case.row["log"]
        if name == "srun -l" and not all(line.startswith(OWN_BEGINNINGS) for line in lines):
            continue  # bare lines could be anybody's "0: text"
        path.write_bytes(CARRIERS[name](lines).encode("utf-8", "surrogateescape"))
        kind = verdict_of(case, tmp_path, log=path).kind
        if kind not in case.kinds:
            different.append((case.name, kind))
    assert different == []


def test_a_users_own_formats(tmp_path: Path) -> None:
    """VLLM_LOGGING_CONFIG_PATH: the record in any of the usual shapes."""
    message = "EngineCore encountered a fatal error."
    up = "Application startup complete."
    shapes = [
        "2026-05-01 12:00:00,123 - vllm.v1.engine.core - {level} - {text}",
        "2026-05-01 12:00:00.123 | {level}    | vllm.v1.engine.core:run:10 - {text}",
        "2026-05-01T12:00:00.123Z {level} {text}",
        "[2026-05-01 12:00:00] {level} [core.py:7] {text}",
        "{level}:vllm.v1.engine.core:{text}",
        "[{level}] {text}",
        "{level} | {text}",
        '{{"asctime": "2026-05-01 12:00:00", "levelname": "{level}", "name": "vllm", "message": "{text}"}}',
        '{{"timestamp": "2026-05-01T12:00:00Z", "level": "{lower}", "event": "{text}"}}',
        '{{"@timestamp": "2026-05-01T12:00:00Z", "log.level": "{lower}", "message": "{text}"}}',
        '{{"text": "x", "record": {{"level": {{"name": "{level}", "no": 40}}, "message": "{text}"}}}}',
        '{{"severity": "{level}", "message": "{text}"}}',
    ]
    for shape in shapes:
        path = tmp_path / "vllm.log"
        records = [("INFO", up), ("ERROR", message), ("ERROR", OUT_OF_MEMORY)]
        path.write_text(
            "".join(shape.format(level=level, lower=level.lower(), text=text) + "\n" for level, text in records)
        )
        verdict = classify(incident_from_log(str(path), exit_status=1))
        assert (verdict.kind, verdict.phase, verdict.confidence) == ("gpu_runtime", "runtime", "proven"), shape


def test_json_record_with_its_traceback(tmp_path: Path) -> None:
    trace = (
        "Traceback (most recent call last):\n"
        '  File "/v/v1/worker/gpu_worker.py", line 1, in determine_available_memory\n    self.profile_run()\n'
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    )
    for key in ("exc_info", "exception", "stack_trace", "exc_text"):
        path = tmp_path / "vllm.log"
        path.write_text(json.dumps({"level": "ERROR", "message": "EngineCore failed to start.", key: trace}) + "\n")
        assert classify(incident_from_log(str(path), exit_status=1)).kind == "gpu_profile", key


def test_tracebacks_of_several_processes_in_pieces(tmp_path: Path) -> None:
    """Each process's own frames decide, whoever writes in between."""

    def trace(process: str, frame: str, error: str) -> list[str]:
        head = f"({process}) ERROR 05-01 12:00:00 [x.py:1] "
        return [
            head + "WorkerProc hit an exception.",
            head + "Traceback (most recent call last):",
            head + f'  File "/v/v1/worker/gpu_model_runner.py", line 1, in {frame}',
            head + "    do()",
            head + error,
        ]

    first = trace("Worker_TP0 pid=11", "capture_model", OUT_OF_MEMORY)
    second = trace("Worker_TP1 pid=12", "capture_model", OUT_OF_MEMORY)
    other = trace(
        "APIServer pid=9", "wait_for_engine", "RuntimeError: Engine core initialization failed. See root cause above."
    )
    for seed in range(40):
        queues = [list(first), list(second)]
        chosen = random.Random(seed)
        mixed = []
        while any(queues):
            mixed.append(chosen.choice([queue for queue in queues if queue]).pop(0))
        path = tmp_path / "vllm.log"
        path.write_text("\n".join(mixed + other) + "\n")
        assert classify(incident_from_log(str(path), exit_status=1)).kind == "gpu_graph"


@pytest.mark.parametrize("older", ["vllm.log.1", "vllm.log.1.gz", "vllm.log-20260501.gz", "vllm.log-20260501"])
def test_the_life_began_in_the_rotated_file(older: str, tmp_path: Path) -> None:
    lines = (CORPUS / "real" / "memcg.log").read_bytes().splitlines(keepends=True)
    earlier = (
        b"(EngineCore_DP0 pid=5) ERROR 05-01 12:00:00 [x.py:1] ValueError: No available memory for the cache blocks.\n"
    )
    begun = next(index for index, line in enumerate(lines) if b"Starting to load model" in line)
    data = earlier + b"".join(lines[:begun])
    (tmp_path / older).write_bytes(gzip.compress(data) if older.endswith(".gz") else data)
    path = tmp_path / "vllm.log"
    path.write_bytes(b"".join(lines[begun:]))
    found = read_file(str(path))
    assert found[0].file == older
    assert found[-1].file is None
    assert found[-1].number == len(lines) - begun
    assert not any("No available memory" in line.text for line in found)


def test_an_older_file_without_a_beginning_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "vllm.log.1").write_text("ValueError: No available memory for the cache blocks.\n")
    (tmp_path / "vllm.log").write_text("KeyError: 'x'\n")
    assert len(read_file(str(tmp_path / "vllm.log"))) == 1


def test_a_compressed_log_that_was_cut(tmp_path: Path) -> None:
    path = tmp_path / "vllm.log.3.gz"
    data = gzip.compress((CORPUS / "real" / "memcg.log").read_bytes())
    path.write_bytes(data[: len(data) * 2 // 3])
    assert len(read_file(str(path))) > 20


def test_the_end_of_an_earlier_life_stands_before_this_ones_beginning(tmp_path: Path) -> None:
    """As after a rotation by size: the file begins in the middle of a life that died, and then holds another."""
    earlier = (
        "INFO 05-01 12:00:00 [loggers.py:1] Engine 000: Avg prompt throughput: 1.0 tokens/s\n"
        "ERROR 05-01 12:00:00 [core.py:1] EngineCore encountered a fatal error.\n"
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
    )
    path = tmp_path / "vllm.log"
    path.write_text(earlier + (CORPUS / "real" / "badarg.log").read_text())
    assert classify(incident_from_log(str(path), exit_status=2)).kind == "bad_arguments"


@given(data=st.data(), case=st.sampled_from(CASES))
@settings(max_examples=60, deadline=None)
def test_any_carrier_around_any_carrier(
    data: st.DataObject, case: Case, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Colours, times, containers and noise, one around the other: the verdict stays."""
    names = ["docker json-file", "docker compose", "journalctl", "journalctl -o json", "colours", "CRLF", "CRI"]
    inner, outer = data.draw(st.sampled_from(names)), data.draw(st.sampled_from(names))
    lines = CARRIERS[inner](case.row["log"]).split("\n")
    path = tmp_path_factory.getbasetemp() / "carried.log"
    path.write_bytes(CARRIERS[outer]([line.rstrip("\r") for line in lines if line]).encode("utf-8", "surrogateescape"))
    kind = verdict_of(case, path.parent, log=path).kind
    assert case.oom or not KINDS[kind].oom  # whatever is around it never makes memory of it
