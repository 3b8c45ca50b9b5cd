"""What vLLM 0.32 writes, and how: records on stdout with the process's prefix, raw tracebacks on stderr."""

from __future__ import annotations

import os
import time

from .figures import GIB, MIB
from .frames import SITE, Frame

VERSION = "0.32.0"


class Fatal(Exception):
    """An error of vLLM's: the exception as Python prints its last line, and the frames above it."""

    def __init__(self, text: str, frames: tuple[Frame, ...]) -> None:
        super().__init__(text)
        self.text = text
        self.frames = frames


class Log:
    def __init__(self, process: str) -> None:
        self.prefix = f"({process} pid={os.getpid()}) "

    def info(self, where: str, text: str) -> None:
        self._record("INFO", where, text)

    def warning(self, where: str, text: str) -> None:
        self._record("WARNING", where, text)

    def error(self, where: str, text: str) -> None:
        self._record("ERROR", where, text)

    def exception(self, where: str, title: str, failure: Fatal) -> None:
        self.error(where, "\n".join((title, *traceback_lines(failure))))

    def _record(self, level: str, where: str, text: str) -> None:
        head = f"{self.prefix}{level} {time.strftime('%m-%d %H:%M:%S')} [{where}] "
        out("".join(f"{head}{line}\n" for line in text.split("\n")))


def out(text: str) -> None:
    _write(1, text)


def err(text: str) -> None:
    _write(2, text)


def _write(descriptor: int, text: str) -> None:
    """One write: lines of several processes don't mix, and nothing is lost in a buffer when the process is killed."""
    data = text.encode()
    while data:
        try:
            data = data[os.write(descriptor, data) :]
        except OSError:  # the reader of an orphan's pipe is gone
            return


def traceback_lines(failure: Fatal) -> list[str]:
    lines = ["Traceback (most recent call last):"]
    for frame in failure.frames:
        path = frame.path if frame.path.startswith("/") else f"{SITE}/{frame.path}"
        lines += [f'  File "{path}", line {frame.line}, in {frame.function}', f"    {frame.source}"]
    return [*lines, *failure.text.split("\n")]


def gib(size_bytes: float) -> str:
    """vLLM's format_gib (0.32 utils/mem_utils.py): two decimals, without needless zeros."""
    return f"{round(size_bytes / GIB, 2)}"


def torch_size(size_bytes: int) -> str:
    """c10's format_size (torch 2.13 c10/core/CachingDeviceAllocator.h)."""
    if size_bytes <= 1024:
        return f"{size_bytes} bytes"
    if size_bytes <= MIB:
        return f"{size_bytes / 1024:.2f} KiB"
    if size_bytes <= GIB:
        return f"{size_bytes / MIB:.2f} MiB"
    return f"{size_bytes / GIB:.2f} GiB"


def out_of_memory(
    *, device: int, tried: int, total: int, free: int, own: int, pytorch: int, others: dict[int, int]
) -> str:
    """The sentence of torch 2.13's CUDACachingAllocator."""
    processes = "".join(f"Process {pid} has {torch_size(held)} memory in use. " for pid, held in others.items() if held)
    return (
        f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {torch_size(tried)}. GPU {device} has a total "
        f"capacity of {torch_size(total)} of which {torch_size(free)} is free. {processes}Including "
        "non-PyTorch memory, "
        f"this process has {torch_size(own)} memory in use. Of the allocated memory {torch_size(pytorch)} is allocated "
        f"by PyTorch, and {torch_size(24 * MIB)} is reserved by PyTorch but unallocated. If reserved but unallocated "
        "memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See "
        "documentation for Memory Management  (https://docs.pytorch.org/docs/stable/notes/cuda.html"
        "#optimizing-memory-usage-with-pytorch-alloc-conf)"
    )


def banner(log: Log, model: str) -> None:
    for line in (
        "",
        "       █     █     █▄   ▄█",
        f" ▄▄ ▄█ █     █     █ ▀▄▀ █  version {VERSION}",
        f"  █▄█▀ █     █     █     █  model   {model}",
        "   ▀▀  ▀▀▀▀▀ ▀▀▀▀▀ ▀     ▀",
        "",
    ):
        log.info("api_utils.py:347", line)
