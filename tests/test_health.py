"""The health check in its own process against a small real HTTP server."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from world import free_port

from supervisor_vllm.health import Target, check_health

MODELS = {"data": [{"id": "m", "root": "/models/m", "max_model_len": 100}]}
CHAT = {"choices": [{"message": {"content": "hi"}, "finish_reason": "stop"}], "usage": {"completion_tokens": 1}}
TEXT = {"choices": [{"text": "base", "finish_reason": "length"}], "usage": {"completion_tokens": 1}}


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.release = threading.Event()
        self.authorization: list[str | None] = []
        self.answers: dict[str, tuple[int, Any]] = {
            "/health": (200, {}),
            "/v1/models": (200, MODELS),
            "/v1/chat/completions": (200, CHAT),
        }

    def target(self, **values: Any) -> Target:
        defaults = {"model": "/models/m", "served_names": ("m",), "max_model_len": 100, "timeout_sec": 10.0}
        return Target("127.0.0.1", self.server_port, **(defaults | values))


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        status, body = self.server.answers.get(self.path, (404, {}))
        self.server.authorization.append(self.headers.get("Authorization"))
        if body is None:  # never answers
            self.server.release.wait(30)
            return
        data = json.dumps(body).encode()
        self.send_response(status)
        if status == 302:
            self.send_header("Location", "/elsewhere")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.do_GET()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as made:
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        yield made
        made.release.set()
        made.shutdown()
        thread.join(10)


def test_a_real_answer_is_healthy_and_proxies_are_not_asked(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    health = check_health(server.target(api_key="k"))
    assert health.healthy and (health.step, health.text, health.max_model_len) == ("completion", "hi", 100)
    assert set(server.authorization) == {"Bearer k"}


def test_a_base_model_is_asked_without_chat(server: Server) -> None:
    server.answers["/v1/chat/completions"] = (400, {"message": "no chat template is defined"})
    server.answers["/v1/completions"] = (200, TEXT)
    assert check_health(server.target()).text == "base"


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ({"model": "/models/other"}, "serves /models/m, launched was /models/other"),
        ({"served_names": ("n",)}, "serves m, launched was n"),
        ({"max_model_len": 200}, "max_model_len is 100, launched was 200"),
    ],
)
def test_another_server_on_the_port_is_a_clear_no(server: Server, target: dict[str, Any], reason: str) -> None:
    health = check_health(server.target(**target))
    assert (health.healthy, health.retry, health.step, health.reason) == (False, False, "models", reason)


def test_nobody_listens_is_not_yet() -> None:
    health = check_health(Target("127.0.0.1", free_port()))
    assert (health.healthy, health.retry, health.step) == (False, True, "health")


@pytest.mark.parametrize("answer", [(500, {}), (200, {"choices": []}), (302, CHAT)])
def test_a_failing_completion_is_unhealthy(server: Server, answer: tuple[int, Any]) -> None:
    server.answers["/v1/chat/completions"] = answer
    health = check_health(server.target())
    assert (health.healthy, health.step) == (False, "completion")


def test_a_completion_that_never_comes_has_a_limit(server: Server) -> None:
    server.answers["/v1/chat/completions"] = (200, None)
    health = check_health(server.target(timeout_sec=0.5))
    assert not health.healthy and health.reason == "no completion within 0.5 s"
