"""`explain`: the Incident of an old log, with whatever else is known. Needs no GPU, no daemon and no root."""

from __future__ import annotations

import os
from datetime import datetime, timezone
from pathlib import Path

from .errors import UserError
from .evidence.kernel_log import read_kernel_file
from .evidence.startup_facts import vllm_version as version_in_log
from .evidence.vllm_log import read_file
from .incident import CgroupMemory, GpuMemory, Incident, ProcessRef


def incident_from_log(
    log_path: str,
    *,
    command: str = "",
    exit_status: int | None = None,
    signal: str | None = None,
    pids: tuple[int, ...] = (),
    cgroup: str | None = None,
    kernel_log: str | None = None,
    gpu_total: int | None = None,
    gpu_free: int | None = None,
    vllm_version: str | None = None,
    life: int | None = None,
) -> Incident:
    """What is known of the last life in a log (`-`: the standard input), or of the one of that number. Sizes in bytes.

    The dead tree is `pids` and whatever the log's own prefixes name. With `cgroup`, the kernel's kills in it or below
    it count as well. UserError: a file that can't be read.
    """
    log = read_file(log_path, life=life)
    return Incident(
        program="stdin" if log_path == "-" else os.path.basename(log_path),
        time=_time_of(log_path),
        command=command,
        pid=pids[0] if pids else None,
        tree=tuple(ProcessRef(pid, 0.0) for pid in pids),
        exit_status=exit_status,
        signal=signal,
        dead=True if exit_status is not None or signal else None,
        log=log,
        kernel_log=_read_kernel_log(kernel_log) if kernel_log else (),
        cgroup_after=CgroupMemory(_cgroup_path(cgroup)) if cgroup else None,
        gpus=_gpu(gpu_total, gpu_free),
        vllm_version=vllm_version or version_in_log(log),
    )


def _time_of(path: str) -> str:
    try:
        written = os.stat(path).st_mtime
    except OSError:
        return datetime.now(timezone.utc).isoformat()
    return datetime.fromtimestamp(written, timezone.utc).astimezone().isoformat()


def _read_kernel_log(path: str) -> tuple[str, ...]:
    if os.path.isdir(path):
        raise UserError(f"{path} is a directory", hint="give the kernel log's file, for example of: dmesg > FILE")
    try:
        return read_kernel_file(path)
    except OSError as error:
        raise UserError(f"{path} can't be read: {error.strerror or error}", hint="check --kernel-log") from None


def _cgroup_path(path: str) -> str:
    """As the kernel names it: without the mount point, and without the controller of version 1."""
    path = path.removeprefix("/sys/fs/cgroup")
    path = path.removeprefix("/memory") if path.startswith("/memory/") else path
    return path if path.startswith("/") else f"/{path}"


def _gpu(total: int | None, free: int | None) -> tuple[GpuMemory, ...]:
    if total is None:
        return ()
    return (GpuMemory(index=0, uuid="", name="", total_bytes=total, free_bytes=free if free is not None else total),)


#: What a folder of logs is searched for; where nothing is called so, every file is taken for one.
_LOG_NAMES = ("*.log", "*.log.gz", "*.out", "*.err", "*.txt", "*.jsonl")


def logs_in(folder: str) -> list[str]:
    """The logs in a folder and below, sorted. UserError: no folder, or nothing in it."""
    root = Path(folder)
    if not root.is_dir():
        raise UserError(f"{folder} is no directory", hint="give --dir the folder that holds the logs")
    files = [path for path in root.rglob("*") if path.is_file() and path.stat().st_size]
    named = [path for path in files if any(path.match(pattern) for pattern in _LOG_NAMES)]
    if not files:
        raise UserError(f"there is no log in {folder}", hint="give --dir the folder that holds the logs")
    return sorted(str(path) for path in named or files)
