"""EngineCore: asks the Worker for one thing after the other, checks the KV cache, and outlives a killed API server."""

from __future__ import annotations

import os
import select
import time
from argparse import Namespace

from . import log, process, worker
from .figures import Figures
from .frames import (
    ENGINE_EXECUTOR_FAILED,
    ENGINE_INIT,
    ENGINE_KV_CHECK,
    ENGINE_WORKER_FAILED,
    ENGINE_WORKER_GONE,
    PROCESS_HEAD,
)
from .log import Fatal, Log, gib
from .process import Channel

_BACKGROUND = (
    "Exception: WorkerProc initialization failed due to an exception in a background process. "
    "See stack trace for root cause."
)
_CONSERVING = "See https://docs.vllm.ai/en/latest/configuration/conserving_memory/ for more details."


class WorkerGone(Exception):
    pass


class EngineCore:
    def __init__(self, args: Namespace, world: Figures, api_server: Channel, api_server_pid: int) -> None:
        self.args, self.world = args, world
        self.api_server = api_server
        self.api_server_pid = api_server_pid
        self.log = Log("EngineCore")
        self.workers: list[Channel] = []
        self.worker_pids: list[int] = []
        self.ended = False

    def start(self) -> None:
        args = self.args
        self.log.info(
            "core.py:133",
            f"Initializing a V1 LLM engine (v{log.VERSION}) with config: model='{args.model}', "
            "speculative_config=None, "
            f"tokenizer='{args.model}', skip_tokenizer_init=False, tokenizer_mode=auto, revision=None, "
            "tokenizer_revision=None, trust_remote_code=False, dtype=torch.bfloat16, "
            f"max_seq_len={args.max_model_len}, download_dir=None, load_format={args.load_format}, "
            f"tensor_parallel_size={args.tensor_parallel_size}, pipeline_parallel_size={args.pipeline_parallel_size}, "
            f"data_parallel_size=1, disable_custom_all_reduce=False, quantization={args.quantization}, "
            f"enforce_eager={args.enforce_eager}, kv_cache_dtype={args.kv_cache_dtype}, device_config=cuda, "
            f"seed={args.seed}, served_model_name={args.served_name}, enable_prefix_caching=True",
        )
        begun = time.monotonic()
        self._start_workers()
        self._initialize_kv_caches()
        self.log.info(
            "core.py:402",
            f"init engine (profile, create kv cache, warmup model) took {time.monotonic() - begun:.2f} s",
        )

    def _start_workers(self) -> None:
        death_pipe, self.death_pipe_of_workers = os.pipe()
        pids = Namespace(engine=os.getpid(), api_server=self.api_server_pid)

        def start(rank: int) -> tuple[int, Channel]:
            def body(channel: Channel) -> int:
                os.close(self.death_pipe_of_workers)
                return worker.run(channel, self.args, self.world, pids, death_pipe, rank)

            return process.start(body, close=(self.api_server, *self.workers))

        for rank in range(self.args.tensor_parallel_size):
            pid, channel = start(rank)
            self.worker_pids.append(pid)
            self.workers.append(channel)
        os.close(death_pipe)
        answers = [channel.receive() for channel in self.workers]
        if any(answer is None or "failed" in answer for answer in answers):
            self.end_workers()
            raise Fatal(_BACKGROUND, ENGINE_INIT)

    def _ask(self, method: str, *arguments: object) -> list[object]:
        """One answer a Worker. Raises WorkerGone, and Fatal with the first error."""
        for channel in self.workers:
            channel.send({"method": method, "args": arguments})
        return [self._result(channel, method) for channel in self.workers]

    def _result(self, channel: Channel, method: str) -> object:
        answer = channel.receive()
        if answer is None:
            raise WorkerGone
        if "error" in answer:
            raise Fatal(
                f"RuntimeError: Worker failed with error '{answer['error']}', please check the stack trace above for "
                "the root cause",
                ENGINE_WORKER_FAILED.get(method, ENGINE_WORKER_FAILED["execute_model"]),
            )
        return answer["result"]

    def _ask_at_start(self, method: str, *arguments: object) -> list[object]:
        try:
            return self._ask(method, *arguments)
        except WorkerGone:
            self._say_worker_gone()
            raise Fatal("RuntimeError: cancelled", ENGINE_WORKER_GONE[method]) from None

    def _initialize_kv_caches(self) -> None:
        available = min(int(str(found)) for found in self._ask_at_start("determine_available_memory"))
        per_token = self.world.kv_bytes_per_token // self.args.tensor_parallel_size
        if self.args.kv_cache_dtype.startswith("fp8"):
            per_token //= 2
        fitting = max(0, available) // per_token // self.args.block_size * self.args.block_size
        if self.args.auto_fit:
            self._auto_fit(fitting, available)
        _check_enough_kv_cache_memory(available, per_token, self.args.max_model_len, fitting)
        self.api_server.send({"max_model_len": self.args.max_model_len, "kv_tokens": fitting})
        self.log.info(
            "kv_cache_utils.py:2327",
            f"GPU KV cache size: {fitting:,} tokens, Maximum concurrency for {self.args.max_model_len:,} tokens per "
            f"request: {fitting / self.args.max_model_len:.2f}x",
        )
        self._ask_at_start("initialize_from_config", available)
        self._ask_at_start("compile_or_warm_up_model")

    def _auto_fit(self, fitting: int, available: int) -> None:
        before = self.args.max_model_len
        if fitting <= 0:
            raise Fatal(
                "ValueError: Cannot auto-fit max_model_len: not enough GPU memory available to serve even a single "
                "token. Try increasing `gpu_memory_utilization`.",
                ENGINE_KV_CHECK[:-1],
            )
        self.args.max_model_len = min(before, fitting)
        if fitting < before:
            text = f"reduced from {before} to {fitting} to fit in available KV cache memory ({gib(available)} GiB)"
        else:
            text = f"full model context length {before} fits in available KV cache memory ({gib(available)} GiB)"
        self.log.info("kv_cache_utils.py:2477", f"Auto-fit max_model_len: {text}")

    # ── serving ──
    def serve(self) -> None:
        """Until the Worker is gone or fails, or we're told to end. A dead API server is no reason (vLLM 0.32)."""
        for channel in self.workers:
            channel.send({"method": "serving"})
        watched: list[Channel] = [*self.workers, self.api_server]
        while True:
            ready, _, _ = select.select(watched, [], [])
            if any(channel in ready and channel.receive() is None for channel in self.workers):
                self._executor_failed()
            if self.api_server not in ready:
                continue
            request = self.api_server.receive()
            if request is None:
                watched.remove(self.api_server)
                continue
            try:
                self._ask(str(request["method"]), *request.get("args", ()))  # type: ignore[misc]
            except WorkerGone:
                self._executor_failed()
            except Fatal:
                self._dump_input()
                raise
            self.api_server.send({"answer": request["id"]})

    def _dump_input(self) -> None:
        """vLLM 0.32 logging_utils/dump_input.py: token ids of whoever was served, no text."""
        self.log.error("dump_input.py:72", f"Dumping input data for V1 LLM engine (v{log.VERSION}) with config: ...,")
        self.log.error(
            "dump_input.py:79",
            "Dumping scheduler output for model execution: SchedulerOutput(scheduled_new_reqs=[NewRequestData("
            "req_id=chatcmpl-1,prompt_token_ids_len=24,mm_features=[])], num_scheduled_tokens={chatcmpl-1: 24}, "
            "total_num_scheduled_tokens=24)",
        )

    def _dead_rank(self) -> int:
        return next((rank for rank, pid in enumerate(self.worker_pids) if process.reap(pid, 0) is not None), 0)

    def _executor_failed(self) -> None:
        self._say_worker_gone()
        raise Fatal("RuntimeError: Executor failed.", ENGINE_EXECUTOR_FAILED)

    def _say_worker_gone(self) -> None:
        self.log.error(
            "multiproc_executor.py:315",
            f"Worker proc VllmWorker-{self._dead_rank()} died unexpectedly (exit code: None), shutting down executor.",
        )
        self.end_workers()

    def end_workers(self) -> None:
        """Once: the pipe whose end the Workers wait for is closed, and who doesn't notice is killed."""
        if self.ended:
            return
        self.ended = True
        count = len(self.worker_pids)
        self.log.info("multiproc_executor.py:479", f"[shutdown] Executor: waiting for worker exit count={count}")
        os.close(self.death_pipe_of_workers)
        for pid in self.worker_pids:
            if process.reap(pid, 1.0) is None:
                process.kill(pid)
                process.reap(pid, 5.0)
        self.log.info("multiproc_executor.py:486", "[shutdown] Executor: all workers exited gracefully")


