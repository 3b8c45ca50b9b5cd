"""Log files on a real file system: the lines of one life, through rotation; the facts of a start."""

import os
from pathlib import Path

import pytest

from supervisor_vllm.errors import UserError
from supervisor_vllm.evidence import log_file
from supervisor_vllm.evidence.log_records import parse_records
from supervisor_vllm.evidence.startup_facts import measurements
from supervisor_vllm.evidence.vllm_log import (
    mark_end,
    pids_in_log,
    read_file,
    read_life,
    startup_facts,
    vllm_version,
)
from supervisor_vllm.incident import LogLine

REAL = Path(__file__).parent / "corpus" / "real"


def texts(lines: tuple[LogLine, ...]) -> list[str]:
    return [line.text for line in lines]


def lines_of(*texts: str) -> tuple[LogLine, ...]:
    return tuple(LogLine(number, text) for number, text in enumerate(texts, 1))


def rotate(path: Path) -> None:
    """As supervisord does: renames from the oldest on."""
    for number in range(9, 0, -1):
        if (old := path.with_name(f"{path.name}.{number}")).exists():
            old.rename(path.with_name(f"{path.name}.{number + 1}"))
    path.rename(path.with_name(f"{path.name}.1"))
    path.write_bytes(b"")


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def test_only_what_was_written_since_the_mark(tmp_path: Path) -> None:
    path = tmp_path / "v.log"
    append(path, b"old life: CUDA out of memory\n")
    mark = mark_end(str(path))
    append(path, b"one\ntwo\n")
    assert [(line.number, line.text) for line in read_life((mark,))] == [(2, "one"), (3, "two")]


def test_nothing_new(tmp_path: Path) -> None:
    path = tmp_path / "v.log"
    append(path, b"old\n")
    assert read_life((mark_end(str(path)),)) == ()


def test_file_that_comes_later(tmp_path: Path) -> None:
    path = tmp_path / "v.log"
    mark = mark_end(str(path))
    assert (mark.inode, mark.offset) == (0, 0)
    assert read_life((mark,)) == ()
    append(path, b"one\n")
    assert texts(read_life((mark,))) == ["one"]


def test_rotation_in_the_middle_of_a_line(tmp_path: Path) -> None:
    path = tmp_path / "v.log"
    append(path, b"old\n")
    mark = mark_end(str(path))
    append(path, b"one\nValueError: No available mem")
    rotate(path)
    append(path, b"ory for the cache blocks.\nthree\n")
    rotate(path)
    append(path, b"four\n")
    expected = ["one", "ValueError: No available memory for the cache blocks.", "three", "four"]
    assert texts(read_life((mark,))) == expected
    assert [(line.file, line.number) for line in read_life((mark,))] == [
        ("v.log.2", 2),
        ("v.log.2", 3),
        ("v.log.1", 2),
        (None, 1),
    ]


def test_older_rotated_files_are_of_older_lives(tmp_path: Path) -> None:
    path = tmp_path / "v.log"
    append(path, b"older\n")
    rotate(path)
    append(path, b"old\n")
    mark = mark_end(str(path))
    append(path, b"one\n")
    rotate(path)
    append(path, b"two\n")
    assert texts(read_life((mark,))) == ["one", "two"]


def test_copytruncate(tmp_path: Path) -> None:
    path = tmp_path / "v.log"
    append(path, b"old life, long enough\n")
    mark = mark_end(str(path))
    os.truncate(path, 0)
    append(path, b"one\n")
    assert texts(read_life((mark,))) == ["one"]


def test_marked_file_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "v.log"
    append(path, b"old\n")
    mark = mark_end(str(path))
    path.rename(tmp_path / "elsewhere")
    append(path, b"one\n")
    assert texts(read_life((mark,))) == ["one"]


