"""The tests' world: stand-in GPUs and models, a real supervisord, and the plugin's own command line.

Everything here is real but vLLM and NVML (standin/). Every wait has a limit and says what it waited for.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import xmlrpc.client
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import psutil
from standin import gpu
from standin.figures import FILE_NAME
from standin.figures import GIB as GIB
from standin.figures import MIB as MIB
from supervisor.xmlrpc import SupervisorTransport

TESTS = Path(__file__).resolve().parent
REPOSITORY = TESTS.parent
#: In PYTHONPATH: `python -m vllm.entrypoints.openai.api_server --model DIR` is the stand-in.
VLLM_SITE = TESTS / "standin" / "site"
T = TypeVar("T")


def wait_until(predicate: Callable[[], T], limit_sec: float, what: str, *, step_sec: float = 0.05) -> T:
    """The first true value of `predicate`. Raises AssertionError that says `what` didn't come."""
    end = time.monotonic() + limit_sec
    while True:
        value = predicate()
        if value:
            return value
        if time.monotonic() >= end:
            raise AssertionError(f"waited {limit_sec:g} s in vain for {what}; last value: {value!r}")
        time.sleep(step_sec)


def _own_ports() -> Iterator[int]:
    """Each pytest worker counts through ports of its own, below those that the kernel gives away: one that the kernel
    named was given to another worker's test in the time until a server took it."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
    first = 20000 + 1000 * (worker % 12)
    begin = os.getpid() % 1000  # two runs on one machine
    return itertools.cycle((*range(first + begin, first + 1000), *range(first, first + begin)))


_PORTS = _own_ports()


def free_port() -> int:
    for port in _PORTS:
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: TIME_WAIT doesn't count
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")


def alive(pid: int) -> bool:
    """A zombie is not alive."""
    return gpu.start_time(pid) != 0


def group_members(group: int) -> list[psutil.Process]:
    """Living processes of a process group."""
    members = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if os.getpgid(process.pid) == group and alive(process.pid):
                members.append(process)
    return members


def kill_group(group: int) -> None:
    """End what is left of a process group that this test started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)
    wait_until(lambda: not group_members(group), 10, f"the end of process group {group}")


class Gpus:
    """N stand-in devices. `environment` makes NVML's binding and the stand-in vLLM see them."""

    def __init__(self, directory: Path, library: Path, *, count: int = 1, total_bytes: int = 80 * GIB) -> None:
        self.directory = directory
        self.provide(count=count, total_bytes=total_bytes)
        self.environment = {gpu.DIRECTORY_VARIABLE: str(directory), "LD_LIBRARY_PATH": str(library)}

    def provide(self, *, count: int = 1, total_bytes: int = 80 * GIB) -> None:
        """So many devices of such a size, from now on (more than before, or another size)."""
        self.devices = [gpu.create(self.directory, index=index, total_bytes=total_bytes) for index in range(count)]

    def free_bytes(self, index: int = 0) -> int:
        return self.devices[index].free_bytes

    def holders(self, index: int = 0) -> dict[int, int]:
        return self.devices[index].holders()

    def set_error(self, code: int | None, index: int | None = None) -> None:
        """Every NVML call (of one device) fails with this return code; None: works again."""
        place = (self.directory if index is None else self.devices[index].path) / "error"
        if code is None:
            place.unlink(missing_ok=True)
        else:
            place.write_text(str(code))

    @contextlib.contextmanager
    def neighbour(self, held_bytes: int, index: int = 0) -> Iterator[subprocess.Popen[bytes]]:
        """Another program's process that holds memory while the block runs (or until it is killed)."""
        process = subprocess.Popen(["sleep", "600"], start_new_session=True)
        try:
            self.devices[index].hold(process.pid, held_bytes)
            yield process
        finally:
            process.kill()
            process.wait(timeout=10)


def model_dir(directory: Path, name: str = "model", *, chat_template: bool = True, **figures: Any) -> Path:
    """A stand-in model directory. `figures`: fields of standin.figures.Figures, and `fault` (a dict, or a list)."""
    model = directory / name
    model.mkdir(parents=True, exist_ok=True)
    longest = figures.get("max_position_embeddings", 32768)
    (model / "model.safetensors").write_bytes(b"\x02" + b"\0" * 7 + b"{}")
    config = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "max_position_embeddings": longest}
    (model / "config.json").write_text(json.dumps(config))
    (model / "tokenizer.json").write_text("{}")
    if chat_template:
        (model / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    set_figures(model, **figures)
    return model


def set_figures(model: Path, **figures: Any) -> None:
    """Change the hidden world of a model: for its next life."""
    file = model / FILE_NAME
    before = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps(before | figures))