def _check_enough_kv_cache_memory(available: int, per_token: int, max_model_len: int, fitting: int) -> None:
    """vLLM 0.32 v1/core/kv_cache_utils.py, word for word."""
    if available <= 0:
        raise Fatal(
            "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when "
            "initializing the engine (this flag also controls CPU memory reservation on the CPU backend, despite its "
            f"name). {_CONSERVING}",
            ENGINE_KV_CHECK,
        )
    needed = per_token * max_model_len
    if needed <= available:
        return
    estimate = ""
    if fitting > 0:
        estimate = f"Based on the available memory, the estimated maximum model length is {fitting}. "
    raise Fatal(
        f"ValueError: To serve at least one request with the model's max seq len ({max_model_len}), ({gib(needed)} GiB "
        f"KV cache is needed, which is larger than the available KV cache memory ({gib(available)} GiB). {estimate}"
        "Try increasing `gpu_memory_utilization` (which also controls CPU memory on the CPU backend) or decreasing "
        f"`max_model_len` when initializing the engine. {_CONSERVING}",
        ENGINE_KV_CHECK,
    )


def run(channel: Channel, args: Namespace, world: Figures, api_server_pid: int) -> int:
    process.rename("VLLM::EngineCore")
    process.lose_sigterm()
    engine = EngineCore(args, world, channel, api_server_pid)
    where, title = "core.py:1510", "EngineCore failed to start."
    try:
        engine.start()
        channel.send({"ready": True})
        where, title = "core.py:1512", "EngineCore encountered a fatal error."
        process.heed_sigterm(lambda number: _end(engine, number))
        engine.serve()
    except Fatal as failure:
        engine.end_workers()
        engine.log.exception(where, title, failure)
        channel.send({"dead": True})
        raw = Fatal(failure.text, PROCESS_HEAD + failure.frames)
        log.err("\n".join(("Process EngineCore:", *log.traceback_lines(raw), "")))
        return 1
    return 0


def _end(engine: EngineCore, number: int) -> None:
    name = "SIGTERM" if number == 15 else "SIGINT"
    engine.log.info("core.py:1454", f"[shutdown] EngineCore: trigger received signal={name}")
    engine.log.info("core.py:1635", "[shutdown] EngineCore: start mode=abort timeout=0s")
    engine.log.info("core.py:1499", "[shutdown] EngineCore: exiting busy loop")
    engine.end_workers()
    os._exit(0)
