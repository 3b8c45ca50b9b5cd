"""The API server, the leader that supervisord starts: checks, binds, starts the engine, serves, says its exit code."""

from __future__ import annotations

import errno
import os
import queue
import socket
import sys
import threading
import time
from argparse import Namespace
from pathlib import Path

from . import arguments, engine, figures, log, process
from .figures import Figures
from .frames import API_CONFIG, API_ENGINE_START, API_OUTPUT, API_PORT, PYTHON
from .log import Fatal, Log

_ENGINE_DEAD = (
    "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. "
    "See stack trace (above) for the root cause."
)


class EngineDead(Exception):
    pass


class ApiServer:
    def __init__(self, args: Namespace, world: Figures) -> None:
        self.args, self.world = args, world
        self.log = Log("APIServer")
        self.model = Path(args.model)
        self.dead = threading.Event()
        self.stop = threading.Event()
        self.stopped_by = 0
        self.kv_tokens = 0
        self.prompt_tokens = 0
        self.requests = 0
        self._answers: dict[int, queue.SimpleQueue[bool]] = {}
        self._lock = threading.Lock()

    # ── start ──
    def bind(self) -> socket.socket:
        """Before the model is loaded, as vLLM does since 0.6; nobody can connect until `listen`."""
        if self.args.uds:
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            Path(self.args.uds).unlink(missing_ok=True)
            listener.bind(self.args.uds)
            return listener
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            host = (
                self.args.host if self.args.host not in (None, "0.0.0.0", "localhost") else "127.0.0.1"
            )  # never outside
            listener.bind((host, self.args.port))
        except OSError as failure:
            if failure.errno != errno.EADDRINUSE:
                raise
            raise Fatal("OSError: [Errno 98] Address already in use", API_PORT) from None
        return listener

    def start_engine(self, listener: socket.socket) -> None:
        leader = os.getpid()

        def body(channel: process.Channel) -> int:
            return engine.run(channel, self.args, self.world, leader)

        self.engine_pid, self.engine = process.start(body, close=(listener,))
        while True:
            message = self.engine.receive()
            if message is None or "dead" in message:
                code = process.reap(self.engine_pid, 10.0)
                raise Fatal(
                    "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): "
                    f"{{'EngineCore': {code}}}",
                    API_ENGINE_START,
                )
            if "max_model_len" in message:
                self.args.max_model_len = int(str(message["max_model_len"]))
                self.kv_tokens = int(str(message["kv_tokens"]))
            if "ready" in message:
                return

    # ── serving ──
    def serve(self, listener: socket.socket) -> None:
        from . import http_api  # its imports cost as much as all the rest: the engine starts meanwhile

        address = f"unix:{self.args.uds}" if self.args.uds else f"http://{self.args.host or '0.0.0.0'}:{self.args.port}"
        self.log.info("entry.py:136", "Supported tasks: ['generate']")
        self.log.info("entry.py:140", f"Starting vLLM server on {address}")
        self.log.info("launcher.py:186", "Available routes are:")
        for path, methods in http_api.ROUTES:
            self.log.info("launcher.py:195", f"Route: {path}, Methods: {methods}")
        process.heed_sigterm(self._stop_asked)
        threading.Thread(target=self._read_engine, daemon=True).start()
        log.err(f"INFO:     Started server process [{os.getpid()}]\nINFO:     Waiting for application startup.\n")
        http = http_api.listen(self, listener)
        log.err("INFO:     Application startup complete.\n")
        threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True).start()
        self._schedule_faults()
        self._wait()
        listener.close()

    def _schedule_faults(self) -> None:
        for fault in self.world.faults:
            if fault.where in ("ready", "after_seconds"):
                timer = threading.Timer(fault.after_seconds, self._send, ("strike", fault.where))
                timer.daemon = True
                timer.start()

    def complete(self, prompt_tokens: int) -> None:
        """One completion through the engine. Raises EngineDead."""
        number, answer = self._send("execute_model")
        while True:
            if self.dead.is_set():
                raise EngineDead
            try:
                answer.get(timeout=0.05)
                break
            except queue.Empty:
                continue
        self._answers.pop(number, None)
        self.prompt_tokens += prompt_tokens

    def _send(self, method: str, *arguments: object) -> tuple[int, queue.SimpleQueue[bool]]:
        with self._lock:
            self.requests += 1
            number, answer = self.requests, queue.SimpleQueue[bool]()
            self._answers[number] = answer
            self.engine.send({"method": method, "args": arguments, "id": number})
        return number, answer

    def _read_engine(self) -> None:
        told = False
        while (message := self.engine.receive()) is not None:
            told = told or "dead" in message
            if "dead" in message:
                break
            if "answer" in message and (waiting := self._answers.get(int(str(message["answer"])))):
                waiting.put(True)
        if self.stop.is_set():
            return
        if not told:
            self.log.warning(
                "core_client.py:817", "[shutdown] MPClient: engine core exited unexpectedly; starting cleanup"
            )
        self.log.exception("async_llm.py:906", "AsyncLLM output_handler failed.", Fatal(_ENGINE_DEAD, API_OUTPUT))
        self.dead.set()

    def _stop_asked(self, number: int) -> None:
        self.stopped_by = number
        self.stop.set()

    # ── end ──
    def _wait(self) -> None:
        while not self.stop.wait(0.05):
            if self.dead.is_set():
                # vLLM looks every 5 s; by then /health has said 503 for a while. The end is clean: exit status 0.
                self.stop.wait(self.world.watchdog_seconds)
                log.err(
                    "INFO:     Shutting down\nINFO:     Waiting for application shutdown.\n"
                    f"INFO:     Application shutdown complete.\nINFO:     Finished server process [{os.getpid()}]\n"
                )
                self._close_engine()
                return
        self._shut_down()

    def _close_engine(self) -> None:
        self.log.info("core_client.py:770", "[shutdown] MPClient: start timeout=0s")
        self.log.info("core_client.py:772", "[shutdown] MPClient: stopping engine manager")
        process.reap(self.engine_pid, 1.0)
        self.log.info("core_client.py:774", "[shutdown] MPClient: engine manager stopped")
        self.log.info("core_client.py:775", "[shutdown] MPClient: cleaning up background resources")
        self.log.info("core_client.py:777", "[shutdown] MPClient: complete")

    def _shut_down(self) -> None:
        self.log.info("launcher.py:254", "[shutdown] API server: shutdown triggered")
        self.log.info("launcher.py:270", "[shutdown] API server: stopping engine client mode=abort timeout=0s")
        self.log.info("utils.py:628", "[shutdown] Process manager: send sigterm to process EngineCore")
        process.kill(self.engine_pid, 15)
        if process.reap(self.engine_pid, 0.5) is None:
            self.log.warning("utils.py:648", "[shutdown] Process manager: force killing remaining processes count=1")
            self.log.warning(
                "utils.py:653",
                f"[shutdown] Process manager: force killing remaining process EngineCore pid {self.engine_pid}",
            )
            process.kill(self.engine_pid)
            process.reap(self.engine_pid, 5.0)
        self._close_engine()
        self.log.info("launcher.py:279", "[shutdown] API server: engine client stopped")
        self.log.info("launcher.py:282", "[shutdown] API server: signalling HTTP server shutdown")
        self.log.info("launcher.py:304", "[shutdown] API server: shutting down FastAPI HTTP server")
        log.err(
            "INFO:     Shutting down\nINFO:     Waiting for application shutdown.\n"
            "INFO:     Application shutdown complete.\n"
        )
        log.err(
            f"{PYTHON}/multiprocessing/resource_tracker.py:254: UserWarning: resource_tracker: There appear to be "
            "2 leaked shared_memory objects to clean up at shutdown\n"
            "  warnings.warn('resource_tracker: There appear to be %d '\n"
        )


