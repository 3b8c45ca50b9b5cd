"""`explain` on a gigabyte of log, against grep on the same file, in one run: warm page cache, whole commands in turn.

    python tests/bench/explain_speed.py [--bytes N] [--rounds N] [--folder DIR]

The log: a start, weeks of answers, a prompt of 100 MB in one line, more answers, a death. Promised: reading and judging
take at most 100 ms and 30 MiB, and the command as a whole is at least 10 times as fast as `grep -c` for the OOM words.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

GREP = ["grep", "-c", "-i", "-E", r"out of memory|oom-kill|No available memory|KV cache is needed|MemoryError"]
PROMPT_BYTES = 100_000_000

_DEATH = b"""\
(EngineCore_DP0 pid=68) ERROR 05-01 12:00:00 [core.py:1] EngineCore encountered a fatal error.
(EngineCore_DP0 pid=68) ERROR 05-01 12:00:00 [core.py:1] Traceback (most recent call last):
(EngineCore_DP0 pid=68) ERROR 05-01 12:00:00 [core.py:1]   File "/v/v1/engine/core.py", line 700, in run_busy_loop
(EngineCore_DP0 pid=68) ERROR 05-01 12:00:00 [core.py:1] torch.OutOfMemoryError: CUDA out of memory. Tried to allocate \
2.00 GiB. GPU 0 has a total capacity of 79.10 GiB of which 312.00 MiB is free.
(APIServer pid=4711) ERROR 05-01 12:00:00 [async_llm.py:1] AsyncLLM output_handler failed.
"""


def write_log(path: Path, size_bytes: int) -> None:
    block = "".join(
        f'(APIServer pid=4711) INFO:     127.0.0.1:{30000 + number} - "POST /v1/chat/completions HTTP/1.1" 200 OK\n'
        f"(APIServer pid=4711) INFO 05-01 12:{number // 60:02d}:{number % 60:02d} [loggers.py:123] Engine 000: "
        f"Avg prompt throughput: {number % 977}.2 tokens/s, Avg generation throughput: {number % 311}.0 tokens/s, "
        "Running: 12 reqs, Waiting: 3 reqs, GPU KV cache usage: 33.1%, Prefix cache hit rate: 12.0%\n"
        for number in range(3600)
    ).encode()
    with path.open("wb") as file:
        file.write(b"(APIServer pid=4711) INFO 05-01 11:00:00 [api_server.py:1] vLLM API server version 0.11.0\n")
        file.write(b"(APIServer pid=4711) INFO:     Application startup complete.\n")
        while file.tell() < size_bytes * 0.7:
            file.write(block)
        prompt = b"x" * min(PROMPT_BYTES, size_bytes // 5)
        file.write(
            b"(APIServer pid=4711) INFO 05-01 12:00:00 [logger.py:1] Received request x: prompt: " + prompt + b"\n"
        )
        while file.tell() < size_bytes:
            file.write(block)
        file.write(_DEATH)


def measured_inside(path: Path) -> tuple[float, float, str]:
    """(seconds, additional MiB, kind) of reading and judging, in a fresh process that has imported what it needs."""
    code = (
        "import json, resource, sys, time\n"
        "from supervisor_vllm.classify import classify\n"
        "from supervisor_vllm.explain import incident_from_log\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "begin = time.perf_counter()\n"
        "verdict = classify(incident_from_log(sys.argv[1], exit_status=1))\n"
        "took = time.perf_counter() - begin\n"
        "after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "print(json.dumps([took, (after - before) / 1024, verdict.kind]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    seconds, mib, kind = json.loads(done.stdout)
    return seconds, mib, kind


def seconds_of(command: list[str]) -> float:
    # an installed package has its bytecode
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    begin = time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=False, env=environment)
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=int, default=10**9)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, default=Path("/tmp"))
    options = parser.parse_args()
    path = options.folder / f"explain-speed-{os.getpid()}.log"
    try:
        write_log(path, options.bytes)
        explain = [sys.executable, "-m", "supervisor_vllm", "explain", str(path), "--exit-status", "1", "--json"]
        seconds_of([*GREP, str(path)])  # warms the page cache
        seconds_of(explain)
        rounds = [
            (seconds_of(explain), seconds_of([*GREP, str(path)]), *measured_inside(path)) for _ in range(options.rounds)
        ]
    finally:
        path.unlink(missing_ok=True)
    command, grep, inside, mib = (statistics.median(row[column] for row in rounds) for column in range(4))
    print(f"reading and judging  {inside * 1000:7.0f} ms   {mib:5.1f} MiB more   ({rounds[0][4]})")
    print(f"the whole command    {command * 1000:7.0f} ms")
    print(f"grep -c              {grep * 1000:7.0f} ms   {grep / command:.1f} times as long")
    print(f"peak of all children {resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024:7.1f} MiB")


if __name__ == "__main__":
    main()
