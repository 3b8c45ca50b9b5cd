"""The true exit status or signal of a death. It stands only in supervisord's own log: no event has it, and XML-RPC says
−1 after any signal and 0 after an exit before startsecs (measured, supervisor 4.3.0)."""

from __future__ import annotations

import re


def exit_in_log(log: str, process_name: str, pid: int) -> tuple[int | None, str | None]:
    """(exit status, signal name) of the life that had this pid; (None, None) where the log doesn't say it (loglevel
    warn or above, a log that was cleared). `pid` 0: the last death of the process.

    supervisor 4.3.0 process.py: `spawned: 'vllm' with pid 4711`, `exited: vllm (exit status 1; not expected)`,
    `exited: vllm (terminated by SIGKILL; not expected)`, `stopped: vllm (…)`.
    """
    name = re.escape(process_name)
    if pid:
        spawned = log.rfind(f"spawned: '{process_name}' with pid {pid}\n")
        if spawned < 0:
            return None, None
        log = log[spawned:]
        following = log.find(f"spawned: '{process_name}' with pid ", 1)
        log = log[:following] if following > 0 else log
    ends = re.findall(rf"(?:exited|stopped): {name} \((?:exit status (\d+)|terminated by (\w+))", log)
    if not ends:
        return None, None
    status, signal = ends[-1]
    return (int(status), None) if status else (None, signal)