def test_colours_progress_bars_crlf_and_bad_bytes(tmp_path: Path) -> None:
    path = tmp_path / "v.log"
    mark = mark_end(str(path))
    append(path, b"\x1b[0;36m(EngineCore pid=7)\x1b[0;0m INFO\r\n\n10%\r20%\r30%\n\xff\xfe bad\n")
    assert [(line.number, line.text) for line in read_life((mark,))] == [
        (1, "(EngineCore pid=7) INFO"),
        (3, "10%"),
        (3, "20%"),
        (3, "30%"),
        (4, "\ufffd\ufffd bad"),
    ]


def test_long_life_keeps_start_and_end_with_true_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_file, "HEAD_BYTES", 1000)
    monkeypatch.setattr(log_file, "STEP_BYTES", 500)
    monkeypatch.setattr(log_file, "TAIL_BYTES", 2000)
    path = tmp_path / "v.log"
    mark = mark_end(str(path))
    append(path, b"".join(b"line %d\n" % number for number in range(1, 2001)))
    lines = read_life((mark,))
    assert len(lines) < 400
    assert all(line.text == f"line {line.number}" for line in lines)
    assert (lines[0].number, lines[-1].number) == (1, 2000)


def test_explain_takes_the_last_of_several_lives(tmp_path: Path) -> None:
    path = tmp_path / "v.log"
    first = (REAL / "free_check.log").read_bytes()
    path.write_bytes(first + (REAL / "healthy.log").read_bytes())
    lines = read_file(str(path))
    assert lines[0].number > first.count(b"\n")
    assert not any("less than desired" in line.text for line in lines)
    assert "non-default args" in lines[0].text or "version" in lines[0].text


def test_a_single_life_is_whole() -> None:
    lines = read_file(str(REAL / "healthy.log"))
    assert lines[0].number == 1


@pytest.mark.parametrize("make", ["missing", "directory"])
def test_what_can_not_be_read_is_the_users_mistake(make: str, tmp_path: Path) -> None:
    path = tmp_path / "x"
    if make == "directory":
        path.mkdir()
    with pytest.raises(UserError) as raised:
        read_file(str(path))
    assert str(path) in str(raised.value)


def test_empty_file(tmp_path: Path) -> None:
    (tmp_path / "v.log").touch()
    assert read_file(str(tmp_path / "v.log")) == ()


def test_pids_of_all_prefixes() -> None:
    lines = lines_of(
        "(EngineCore_0 pid=5) (VllmWorker TP0 pid=9) INFO 05-01 12:00:00 [a.py:1] x",
        "(VllmWorker rank=0 pid=12) INFO 05-01 12:00:00 [a.py:1] x",
        "\x1b[1;36m(APIServer pid=13)\x1b[0;0m INFO 05-01 12:00:00 [a.py:1] x",
        "vllm-1  | (Worker_TP0 pid=14) WARNING 05-01 12:00:00 [a.py:1] x",
        "(VllmWorkerProcess pid=15) INFO 05-01 12:00:00 a.py:1] x",
        "(RayWorkerWrapper pid=16, ip=10.0.0.2) INFO 05-01 12:00:00 [a.py:1] on another host",
        "INFO:     Started server process [17]",
        "INFO 05-01 12:00:00 [a.py:1] the user wrote (EngineCore pid=18)",
    )
    assert pids_in_log(lines) == {5, 9, 12, 13, 14, 15, 17}


def test_facts_of_a_real_start() -> None:
    facts = startup_facts(read_file(str(REAL / "healthy.log")))
    assert facts.application_startup_complete
    assert facts.model_path == "/srv/models/tiny"
    assert (facts.shards_loaded, facts.shards_total) == (1, 1)
    assert facts.max_model_len == 2048
    assert facts.kv_tokens == 2_200_064
    assert facts.served_url == "http://0.0.0.0:8123"
    assert facts.vllm_version == "0.32.0"
    assert facts.loading_seconds == 0.01


