"""Healthy means a real answer: /health → /v1/models (the right model, the right length) → one completion.

The requests are made in a process of their own (`python -m supervisor_vllm.health`, the target as JSON on stdin): the
listener stays small, a hung socket can't hang it, and the API key is in no process list.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any, Literal

from .incident import from_json, to_json

Step = Literal["process", "health", "models", "completion"]

#: Over the completion's own limit: the start of Python, /health and /v1/models.
_CHILD_EXTRA_SEC = 20.0
_SHORT_REQUEST_SEC = 10.0


@dataclass(frozen=True)
class Target:
    """What was launched, and so what must answer. `uds`: a unix socket instead of host and port."""

    host: str
    port: int
    uds: str | None = None
    tls: bool = False
    root_path: str = ""
    api_key: str | None = None
    model: str | None = None
    #: a relative path in the command is meant from here
    directory: str | None = None
    served_names: tuple[str, ...] = ()
    max_model_len: int | None = None
    prompt: str = "你好"
    max_tokens: int = 64
    timeout_sec: float = 60.0

    @property
    def base_url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls else 'http'}://{host}:{self.port}{self.root_path.rstrip('/')}"


@dataclass(frozen=True)
class Health:
    """`step` is the last one that was reached. `retry`: not yet, as opposed to no."""

    healthy: bool
    step: Step
    reason: str
    retry: bool = False
    model: str | None = None
    root: str | None = None
    max_model_len: int | None = None
    text: str | None = None
    latency_seconds: float | None = None


@dataclass(frozen=True)
class Progress:
    """From /metrics: tokens that were read or written since the start, requests that run or wait."""

    tokens: float
    running: float
    waiting: float


def check_health(target: Target) -> Health:
    """The whole check, within the target's time limit and a little."""
    try:
        return from_json(Health, _in_child("check", target))
    except subprocess.TimeoutExpired:
        return Health(False, "completion", f"no completion within {target.timeout_sec:g} s")
    except ChildError as why:
        return Health(False, "health", f"the check itself failed: {why}", retry=True)


def check_while_serving(target: Target) -> str | None:
    """None: alive. A completion that doesn't come back while tokens go on flowing is a full queue, not a hang."""
    before = _tokens(target)
    health = check_health(target)
    if health.healthy:
        return None
    after = _tokens(target)
    if before is not None and after is not None and after > before:
        return None
    return health.reason


def _tokens(target: Target) -> float | None:
    """Read and written since the server's start; None where /metrics doesn't say."""
    try:
        return from_json(Progress, _in_child("progress", target)).tokens
    except (subprocess.TimeoutExpired, ChildError):
        return None


class ChildError(Exception):
    """The child ended without an answer: its last word."""


