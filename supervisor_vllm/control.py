"""supervisord over XML-RPC: state, start and stop, and the taking over of a changed configuration.

Each call opens its own connection (xmlrpc isn't thread-safe, and a kept one dies with supervisord's restart), has a
time limit, and fails in one way: ControlError with a sentence.
"""

from __future__ import annotations

import http.client
import socket
import xmlrpc.client
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from supervisor.xmlrpc import Faults, SupervisorTransport

CALL_LIMIT_SEC = 15.0


class ControlError(Exception):
    """supervisord can't be reached, or refuses: the sentence says which."""


@dataclass(frozen=True)
class Supervisord:
    """Where supervisord listens. `url` is unix:///path or http://host:port."""

    url: str
    username: str | None = None
    password: str | None = None


@dataclass(frozen=True)
class ProcessInfo:
    """`exit_status` as supervisord says it: −1 after any signal, 0 also after an exit before startsecs (measured).
    `stop_time` in whole seconds since the epoch, 0 before the first stop."""

    state: str
    pid: int
    exit_status: int
    stop_time: int
    stdout_logfile: str
    stderr_logfile: str
    description: str


@dataclass(frozen=True)
class Applied:
    """`problem`: why supervisord didn't take it (a sentence); None when it did, or when nothing had changed."""

    changed: bool
    problem: str | None = None


def connect(url: str, username: str | None, password: str | None) -> Supervisord:
    return Supervisord(url, username, password)


def process_info(server: Supervisord, full_name: str) -> ProcessInfo | None:
    """None: supervisord has no such process."""
    try:
        info = _call(server, "supervisor.getProcessInfo", full_name)
    except _Refused as why:
        if why.code == Faults.BAD_NAME:
            return None
        raise
    return ProcessInfo(
        state=info["statename"],
        pid=info["pid"],
        exit_status=info["exitstatus"],
        stop_time=info["stop"],
        stdout_logfile=info["stdout_logfile"],
        stderr_logfile=info["stderr_logfile"],
        description=info["description"],
    )


def poke(server: Supervisord) -> None:
    """Any call wakes supervisord's loop: it reaps a dead child now, not up to two seconds later (measured)."""
    _call(server, "supervisor.getState")


def running(server: Supervisord, group: str, full_names: tuple[str, ...]) -> tuple[str, ...]:
    """Those of the processes that run, start or stop now."""
    states = {}
    for info in _call(server, "supervisor.getAllProcessInfo"):
        states[f"{info['group']}:{info['name']}"] = info["statename"]
    return tuple(name for name in full_names if states.get(name) in ("STARTING", "RUNNING", "BACKOFF", "STOPPING"))


def configured_command(server: Supervisord, full_name: str) -> str | None:
    """The command as supervisord has expanded it."""
    for info in _call(server, "supervisor.getAllConfigInfo"):
        if f"{info['group']}:{info['name']}" == full_name:
            return str(info["command"])
    return None


def start(server: Supervisord, full_name: str) -> None:
    """Doesn't wait for startsecs. A process that has started by itself (autostart of a group just added) is started."""
    try:
        _call(server, "supervisor.startProcess", full_name, False)
    except _Refused as why:
        if why.code != Faults.ALREADY_STARTED:
            raise


def stop(server: Supervisord, full_name: str) -> None:
    """Doesn't wait: supervisord sends stopsignal, and after stopwaitsecs SIGKILL."""
    try:
        _call(server, "supervisor.stopProcess", full_name, False)
    except _Refused as why:
        if why.code != Faults.NOT_RUNNING:
            raise


def apply_config(server: Supervisord, group: str) -> Applied:
    """Let supervisord read its files again and take this group's new configuration. Stops nothing: the caller has seen
    to it that no process of the group runs. A group with autostart=true starts by itself (measured)."""
    try:
        ((added, changed, removed),) = _call(server, "supervisor.reloadConfig")
    except _Refused as why:
        return Applied(False, f"supervisord can't read its configuration: {why}")
    if group in removed:
        return Applied(False, f"the group {group} is no longer in supervisord's configuration")
    if group not in added and group not in changed:
        return Applied(False)
    if group in changed:
        _call(server, "supervisor.removeProcessGroup", group)
    _call(server, "supervisor.addProcessGroup", group)
    return Applied(True)


def main_log_tail(server: Supervisord, length_bytes: int = 200_000) -> str:
    """The end of supervisord's own log; empty where it has none."""
    try:
        return str(_call(server, "supervisor.readLog", -length_bytes, 0))
    except _Refused:
        return ""


class _Refused(ControlError):
    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class _LimitedTransport(SupervisorTransport):  # type: ignore[misc]
    """supervisor's own transport waits for ever; a supervisord that hangs must not hang us."""

    def __init__(self, server: Supervisord) -> None:
        super().__init__(server.username, server.password, server.url)
        unlimited: Callable[[], http.client.HTTPConnection] = vars(self)["_get_connection"]
        self._get_connection = lambda: _limited(unlimited())


def _limited(connection: http.client.HTTPConnection) -> http.client.HTTPConnection:
    socketfile = getattr(connection, "socketfile", None)
    connection.timeout = CALL_LIMIT_SEC
    if socketfile is not None:
        connection.connect = lambda: _connect_unix(connection, socketfile)  # type: ignore[method-assign]
    return connection


def _connect_unix(connection: http.client.HTTPConnection, path: str) -> None:
    connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.sock.settimeout(CALL_LIMIT_SEC)
    connection.sock.connect(path)


def _call(server: Supervisord, method: str, *arguments: Any) -> Any:
    transport = _LimitedTransport(server)
    # The address in the proxy is only a placeholder: the transport knows the real one.
    proxy = xmlrpc.client.ServerProxy("http://127.0.0.1", transport=transport)
    try:
        return getattr(proxy, method)(*arguments)
    except xmlrpc.client.Fault as why:
        raise _Refused(why.faultCode, f"{method.removeprefix('supervisor.')}: {why.faultString}") from None
    except xmlrpc.client.ProtocolError as why:
        if why.errcode == 401:
            raise ControlError(
                "supervisord wants a password: give it in [supervisorctl] of its main file (username, password)"
            ) from None
        raise ControlError(f"supervisord answered {why.errcode} {why.errmsg}") from None
    except (OSError, http.client.HTTPException) as why:
        raise ControlError(f"supervisord can't be reached at {server.url} ({why})") from None
    finally:
        transport.close()