def complete_arguments(args: Namespace, world: Figures, total_bytes: int) -> None:
    """The defaults that vLLM 0.32 takes from the device and the model (engine/arg_utils.py). Raises Fatal."""
    large = total_bytes >= 70 * figures.GIB
    args.max_num_batched_tokens = args.max_num_batched_tokens or (8192 if large else 2048)
    args.max_num_seqs = args.max_num_seqs or min(256, args.max_num_batched_tokens)
    args.served_name = (args.served_model_name or [args.model])[0]
    derived = world.max_position_embeddings
    args.auto_fit = args.max_model_len == -1
    if args.max_model_len is None or args.auto_fit:
        args.max_model_len = derived
    if not 0 < args.gpu_memory_utilization <= 1:
        raise _config_error("CacheConfig", "gpu_memory_utilization", "Input should be less than or equal to 1")
    if args.max_model_len > derived:
        raise _config_error(
            "ModelConfig",
            "",
            f"Value error, User-specified max_model_len ({args.max_model_len}) is greater than the derived "
            "max_model_len "
            f"(max_position_embeddings={derived} or model_max_length=None in model's config.json). To allow overriding "
            "this maximum, set the env var VLLM_ALLOW_LONG_MAX_MODEL_LEN=1. VLLM_ALLOW_LONG_MAX_MODEL_LEN must be used "
            "with extreme caution. If the model uses relative position encoding (RoPE), positions exceeding "
            "derived_max_model_len lead to nan. If the model uses absolute position encoding, positions exceeding "
            "derived_max_model_len will cause a CUDA array out-of-bounds error.",
        )
    if args.max_num_batched_tokens < args.max_num_seqs:
        raise _config_error(
            "SchedulerConfig",
            "",
            f"Value error, max_num_batched_tokens ({args.max_num_batched_tokens}) must be greater than or equal to "
            f"max_num_seqs ({args.max_num_seqs}).",
        )


