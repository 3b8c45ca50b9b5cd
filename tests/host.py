"""A whole host for the end-to-end tests: supervisord, a stand-in vLLM as the user's program, supervisor-vllm on it."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from world import Gpus, Supervisord, chat, free_port, run_cli, set_figures, wait_until

from supervisor_vllm.config_file import find_config, load_config
from supervisor_vllm.journal import open_journal
from supervisor_vllm.status import program_status

#: Short times, so that a test takes seconds; a test's own settings win.
QUICK = {
    "restart_sec": "0.1",
    "memory_release_timeout_sec": "2",
    "load_timeout_sec": "60",
    "health_timeout_sec": "10",
}


class Host:
    """One program `vllm` under a real supervisord. `init` isn't run before `install`."""

    def __init__(
        self,
        supervisord: Supervisord,
        gpus: Gpus,
        vllm_bin: Path,
        model: Path,
        *,
        flags: str = "",
        command: str | None = None,
        **options: object,
    ) -> None:
        self.supervisord = supervisord
        self.gpus = gpus
        self.model = model
        self.port = free_port()
        self.state_dir = supervisord.directory / "state"
        self.command = command or f"{vllm_bin}/vllm serve {model} --host 127.0.0.1 --port {self.port} {flags}".strip()
        self.user_file = supervisord.write_program("vllm", self.command, **options)
        self._user_bytes = self.user_file.read_bytes()

    # -- the user ------------------------------------------------------------------------------------------------------

    def cli(self, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
        return run_cli(*arguments, environment=self.supervisord.environment, **options)

    def verb(self, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
        return self.cli(*arguments, "--conf-dir", str(self.supervisord.conf_dir), **options)

    def install(self, **settings: str) -> subprocess.CompletedProcess[str]:
        options = [f"--set={name}={value}" for name, value in (QUICK | settings).items()]
        return self.cli(
            "init", "--program", "vllm", "--conf-dir", str(self.supervisord.conf_dir), "--supervisord-conf",
            str(self.supervisord.conf_file), "--state-dir", str(self.state_dir), *options,
        )  # fmt: skip

    def start(self, *, cgroup: Path | None = None, **settings: str) -> Host:
        """init, then supervisord with all of it."""
        done = self.install(**settings)
        assert done.returncode == 0, done.stderr + done.stdout
        self.supervisord.start(cgroup=cgroup)
        return self

    def status(self) -> dict[str, Any]:
        done = self.verb("status", "vllm", "--json")
        assert done.returncode in (0, 1), done.stderr + done.stdout
        return dict(json.loads(done.stdout)["programs"][0])

    def status_error(self) -> str:
        """What `status` says on stderr."""
        return self.verb("status", "vllm").stderr

    def history(self) -> list[dict[str, Any]]:
        return list(json.loads(self.verb("history", "--json").stdout)["incidents"])

    def set_figures(self, **figures: Any) -> None:
        set_figures(self.model, **figures)

    def complete(self, text: str = "你好") -> bool:
        code, _ = chat(self.port, text)
        return code == 200

    # -- what a user sees ----------------------------------------------------------------------------------------------

    def wait(self, reached: Callable[[dict[str, Any]], bool], what: str, limit_sec: float = 60.0) -> dict[str, Any]:
        try:
            wait_until(lambda: reached(self._glance()), limit_sec, what, step_sec=0.1)
            return self.status()
        except AssertionError as late:
            raise AssertionError(f"{late}\nnow: {self.status()}\n{self.listener_log()[-4000:]}") from None

    def _glance(self) -> dict[str, Any]:
        """What `status --json` says, without a process of its own for each look, and the number of incidents."""
        config = load_config(find_config(None, str(self.supervisord.conf_dir)))
        journal = open_journal(config.state_dir, read_only=True)
        try:
            incidents = len(journal.incidents("vllm"))  # before the state, which then is of after them
            return program_status(journal, config.program("vllm")) | {"incidents": incidents}
        finally:
            journal.close()

    def wait_state(self, states: str | Sequence[str], limit_sec: float = 60.0, **but: Any) -> dict[str, Any]:
        wanted = (states,) if isinstance(states, str) else tuple(states)
        return self.wait(
            lambda status: status["state"] in wanted and all(status[key] != value for key, value in but.items()),
            f"vllm to be {' or '.join(wanted)}",
            limit_sec,
        )

    def wait_healthy_again(self, incidents: int = 1, limit_sec: float = 60.0) -> dict[str, Any]:
        """HEALTHY, and so many deaths behind it."""
        return self.wait(
            lambda status: status["state"] == "HEALTHY" and status["incidents"] >= incidents,
            f"vllm to be HEALTHY after {incidents} incident(s)",
            limit_sec,
        )

    @property
    def pid(self) -> int:
        return self.supervisord.pid("vllm")

    def listener_pid(self) -> int:
        return int(self.supervisord.info("supervisor-vllm")["pid"])

    def listener_log(self) -> str:
        files = sorted(self.state_dir.glob("listener.log*"))
        return "".join(file.read_text(errors="replace") for file in files)

    @property
    def override(self) -> Path | None:
        found = [file for file in self.supervisord.conf_dir.iterdir() if file.name.startswith("zz")]
        return found[0] if found else None

    def override_command(self) -> str | None:
        """The one line of its command=, None where it has none."""
        lines = self.override.read_text().splitlines() if self.override else []
        return next((line.partition("=")[2].strip() for line in lines if line.startswith("command")), None)

    def running_command(self) -> list[str]:
        """The arguments of the process that runs now."""
        return Path(f"/proc/{self.pid}/cmdline").read_bytes().decode().split("\0")[:-1]

    def user_file_is_untouched(self) -> bool:
        return self.user_file.read_bytes() == self._user_bytes

    def spawns(self) -> int:
        """How often supervisord has started vllm."""
        log = (self.supervisord.directory / "supervisord.log").read_text()
        return log.count("spawned: 'vllm' with pid")

    def listener_starts(self) -> int:
        log = (self.supervisord.directory / "supervisord.log").read_text()
        return log.count("spawned: 'supervisor-vllm' with pid")

    def processes_of(self, name: str) -> list[int]:
        """Pids of the stand-in's processes with this comm (`VLLM::Worker`) in the running program's group."""
        found = []
        for entry in os.listdir("/proc"):
            if not entry.isdigit():
                continue
            try:
                if os.getpgid(int(entry)) == self.pid and Path(f"/proc/{entry}/comm").read_text().strip() == name:
                    found.append(int(entry))
            except OSError:
                continue
        return found