def _in_child(verb: str, target: Target) -> Any:
    """In `/`: `python -m` looks for modules in its working directory first, and ours may be anybody's."""
    environment = {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")}
    done = subprocess.run(
        [sys.executable, "-m", "supervisor_vllm.health", verb],
        input=json.dumps(to_json(target)),
        capture_output=True,
        text=True,
        timeout=target.timeout_sec + _CHILD_EXTRA_SEC,
        env=environment,
        cwd="/",
        check=False,
    )
    try:
        return json.loads(done.stdout)
    except ValueError:
        raise ChildError((done.stderr.strip().splitlines() or ["no answer"])[-1]) from None


# -- in the child ------------------------------------------------------------------------------------------------------


def _check(target: Target) -> Health:
    import requests

    session = _session(target)
    try:
        answer = session.get(f"{target.base_url}/health", timeout=_SHORT_REQUEST_SEC, allow_redirects=False)
    except requests.RequestException as why:
        return Health(False, "health", f"not listening yet ({type(why).__name__})", retry=True)
    if answer.status_code != 200:
        return Health(False, "health", f"/health answers {answer.status_code}", retry=True)
    try:
        models = session.get(f"{target.base_url}/v1/models", timeout=_SHORT_REQUEST_SEC, allow_redirects=False)
    except requests.RequestException as why:
        return Health(False, "models", f"/v1/models does not answer ({type(why).__name__})", retry=True)
    health = _right_model(target, models)
    if not health.healthy:
        return health
    return _completion(target, session, health)


def _right_model(target: Target, answer: Any) -> Health:
    if answer.status_code == 401:
        return Health(False, "models", "/v1/models wants an API key: name its variable in api_key_env")
    try:
        served = {entry["id"]: entry for entry in answer.json()["data"]}
    except (ValueError, KeyError, TypeError):
        return Health(False, "models", f"/v1/models answers {answer.status_code}, not a list of models", retry=True)
    wanted = target.served_names or ((target.model,) if target.model else tuple(served)[:1])
    name = next((name for name in wanted if name in served), None)
    if name is None:
        return Health(False, "models", f"serves {', '.join(served) or 'nothing'}, launched was {', '.join(wanted)}")
    root, length = served[name].get("root"), served[name].get("max_model_len")
    if target.model and root and not _same_model(target, root):
        return Health(False, "models", f"serves {root}, launched was {target.model}", model=name, root=root)
    if target.max_model_len and length and length != target.max_model_len:
        reason = f"max_model_len is {length}, launched was {target.max_model_len}"
        return Health(False, "models", reason, model=name, root=root, max_model_len=length)
    return Health(True, "models", "the right model", model=name, root=root, max_model_len=length)


def _same_model(target: Target, root: str) -> bool:
    if root == target.model:
        return True
    base = target.directory or "/"
    paths = [os.path.realpath(os.path.join(base, name)) for name in (root, target.model or "")]
    return os.path.exists(paths[0]) and paths[0] == paths[1]


def _completion(target: Target, session: Any, models: Health) -> Health:
    import requests

    chat = {"messages": [{"role": "user", "content": target.prompt}]}
    began = time.monotonic()
    try:
        answer = _post(target, session, "/v1/chat/completions", models.model, chat)
        if answer.status_code in (400, 404, 405) and _has_no_chat(answer):
            answer = _post(target, session, "/v1/completions", models.model, {"prompt": target.prompt})
    except requests.Timeout:
        return dataclasses.replace(
            models, healthy=False, step="completion", reason=f"no completion within {target.timeout_sec:g} s"
        )
    except requests.RequestException as why:
        reason = f"the completion was cut off ({type(why).__name__})"
        return dataclasses.replace(models, healthy=False, step="completion", reason=reason)
    return dataclasses.replace(_judge(answer, models), latency_seconds=round(time.monotonic() - began, 3))


def _post(target: Target, session: Any, path: str, model: str | None, what: dict[str, Any]) -> Any:
    body = {"model": model, "max_tokens": target.max_tokens, "temperature": 0, **what}
    return session.post(f"{target.base_url}{path}", json=body, timeout=target.timeout_sec, allow_redirects=False)


def _has_no_chat(answer: Any) -> bool:
    """A base model: no chat template (400), or no chat route at all (404, 405)."""
    return answer.status_code != 400 or "chat template" in answer.text or "chat_template" in answer.text


def _judge(answer: Any, models: Health) -> Health:
    failed = dataclasses.replace(models, healthy=False, step="completion")
    if answer.status_code != 200:
        return dataclasses.replace(failed, reason=f"the completion fails with {answer.status_code}")
    try:
        body = answer.json()
        choice = body["choices"][0]
    except (ValueError, LookupError, TypeError):
        return dataclasses.replace(failed, reason="the completion is not what vLLM answers")
    text = (choice.get("message") or {}).get("content") or choice.get("text") or ""
    tokens = (body.get("usage") or {}).get("completion_tokens") or 0
    if not text and not tokens:
        return dataclasses.replace(failed, reason="the completion is empty")
    return dataclasses.replace(models, step="completion", reason="a completion came back", text=text[:200])


def _progress(target: Target) -> Progress:
    text = _session(target).get(f"{target.base_url}/metrics", timeout=_SHORT_REQUEST_SEC, allow_redirects=False).text
    sums = {"tokens": 0.0, "running": 0.0, "waiting": 0.0}
    names = {
        "vllm:prompt_tokens_total": "tokens",
        "vllm:generation_tokens_total": "tokens",
        "vllm:num_requests_running": "running",
        "vllm:num_requests_waiting": "waiting",
    }
    for line in text.splitlines():
        name, _, rest = line.partition("{")
        if name in names:
            sums[names[name]] += float(rest.rpartition(" ")[2])
    return Progress(**sums)


def _session(target: Target) -> Any:
    import requests

    session = requests.Session()
    session.trust_env = False  # no proxy, no .netrc: the server is on this host
    if target.api_key:
        session.headers["Authorization"] = f"Bearer {target.api_key}"
    if target.tls:
        session.verify = False  # no certificate's name fits 127.0.0.1; the key goes to the launched server's host only
    if target.uds:
        session.mount("http://", _unix_adapter(target.uds))
    return session


def _unix_adapter(path: str) -> Any:
    """requests over a unix socket: urllib3 connects where we say."""
    import socket

    import requests.adapters
    import urllib3.connection
    import urllib3.connectionpool

    class UnixConnection(urllib3.connection.HTTPConnection):
        def connect(self) -> None:
            self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self.sock.settimeout(self.timeout if isinstance(self.timeout, (int, float)) else None)
            self.sock.connect(path)

    class UnixPool(urllib3.connectionpool.HTTPConnectionPool):
        ConnectionCls = UnixConnection

    class UnixAdapter(requests.adapters.HTTPAdapter):
        def get_connection_with_tls_context(
            self, request: Any, verify: Any, proxies: Any = None, cert: Any = None
        ) -> Any:
            return UnixPool("localhost")

        def get_connection(self, url: Any, proxies: Any = None) -> Any:
            return UnixPool("localhost")

    return UnixAdapter()


def main() -> int:
    target = from_json(Target, json.load(sys.stdin))
    result = _check(target) if sys.argv[1:] == ["check"] else _progress(target)
    print(json.dumps(to_json(result), ensure_ascii=False))
    return 0


if __name__ == "__main__":
    sys.exit(main())