def _config_error(name: str, where: str, text: str) -> Fatal:
    place = f"{where}\n" if where else ""
    return Fatal(
        f"pydantic_core._pydantic_core.ValidationError: 1 validation error for {name}\n{place}"
        f"  {text} [type=value_error, input_value=ArgsKwargs((), {{'runner': 'auto'}}), input_type=ArgsKwargs]\n"
        "    For further information visit https://errors.pydantic.dev/2.12/v/value_error",
        API_CONFIG,
    )


def check_model(model: Path) -> None:
    """Raises Fatal as transformers does."""
    if not model.is_dir():
        raise Fatal(
            "huggingface_hub.errors.HFValidationError: Repo id must be in the form 'repo_name' or "
            f"'namespace/repo_name': '{model}'. Use `repo_type` argument if needed.",
            API_CONFIG[:-1],
        )
    if not (model / "config.json").is_file():
        raise _no_config(model)


def _no_config(model: Path) -> Fatal:
    return Fatal(
        f"OSError: {model} does not appear to have a file named config.json. Checkout "
        f"'https://huggingface.co/{model}/tree/main' for available files.",
        API_CONFIG[:-1],
    )


def main() -> int:
    process.lose_sigterm()
    words = sys.argv[1:]
    if words[:1] in (["--version"], ["-v"]):
        log.out(f"{log.VERSION}\n")
        return 0
    if words[:1] == ["serve"]:
        words = words[1:]
    args, given = arguments.parse(words)
    log_of_server = Log("APIServer")
    log.banner(log_of_server, args.model)
    log_of_server.info("api_utils.py:286", f"non-default args: {given}")
    try:
        return _serve(args)
    except Fatal as failure:
        log.err("\n".join((*log.traceback_lines(failure), "")))
        return 1


def _serve(args: Namespace) -> int:
    from . import gpu

    model = Path(args.model)
    world = figures.read(model) if model.is_dir() else Figures()
    server = ApiServer(args, world)
    listener = server.bind()
    for fault in world.faults:
        if fault.where == "startup" and fault.what in ("exit0", "port", "bad_model") and figures.claim(model, fault):
            if fault.what == "exit0":
                return 0
            raise (
                Fatal("OSError: [Errno 98] Address already in use", API_PORT)
                if fault.what == "port"
                else _no_config(model)
            )
    check_model(model)
    complete_arguments(args, world, gpu.own_device().total_bytes)
    server.log.info("model.py:733", "Resolved architecture: Qwen2ForCausalLM")
    server.log.info("model.py:2152", f"Using max model len {args.max_model_len}")
    server.log.info(
        "scheduler.py:307", f"Chunked prefill is enabled with max_num_batched_tokens={args.max_num_batched_tokens}."
    )
    if args.enforce_eager:
        server.log.warning(
            "vllm.py:1703",
            "Enforce eager set, disabling torch.compile, CUDAGraphs, and JIT kernel warmup. This is equivalent to "
            "setting -cc.mode=none -cc.cudagraph_mode=none and --kernel_config.enable_jit_warmup=False",
        )
    server.start_engine(listener)
    time.sleep(world.health_seconds)
    server.serve(listener)
    return 0