def write_vllm_program(bin_dir: Path) -> Path:
    """`<bin_dir>/vllm`, as pip would write it."""
    bin_dir.mkdir(parents=True, exist_ok=True)
    program = bin_dir / "vllm"
    program.write_text(
        f"#!{sys.executable}\nimport sys\n\nsys.path.insert(0, {str(TESTS)!r})\n"
        "from standin.server import main\n\nsys.exit(main())\n"
    )
    program.chmod(0o755)
    return program


def http(
    url: str, body: dict[str, Any] | None = None, *, timeout_sec: float = 5.0, api_key: str | None = None
) -> tuple[int, Any]:
    """Status and body (JSON where it is JSON); status 0 when nobody listens."""
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=timeout_sec) as response:
            return response.status, _json_or_text(response.read())
    except urllib.error.HTTPError as refusal:
        return refusal.code, _json_or_text(refusal.read())
    except (urllib.error.URLError, OSError):
        return 0, None


def _json_or_text(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return data.decode()


def chat(port: int, text: str = "你好", **options: Any) -> tuple[int, Any]:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 8}
    return http(f"http://127.0.0.1:{port}/v1/chat/completions", body, **options)


def clean_environment(extra: dict[str, str] | None = None) -> dict[str, str]:
    """The test's environment without what would steer supervisord or the plugin, plus `extra`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SUPERVISOR_", "VLLM_", "CUDA_"))}
    return kept | {"PYTHONPATH": str(REPOSITORY), "PYTHONUNBUFFERED": "1"} | (extra or {})


def run_cli(
    *arguments: str, environment: dict[str, str] | None = None, limit_sec: float = 60.0, **options: Any
) -> subprocess.CompletedProcess[str]:
    """`python -m supervisor_vllm …` with captured text."""
    return subprocess.run(
        [sys.executable, "-m", "supervisor_vllm", *arguments],
        env=clean_environment(environment),
        capture_output=True,
        text=True,
        timeout=limit_sec,
        stdin=subprocess.DEVNULL,
        **options,
    )


#: The kernel's memory cgroups, version 1.
MEMORY_CGROUPS = Path("/sys/fs/cgroup/memory")


@contextlib.contextmanager
def memory_cgroup(name: str, limit_bytes: int) -> Iterator[Path]:
    """A new one of version 1. At the end it must be empty."""
    group = MEMORY_CGROUPS / f"supervisor-vllm-test-{os.getpid()}-{name}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(limit_bytes))
        yield group
    finally:
        wait_until(lambda: _removed(group), 20, f"{group} to be empty")


def _removed(group: Path) -> bool:
    with contextlib.suppress(OSError):
        group.rmdir()
    return not group.exists()


class Supervisord:
    """A real supervisord of this interpreter's environment, as a child without daemon, in its own directory.

    `http`: "unix", "inet" or None. Programs and sections are files in `conf_dir`, which may be written before or after
    `start`. `stop` ends all that ever ran below it, orphans included.
    """

    def __init__(
        self,
        directory: Path,
        *,
        environment: dict[str, str],
        http: str | None = "unix",
        password: str | None = None,
        main_sections: str = "",
    ) -> None:
        self.directory = directory
        self.conf_dir = directory / "conf.d"
        self.log_dir = directory / "log"
        self.conf_file = directory / "supervisord.conf"
        self.socket = self._short_socket()
        self.port = free_port() if http == "inet" else 0
        self.environment = environment
        self.process: subprocess.Popen[bytes] | None = None
        self.password = password
        self._groups: dict[int, int] = {}
        for folder in (self.conf_dir, self.log_dir):
            folder.mkdir(parents=True, exist_ok=True)
        self.conf_file.write_text(self._main_file(http, main_sections))

    def _short_socket(self) -> Path:
        """A unix socket's path has 107 bytes at most: pytest's directories may be longer."""
        path = self.directory / "supervisor.sock"
        if len(str(path)) < 100:
            return path
        return Path(f"/tmp/sv-{os.getpid()}-{id(self):x}.sock")

    def _main_file(self, http: str | None, main_sections: str) -> str:
        login = f"username=test\npassword={self.password.replace('%', '%%')}\n" if self.password else ""
        parts = [
            "[supervisord]",
            "nodaemon=true",
            f"logfile={self.directory}/supervisord.log",
            f"pidfile={self.directory}/supervisord.pid",
            f"childlogdir={self.log_dir}",
            f"directory={self.directory}",
            "loglevel=info",
        ]
        if http == "unix":
            parts += ["", "[unix_http_server]", f"file={self.socket}", "chmod=0700", login]
        if http == "inet":
            parts += ["", "[inet_http_server]", f"port=127.0.0.1:{self.port}", login]
        if http:
            factory = "supervisor.rpcinterface:make_main_rpcinterface"
            parts += ["", "[rpcinterface:supervisor]", f"supervisor.rpcinterface_factory={factory}"]
            parts += ["", "[supervisorctl]", f"serverurl={self.server_url}", login]
        parts += ["", main_sections, "", "[include]", "files = conf.d/*.conf", ""]
        return "\n".join(parts)

    @property
    def server_url(self) -> str:
        return f"http://127.0.0.1:{self.port}" if self.port else f"unix://{self.socket}"

    # ── configuration ──
    def write(self, name: str, text: str) -> Path:
        """A file in conf.d."""
        file = self.conf_dir / name
        file.write_text(text)
        return file

    def write_program(self, name: str, command: str, *, file: str | None = None, **options: object) -> Path:
        """[program:name] with one log file (stderr in it) and short times; `options` win, None leaves a key out."""
        values: dict[str, object] = {
            "command": command.replace("%", "%%"),
            "autostart": "true",
            "startsecs": 1,
            "redirect_stderr": "true",
            "stdout_logfile": self.log_dir / f"{name}.log",
            "stopwaitsecs": 10,
        } | options
        lines = [f"{key}={value}" for key, value in values.items() if value is not None]
        return self.write(file or f"{name}.conf", "\n".join((f"[program:{name}]", *lines, "")))

    # ── running ──
    def start(self, limit_sec: float = 15.0, *, cgroup: Path | None = None) -> Supervisord:
        """`cgroup`: a memory cgroup's directory, in which supervisord and all its programs run (a container)."""
        assert self.process is None, "already started"
        enter = ["sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', str(cgroup)] if cgroup else []
        output = (self.directory / "supervisord.out").open("ab")
        self.process = subprocess.Popen(
            [*enter, sys.executable, "-m", "supervisor.supervisord", "-n", "-c", str(self.conf_file)],
            env=clean_environment(self.environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=self.directory,
            start_new_session=True,
        )
        output.close()
        wait_until(self._answers, limit_sec, f"supervisord to answer:\n{self.output()}")
        return self

    def _answers(self) -> bool:
        assert self.process is not None
        if self.process.poll() is not None:
            raise AssertionError(f"supervisord ended with {self.process.returncode}:\n{self.output()}")
        if "[supervisorctl]" not in self.conf_file.read_text():
            return (self.directory / "supervisord.pid").is_file()
        try:
            self._remember_groups()
            return True
        except (OSError, xmlrpc.client.Error):
            return False

    @property
    def rpc(self) -> Any:
        """supervisord's `supervisor` namespace over XML-RPC. A new connection each time: safe in any thread."""
        user = "test" if self.password else ""
        transport = SupervisorTransport(user, self.password or "", self.server_url)
        return xmlrpc.client.ServerProxy("http://127.0.0.1", transport=transport).supervisor

    def ctl(self, *arguments: str, limit_sec: float = 60.0) -> subprocess.CompletedProcess[str]:
        """The real supervisorctl."""
        return subprocess.run(
            [sys.executable, "-m", "supervisor.supervisorctl", "-c", str(self.conf_file), *arguments],
            env=clean_environment(self.environment),
            capture_output=True,
            text=True,
            timeout=limit_sec,
            stdin=subprocess.DEVNULL,
            cwd=self.directory,
        )

    def info(self, program: str) -> dict[str, Any]:
        """getProcessInfo; {} when supervisord doesn't know the program just now."""
        try:
            found: dict[str, Any] = self.rpc.getProcessInfo(program)
        except xmlrpc.client.Fault:
            return {}
        self._remember(found)
        return found

    def pid(self, program: str) -> int:
        return int(self.info(program).get("pid", 0))

    def wait_state(self, program: str, states: str | Sequence[str], limit_sec: float = 15.0) -> dict[str, Any]:
        """The process info once the program is in one of the states."""
        wanted = (states,) if isinstance(states, str) else tuple(states)

        def reached() -> dict[str, Any]:
            found = self.info(program)
            return found if found.get("statename") in wanted else {}

        try:
            return wait_until(reached, limit_sec, f"{program} to be {' or '.join(wanted)}")
        except AssertionError as late:
            log = self.log_text(program)[-3000:]
            raise AssertionError(f"{late}\nnow: {self.info(program)}\n{self.output()[-2000:]}\nlog:\n{log}") from None

    def log_text(self, program: str) -> str:
        """All that the program wrote, the oldest first (rotated files too)."""
        files = sorted(self.log_dir.glob(f"{program}.log*"), key=lambda file: _rotation(file), reverse=True)
        return "".join(file.read_text(errors="replace") for file in files)

    def output(self) -> str:
        """supervisord's own log and what it printed."""
        files = (self.directory / "supervisord.log", self.directory / "supervisord.out")
        return "\n".join(file.read_text(errors="replace") for file in files if file.is_file())

    # ── the end ──
    def _remember(self, info: dict[str, Any]) -> None:
        """A program's pid is its process group: what is left of it can be found after its death."""
        pid = int(info.get("pid", 0))
        if pid and pid not in self._groups:
            self._groups[pid] = gpu.start_time(pid)

    def _remember_groups(self) -> None:
        for info in self.rpc.getAllProcessInfo():
            self._remember(info)

    def _remember_descendants(self) -> None:
        if self.process is None or self.process.poll() is not None:
            return
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(self.process.pid).children(recursive=True):
                with contextlib.suppress(OSError):
                    group = os.getpgid(child.pid)
                    self._groups.setdefault(group, gpu.start_time(group))

    def kill(self, limit_sec: float = 10.0) -> None:
        """SIGKILL to supervisord alone: its children live on."""
        assert self.process is not None
        self._remember_descendants()
        self.process.kill()
        self.process.wait(timeout=limit_sec)
        self.process = None

    def stop(self, limit_sec: float = 20.0) -> None:
        """SIGTERM to supervisord, then SIGKILL to it and to every process group seen below it, orphans as well."""
        self._remember_descendants()
        self._remember_from_log()
        process, self.process = self.process, None
        if process is not None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=limit_sec)
            if process.poll() is None:
                process.kill()
                process.wait(timeout=10)
        mark = str(self.directory)
        for group in self._groups:
            if any(_is_ours(member, mark) for member in group_members(group)):
                kill_group(group)
        self.socket.unlink(missing_ok=True)

    def _remember_from_log(self) -> None:
        """Short lives that nobody asked about: `spawned: 'v' with pid 12`."""
        file = self.directory / "supervisord.log"
        if not file.is_file():
            return
        for line in file.read_text(errors="replace").splitlines():
            _, found, pid = line.rpartition(" with pid ")
            if found and "spawned: " in line and pid.strip().isdigit():
                self._groups.setdefault(int(pid), 0)


def _rotation(file: Path) -> int:
    number = file.name.rpartition(".log")[2].lstrip(".")
    return int(number) if number.isdigit() else 0


def _is_ours(process: psutil.Process, mark: str) -> bool:
    """A pid may have been given away since: only what has this supervisord's directory around it is ours."""
    with contextlib.suppress(psutil.Error):
        return process.cwd().startswith(mark) or any(mark in value for value in process.environ().values())
    return False


def compile_nvml(directory: Path) -> Path:
    """libnvidia-ml.so.1 in `directory`. Raises CalledProcessError with gcc's words."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    assert compiler, "no C compiler"
    library = directory / "libnvidia-ml.so.1"
    subprocess.run(
        [
            compiler,
            "-shared",
            "-fPIC",
            "-O1",
            "-Wall",
            "-Werror",
            "-o",
            str(library),
            str(TESTS / "standin" / "nvml.c"),
        ],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return library