def test_a_start_that_failed_is_not_complete() -> None:
    facts = startup_facts(read_file(str(REAL / "free_check.log")))
    assert not facts.application_startup_complete
    assert facts.shards_loaded is None


def test_facts_of_older_versions() -> None:
    facts = startup_facts(
        lines_of(
            "INFO 05-01 12:00:00 api_server.py:495] vLLM API server version 0.6.3.post1",
            "INFO 05-01 12:00:00 llm_engine.py:237] Initializing an LLM engine (v0.6.3.post1) with config: "
            "model='/m/q', speculative_config=None, max_seq_len=4096, download_dir=None",
            "Loading safetensors checkpoint shards:  50% Completed | 1/2 [00:01<00:01,  1.01s/it]",
            "Loading safetensors checkpoint shards: 100% Completed | 2/2 [00:02<00:00,  1.01s/it]",
            "INFO 05-01 12:00:00 model_runner.py:1067] Loading model weights took 14.25 GB",
            "(VllmWorkerProcess pid=9) INFO 05-01 12:00:00 model_runner.py:1067] Loading model weights took 14.50 GB",
            "INFO:     Uvicorn running on http://0.0.0.0:8000 (Press CTRL+C to quit)",
            "INFO:     Application startup complete.",
        )
    )
    assert facts.vllm_version == "0.6.3.post1"
    assert (facts.shards_loaded, facts.shards_total) == (2, 2)
    assert facts.weights_bytes == round(14.5 * 2**30)
    assert facts.max_model_len == 4096
    assert facts.served_url == "http://0.0.0.0:8000"
    assert facts.application_startup_complete


def test_facts_of_auto_fit() -> None:
    facts = startup_facts(
        lines_of(
            "(EngineCore pid=7) INFO 05-01 12:00:00 [gpu_model_runner.py:5150] Model loading took 14.25 GiB memory and "
            "9.5 seconds",
            "(EngineCore pid=7) INFO 05-01 12:00:00 [kv_cache_utils.py:2455] Auto-fit max_model_len: reduced from "
            "131072 to 65536 to fit in available KV cache memory (3.1 GiB GPU)",
        )
    )
    assert facts.autofit_max_model_len == 65536
    assert facts.weights_bytes == round(14.25 * 2**30)


def test_a_users_words_are_no_facts() -> None:
    facts = startup_facts(
        lines_of(
            "INFO 05-01 12:00:00 [logger.py:43] Received request 1: prompt: 'Application startup complete. "
            "GPU KV cache size: 9 tokens Initializing a V1 LLM engine (v9.9)', params: x",
        )
    )
    assert not facts.application_startup_complete
    assert facts.kv_tokens is None
    assert facts.vllm_version is None


@pytest.mark.parametrize("name", ["healthy", "sigterm", "memcg"])
def test_version(name: str) -> None:
    assert vllm_version(read_file(str(REAL / f"{name}.log"))) == "0.32.0"


def test_what_vllm_measured() -> None:
    lines = lines_of(
        "(EngineCore_DP0 pid=7) INFO 05-01 12:00:00 [gpu_worker.py:359] Available KV cache memory: -3.21 GiB",
        "(EngineCore_DP0 pid=7) INFO 05-01 12:00:00 [gpu_worker.py:391] Free memory on device (78.2/79.1 GiB) on "
        "startup. Desired GPU memory utilization is (0.9, 71.19 GiB). Actual usage is 14.25 GiB for weight, 5.50 GiB "
        "for peak activation, 0.25 GiB for non-torch memory, and 0.50 GiB for CUDAGraph memory. Replace "
        "gpu_memory_utilization config with `--kv-cache-memory=1` to fit into requested memory",
    )
    assert measurements(parse_records(lines)) == {
        "kv_available_bytes": round(-3.21 * 2**30),
        "weights_bytes": round(14.25 * 2**30),
        "activation_bytes": round(5.5 * 2**30),
        "non_torch_bytes": 2**28,
        "graph_bytes": 2**29,
    }
