"""The HTTP side of the stand-in: the routes that a supervisor asks."""

from __future__ import annotations

import json
import socket
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

from . import log

if TYPE_CHECKING:
    from .server import ApiServer

ROUTES = (
    ("/version", "GET"),
    ("/health", "GET"),
    ("/metrics", "GET"),
    ("/v1/models", "GET"),
    ("/ping", "GET"),
    ("/ping", "POST"),
    ("/v1/chat/completions", "POST"),
    ("/v1/completions", "POST"),
)

_NO_TEMPLATE = (
    "As of transformers v4.44, default chat template is no longer allowed, so you must provide a chat template if the "
    "tokenizer does not define one."
)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    api: ApiServer

    def server_bind(self) -> None:  # the socket comes bound
        self.server_name, self.server_port = "localhost", 0

    def get_request(self) -> tuple[socket.socket, Any]:
        connection, address = self.socket.accept()
        return connection, address or ("unix", 0)


def listen(api: ApiServer, listener: socket.socket) -> _Server:
    server = _Server(("", 0), _Handler, bind_and_activate=False)
    server.socket.close()
    server.socket = listener
    server.api = api
    server.server_bind()
    listener.listen(128)
    return server


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def setup(self) -> None:
        super().setup()
        self.api = self.server.api

    def do_GET(self) -> None:
        path = self._path()
        if path in ("/health", "/ping"):
            self._answer(503 if self.api.dead.is_set() else 200, "")
        elif path == "/version":
            self._answer(200, {"version": log.VERSION})
        elif path == "/metrics":
            self._answer(200, self._metrics(), "text/plain; version=0.0.4; charset=utf-8")
        elif not self._authorised():
            self._answer(401, {"error": "Unauthorized"})
        elif path == "/v1/models":
            self._answer(200, {"object": "list", "data": [self._model_card()]})
        else:
            self._answer(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        path = self._path()
        text = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if path == "/ping":
            self._answer(503 if self.api.dead.is_set() else 200, "")
        elif path not in ("/v1/chat/completions", "/v1/completions"):
            self._answer(404, {"detail": "Not Found"})
        elif not self._authorised():
            self._answer(401, {"error": "Unauthorized"})
        else:
            self._complete(path, json.loads(text or b"{}"))

    def _complete(self, path: str, request: dict[str, Any]) -> None:
        from .server import EngineDead

        chat = path.endswith("chat/completions")
        names = self.api.args.served_model_name or [self.api.args.model]
        name = request.get("model") or names[0]
        if name not in names:
            self._refuse(404, f"The model `{name}` does not exist.", "NotFoundError")
            return
        template = self.api.args.chat_template or (self.api.model / "chat_template.jinja").is_file()
        if chat and not template:
            self._refuse(400, _NO_TEMPLATE, "BadRequestError")
            return
        prompt = request["messages"][-1]["content"] if chat else request.get("prompt", "")
        prompt_tokens = max(1, len(str(prompt).encode()) // 4)
        wanted = int(request.get("max_completion_tokens") or request.get("max_tokens") or 16)
        limit = self.api.args.max_model_len
        if prompt_tokens + wanted > limit:
            self._refuse(
                400,
                f"This model's maximum context length is {limit} tokens. However, you requested {wanted} output tokens "
                f"and your prompt contains at least {prompt_tokens} input tokens. Please reduce the length of the "
                "input "
                "prompt or the number of requested output tokens.",
                "BadRequestError",
            )
            return
        try:
            self.api.complete(prompt_tokens)
        except EngineDead:
            self._refuse(
                500,
                "EngineCore encountered an issue. See stack trace (above) for the root cause.",
                "InternalServerError",
            )
            return
        self._answer(200, self._completion(chat, name, str(prompt), prompt_tokens, wanted))

    def _completion(self, chat: bool, name: str, prompt: str, prompt_tokens: int, wanted: int) -> dict[str, Any]:
        text = f"stand-in answer to {prompt[:80]!r}"
        body = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        return {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{self.api.requests:016x}",
            "object": "chat.completion" if chat else "text_completion",
            "created": int(time.time()),
            "model": name,
            "choices": [{"index": 0, **body, "logprobs": None, "finish_reason": "stop"}],
            "usage": {
                "prompt_tokens": prompt_tokens,
                "completion_tokens": min(wanted, 8),
                "total_tokens": prompt_tokens + min(wanted, 8),
            },
        }

    def _model_card(self) -> dict[str, Any]:
        return {
            "id": self.api.args.served_name,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "vllm",
            "root": self.api.args.model,
            "parent": None,
            "max_model_len": self.api.args.max_model_len,
        }

    def _metrics(self) -> str:
        args, name = self.api.args, self.api.args.served_name
        labels = f'{{engine="0",model_name="{name}"}}'
        blocks = self.api.kv_tokens // args.block_size
        return (
            "# HELP vllm:num_requests_running Number of requests in model execution batches.\n"
            "# TYPE vllm:num_requests_running gauge\n"
            f"vllm:num_requests_running{labels} 0.0\n"
            "# HELP vllm:num_requests_waiting Number of requests waiting to be processed.\n"
            "# TYPE vllm:num_requests_waiting gauge\n"
            f"vllm:num_requests_waiting{labels} 0.0\n"
            "# HELP vllm:kv_cache_usage_perc KV-cache usage. 1 means 100 percent usage.\n"
            "# TYPE vllm:kv_cache_usage_perc gauge\n"
            f"vllm:kv_cache_usage_perc{labels} 0.0\n"
            "# HELP vllm:num_preemptions_total Cumulative number of preemption from the engine.\n"
            "# TYPE vllm:num_preemptions_total counter\n"
            f"vllm:num_preemptions_total{labels} 0.0\n"
            "# HELP vllm:prompt_tokens_total Number of prefill tokens processed.\n"
            "# TYPE vllm:prompt_tokens_total counter\n"
            f"vllm:prompt_tokens_total{labels} {float(self.api.prompt_tokens)}\n"
            "# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig\n"
            "# TYPE vllm:cache_config_info gauge\n"
            f'vllm:cache_config_info{{block_size="{args.block_size}",cache_dtype="{args.kv_cache_dtype}",engine="0",'
            f'gpu_memory_utilization="{args.gpu_memory_utilization}",num_gpu_blocks="{blocks}"}} 1.0\n'
        )

    def _path(self) -> str:
        path = self.path.partition("?")[0]
        root = self.api.args.root_path.rstrip("/")
        return path[len(root) :] if root and path.startswith(root + "/") else path

    def _authorised(self) -> bool:
        """Only paths below /v1 want the key (0.32 entrypoints/serve/middleware/authenticate.py)."""
        keys = self.api.args.api_key
        given = self.headers.get("Authorization", "")
        return not keys or not self._path().startswith("/v1") or given in {f"Bearer {key}" for key in keys}

    def _refuse(self, status: int, text: str, kind: str) -> None:
        self._answer(status, {"error": {"message": text, "type": kind, "param": None, "code": status}})

    def _answer(self, status: int, body: dict[str, Any] | str, content_type: str = "application/json") -> None:
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        host, port = self.client_address[:2] if isinstance(self.client_address, tuple) else ("unix", 0)
        reason = {200: "OK", 400: "Bad Request", 401: "Unauthorized", 404: "Not Found", 500: "Internal Server Error"}
        text = reason.get(int(code), "Service Unavailable")
        log.err(f'INFO:     {host}:{port} - "{self.requestline}" {int(code)} {text}\n')
