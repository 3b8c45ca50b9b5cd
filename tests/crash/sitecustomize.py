"""Put on PYTHONPATH by test_crash.py: kills the listener with SIGKILL at its n-th journal write (before or after it).

CRASH_AT=n and CRASH_FILE=path: the file keeps the count over the listener's lives; it strikes once.
"""

import os
import signal
from contextlib import contextmanager

if os.environ.get("CRASH_AT"):
    from supervisor_vllm import journal

    at, path = int(os.environ["CRASH_AT"]), os.environ["CRASH_FILE"]

    def count() -> int:
        with open(path, "a+b") as file:
            file.write(b".")
            return file.tell()

    plain_transaction = journal.Journal.transaction

    def strike() -> None:
        if count() == at:
            os.kill(os.getpid(), signal.SIGKILL)

    @contextmanager
    def transaction(self):
        outermost = not self.connection.in_transaction
        if outermost:
            strike()
        with plain_transaction(self) as connection:
            yield connection
        if outermost:
            strike()

    journal.Journal.transaction = transaction
