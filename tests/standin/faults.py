"""Deaths that a test asks for (figures.Fault), as the process that suffers them."""

from __future__ import annotations

import os
import signal
import time
from argparse import Namespace

from .figures import Fault
from .frames import WORKER
from .log import Fatal
from .process import kill

_CUDA_NOTE = (
    "\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be "
    "incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
    "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions."
)

TEXTS = {
    "engine_exception": "RuntimeError: shape '[1, 4096]' is invalid for input of size 4095",
    "illegal_memory_access": "torch.AcceleratorError: CUDA error: an illegal memory access was encountered"
    + _CUDA_NOTE,
    "out_of_memory": "torch.AcceleratorError: CUDA error: out of memory" + _CUDA_NOTE,
    "shm_full": "RuntimeError: Insufficient space in /dev/shm for shared memory broadcast buffer: 160 MiB required, "
    "63 MiB free. Increase /dev/shm (e.g. --shm-size or --ipc=host).",
    "host_alloc": "RuntimeError: [enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate "
    "memory: you tried to allocate 8589934592 bytes. Error code 12 (Cannot allocate memory)",
}


def strike(fault: Fault, phase: str, pids: Namespace) -> None:
    """Suffer the fault in the Worker. `pids` has api_server and engine."""
    if fault.what in TEXTS:
        raise Fatal(TEXTS[fault.what], WORKER[phase])
    if fault.what == "hang":
        while True:
            time.sleep(3600)
    if fault.what == "segv":
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGSEGV)
    victims = {"sigkill_worker": os.getpid(), "sigkill_engine": pids.engine, "sigkill_self": pids.api_server}
    if fault.what in victims:
        kill(victims[fault.what])
    elif fault.what == "sigkill_group":
        os.killpg(os.getpgrp(), signal.SIGKILL)
    else:
        raise ValueError(f"standin.json: no such fault: {fault.what}")
    time.sleep(0.05)
