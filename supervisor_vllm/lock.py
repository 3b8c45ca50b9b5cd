"""One listener a state directory, and whether one works there now."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from .errors import UserError

LOCK_NAME = "listener.lock"


def take_lock(state_dir: Path) -> int:
    """One listener a state directory: two would both restart."""
    fd = os.open(state_dir / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(
            f"another listener already works on {state_dir}", hint="one [eventlistener:supervisor-vllm] is enough"
        ) from None
    return fd


def is_running(state_dir: Path) -> bool:
    """Does a listener hold the lock of this state directory?"""
    try:
        fd = os.open(state_dir / LOCK_NAME, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False
