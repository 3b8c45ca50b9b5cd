"""One channel's output in a bounded number of files: PATH, then PATH.1, PATH.2 … as supervisord rotates.

Of a life that is longer than they are, its beginning (arguments, model, memory budget) and its end (the death) are
kept: the file in which it began, the next one, and the last two.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

FILE_BYTES = 2 * 2**20
#: PATH.1 to PATH.3: with PATH itself 8 MiB a channel
BACKUPS = 3


@dataclass
class OutputFile:
    """`report` gets a sentence when writing begins to fail, and when it goes again. Nothing is ever raised: a full disk
    costs the output, not the listener."""

    path: Path
    report: Callable[[str], None]
    file_bytes: int = FILE_BYTES
    #: rotations since the life began, up to BACKUPS: then its beginning has reached the last backup, and stays there
    rotations: int = field(init=False)
    pid: int | None = None
    _descriptor: int | None = None
    _size: int = 0
    _failed: bool = False

    def __post_init__(self) -> None:
        # begun in the middle of a life, perhaps: its beginning is in the oldest backup at most
        self.rotations = sum(self._backup(number).exists() for number in range(1, BACKUPS + 1))

    def append(self, pid: int, data: bytes) -> None:
        """`pid`: the program's process; another one than before is a new life."""
        if self.pid is not None and pid != self.pid:
            self.begin_life()
        self.pid = pid
        try:
            if self._descriptor is None:
                self.open()
            assert self._descriptor is not None
            written = os.write(self._descriptor, data)
            if written < len(data):
                written += os.write(self._descriptor, data[written:])  # says why it was cut
            self._size += written
            if self._size >= self.file_bytes:
                self._rotate()
        except OSError as why:
            self._fail(why)
        else:
            if self._failed:
                self._failed = False
                self.report(f"{self.path} can be written again")

    def begin_life(self) -> None:
        self.rotations = 0

    def look_after(self) -> None:
        """A file that somebody has removed or put in its place is opened anew."""
        if self._descriptor is None:
            return
        try:
            same = os.path.samestat(os.stat(self.path), os.fstat(self._descriptor))
        except OSError:
            same = False
        if not same:
            self.close()

    def close(self) -> None:
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            with suppress(OSError):
                os.close(descriptor)

    def open(self) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        self._descriptor = os.open(self.path, flags, 0o600)
        self._size = os.fstat(self._descriptor).st_size

    def _backup(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{number}")

    def _rotate(self) -> None:
        """supervisord's way (path → path.1 → path.2), until the life's beginning is in the last backup; from then on
        only the middle of it is given up."""
        self.close()
        if self.rotations < BACKUPS:
            for number in range(BACKUPS - 1, 0, -1):
                with suppress(FileNotFoundError):
                    os.replace(self._backup(number), self._backup(number + 1))
            self.rotations += 1
        os.replace(self.path, self._backup(1))
        self.open()  # a file that is there can be marked as the place where a life begins

    def _fail(self, why: OSError) -> None:
        self.close()
        if not self._failed:
            self._failed = True
            self.report(f"{self.path} can't be written ({why.strerror}): the program's output is not kept")
