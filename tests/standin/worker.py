"""The Worker: holds the GPU memory, and dies where vLLM 0.32's memory equation says so (v1/worker/gpu_worker.py)."""

from __future__ import annotations

import math
import mmap
import os
import threading
import time
from argparse import Namespace
from pathlib import Path

from . import figures, gpu, log
from .faults import TEXTS, strike
from .figures import GIB, Figures
from .frames import WORKER
from .log import Fatal, Log, gib
from .process import Channel, heed_sigterm, lose_sigterm, rename


class Worker:
    def __init__(self, args: Namespace, world: Figures, pids: Namespace, rank: int) -> None:
        self.args, self.world, self.pids, self.rank = args, world, pids, rank
        self.log = Log(process_name(args, rank))
        self.device = gpu.own_device(rank)
        self.held = 0
        self.free_at_start = self.requested = self.consumed = 0
        self.peak = self.graphs = self.graph_estimate = self.kv_bytes = 0
        self.completions = 0
        self.touched: list[bytearray] = []
        self.pinned: list[mmap.mmap] = []

    # ── memory ──
    def _hold(self, more_bytes: int) -> None:
        self.held += more_bytes
        self.device.hold(os.getpid(), self.held)

    def _require(self, needed: int, phase: str) -> None:
        """OOM in `phase` unless so much is free."""
        free = self.device.free_bytes
        if needed > free:
            raise Fatal(self._oom_text(needed, free), WORKER[phase])

    def _oom_text(self, needed: int, free: int) -> str:
        others = {pid: held for pid, held in self.device.holders().items() if pid != os.getpid()}
        return log.out_of_memory(
            device=self.rank,
            tried=needed,
            total=self.device.total_bytes,
            free=free,
            own=self.held,
            pytorch=max(0, self.held - self.world.context_bytes),
            others=others,
        )

    def _fault(self, where: str, phase: str) -> None:
        for fault in self.world.faults if self.rank == 0 else ():
            if fault.where == where and figures.claim(Path(self.args.model), fault):
                strike(fault, phase, self.pids)

    # ── phases, in vLLM's order ──
    def init_device(self) -> None:
        self._fault("startup", "init_device")
        if self.world.context_bytes > self.device.free_bytes:
            # no context yet: the driver's words, not torch's
            raise Fatal(TEXTS["out_of_memory"], WORKER["init_device"][:-2])
        self._hold(self.world.context_bytes)
        total, util = self.device.total_bytes, self.args.gpu_memory_utilization
        self.free_at_start = self.device.free_bytes
        self.requested = math.ceil(total * util)
        if self.free_at_start < self.requested:
            raise Fatal(
                f"ValueError: Free memory on device cuda:{self.rank} ({gib(self.free_at_start)}/{gib(total)} GiB) on "
                f"startup is less than desired GPU memory utilization ({util}, {gib(self.requested)} GiB). Decrease "
                "GPU memory "
                "utilization or reduce GPU memory used by other processes.",
                WORKER["init_device"],
            )

    def load_model(self) -> None:
        weights = max(0, self.world.weights_bytes - int(self.args.cpu_offload_gb * GIB))
        weights //= self.args.tensor_parallel_size
        self.log.info("gpu_model_runner.py:5040", f"Starting to load model {self.args.model}...")
        self.log.info(
            "cuda.py:512",
            "Using FLASH_ATTN attention backend out of potential backends: ['FLASH_ATTN', 'TRITON_ATTN'].",
        )
        self._fault("loading", "load_model")
        begun = time.monotonic()
        free = self.device.free_bytes
        if weights > free:
            self._hold(free - min(free, 64 * figures.MIB))
            self._load_failure(self._oom_text(448 * figures.MIB, self.device.free_bytes))
        log.err("\nLoading safetensors checkpoint shards:   0% Completed | 0/1 [00:00<?, ?it/s]\n")
        time.sleep(self.world.load_seconds)
        self._touch(self.world.touch_bytes_on_load)
        log.err("\nLoading safetensors checkpoint shards: 100% Completed | 1/1 [00:00<00:00, 190.00it/s]\n\n")
        self._hold(weights)
        took = time.monotonic() - begun
        self.log.info("default_loader.py:501", f"Loading weights took {took:.2f} seconds")
        self.log.info(
            "gpu_model_runner.py:5150", f"Model loading took {gib(weights)} GiB memory and {took:.6f} seconds"
        )

    def _load_failure(self, text: str) -> None:
        original = text.partition(": ")[2]
        self.log.error(
            "gpu_model_runner.py:5147",
            "Failed to load model - not enough GPU memory. Try lowering --gpu-memory-utilization to free memory for "
            "weights, increasing --tensor-parallel-size, or using --quantization. See "
            "https://docs.vllm.ai/en/latest/configuration/conserving_memory/ for more tips. "
            f"(original error: {original})",
        )
        raise Fatal(text, WORKER["load_model"])

    def _activation_bytes(self) -> int:
        """The peak of a forward pass over a full batch."""
        return (
            self.world.activation_bytes_per_token * self.args.max_num_batched_tokens
            + self.world.activation_bytes_per_seq * self.args.max_num_seqs
        )

    def determine_available_memory(self) -> int:
        """Bytes for the KV cache; may be negative."""
        self._fault("profile", "profile_run")
        activations = self._activation_bytes()
        self._require(activations, "profile_run")
        sampler = self.world.sampler_bytes_per_seq * self.args.max_num_seqs
        if sampler > self.device.free_bytes:
            raise Fatal(
                "RuntimeError: CUDA out of memory occurred when warming up sampler with "
                f"{self.args.max_num_seqs} dummy requests. Please try lowering `max_num_seqs` or "
                "`gpu_memory_utilization` when initializing the engine.",
                WORKER["sampler"],
            )
        self.peak = max(activations, sampler)
        self.graphs = 0 if self.args.enforce_eager else self.world.graph_bytes
        self.graph_estimate = 0 if self.args.enforce_eager else self.world.graph_estimate
        free = self.device.free_bytes
        if free > self.free_at_start:
            raise Fatal(
                f"AssertionError: Error in memory profiling. Initial free memory {gib(self.free_at_start)} GiB, "
                "current "
                f"free memory {gib(free)} GiB. This happens when other processes sharing the same container release "
                "GPU "
                "memory while vLLM is profiling during initialization. To fix this, ensure consistent GPU memory "
                "allocation or isolate vLLM in its own container.",
                WORKER["memory_profiling"],
            )
        if self.args.kv_cache_memory_bytes is not None:
            return self._reserved_kv(self.args.kv_cache_memory_bytes)
        # vLLM takes what others took meanwhile for its own: two engines that start at once end below zero.
        self.consumed = self.free_at_start - free + self.world.context_bytes
        available = self.requested - self.consumed - self.peak - self.graph_estimate
        if self.graph_estimate:
            self.log.info(
                "gpu_model_runner.py:6475", f"Estimated CUDA graph memory: {self.graph_estimate / GIB:.2f} GiB total"
            )
        self.log.info("gpu_worker.py:760", f"Available KV cache memory: {gib(available)} GiB")
        if self.graph_estimate:
            self._say_graph_estimate()
        return available

    def _reserved_kv(self, kv_bytes: int) -> int:
        self.log.info(
            "gpu_worker.py:670",
            f"Initial free memory {gib(self.free_at_start)} GiB, reserved {gib(kv_bytes)} GiB memory for KV Cache as "
            "specified by kv_cache_memory_bytes config and skipped memory profiling. This does not respect the "
            "gpu_memory_utilization config. Only use kv_cache_memory_bytes config when you want manual control of KV "
            "cache memory size. If OOM'ed, check the difference of initial free memory between the current run and the "
            "previous run where kv_cache_memory_bytes is suggested and update it correspondingly.",
        )
        return kv_bytes

    def _say_graph_estimate(self) -> None:
        util = self.args.gpu_memory_utilization
        share = self.graph_estimate / self.device.total_bytes
        self.log.info(
            "gpu_worker.py:774",
            "CUDA graph memory profiling is enabled (default since v0.21.0). The current "
            f"--gpu-memory-utilization={util:.4f} is equivalent to "
            f"--gpu-memory-utilization={round(util - share, 4):.4f} "
            "without CUDA graph memory profiling. To maintain the same effective KV cache size as before, increase "
            f"--gpu-memory-utilization to {min(round(util + share, 4), 1.0):.4f}. To disable, set "
            "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=0.",
        )

    def initialize_from_config(self, kv_bytes: int) -> None:
        self._fault("kv_cache", "kv_alloc")
        self._require(kv_bytes, "kv_alloc")
        self.kv_bytes = kv_bytes
        self._hold(kv_bytes)
        if self.args.kv_offloading_size:
            self._pin(int(self.args.kv_offloading_size * figures.GIB) // self.args.tensor_parallel_size)

    def compile_or_warm_up_model(self) -> None:
        if self.args.enforce_eager:
            return
        self.log.info("gpu_model_runner.py:6535", "Rank 0: Torch profiler disabled for CUDA graph capture")
        begun = time.monotonic()
        log.err("\rCapturing CUDA graphs (mixed prefill-decode, PIECEWISE):   0%|          | 0/51 [00:00<?, ?it/s]")
        self._fault("graph", "capture_model")
        if self.graphs > self.device.free_bytes:
            log.err("\n")
            self._require(self.graphs, "capture_model")
        self._hold(self.graphs)
        log.err("\rCapturing CUDA graphs (mixed prefill-decode, PIECEWISE): 100%|██████████| 51/51 [00:00<00:00]\n")
        self.log.info(
            "gpu_model_runner.py:6582",
            f"Graph capturing finished in {time.monotonic() - begun:.0f} secs, took {self.graphs / GIB:.2f} GiB",
        )
        if self.args.kv_cache_memory_bytes is None:
            self._suggest_kv_bytes()

    def _suggest_kv_bytes(self) -> None:
        margin = 150 * figures.MIB
        used = self.consumed + self.peak + self.graph_estimate + self.graphs
        to_requested, to_limit = self.requested - used - margin, self.free_at_start - used - margin
        self.log.info(
            "gpu_worker.py:1034",
            f"Free memory on device ({gib(self.free_at_start)}/{gib(self.device.total_bytes)} GiB) on startup. Desired "
            f"GPU memory utilization is ({self.args.gpu_memory_utilization}, {gib(self.requested)} GiB). Actual "
            "usage is "
            f"{gib(self.consumed)} GiB for consumed memory (weights + non-torch), "
            f"{gib(self.peak + self.graph_estimate)} "
            f"GiB for peak activation, and {gib(self.graphs)} GiB for CUDAGraph memory. Replace gpu_memory_utilization "
            f"config with `--kv-cache-memory={to_requested}` ({gib(to_requested)} GiB) to fit into requested "
            "memory, or "
            f"`--kv-cache-memory={to_limit}` ({gib(to_limit)} GiB) to fully utilize gpu memory. Current kv cache "
            "memory "
            f"in use is {gib(self.kv_bytes)} GiB.",
        )

    def execute_model(self) -> None:
        self.completions += 1
        if self.completions == 1:
            self._fault("first_completion", "execute_model")
        for fault in self.world.faults if self.rank == 0 else ():
            if (
                fault.where == "nth_completion"
                and fault.completion == self.completions
                and figures.claim(Path(self.args.model), fault)
            ):
                strike(fault, "execute_model", self.pids)
        self._touch(self.world.touch_bytes_on_completion)
        time.sleep(self.world.completion_seconds)
        # The caching allocator has given the profile run's peak back: a full batch needs it again, and what the
        # profile run didn't see on top.
        extra = self.world.runtime_peak_bytes + self.world.runtime_bytes_per_token * self.args.max_num_batched_tokens
        self._require(self._activation_bytes() + extra if extra else 0, "execute_model")

    def strike(self, where: str) -> None:
        self._fault(where, "execute_model")

    def _pin(self, size_bytes: int) -> None:
        """Host memory as CUDA pins it: shared, and all of it taken at once."""
        block = mmap.mmap(-1, size_bytes)
        block[::4096] = b"\1" * len(range(0, size_bytes, 4096))
        self.pinned.append(block)

    def _touch(self, size_bytes: int) -> None:
        """Really take host memory, page by page."""
        if size_bytes:
            block = bytearray(size_bytes)
            block[::4096] = b"\1" * len(range(0, size_bytes, 4096))
            self.touched.append(block)


def process_name(args: Namespace, rank: int) -> str:
    return f"Worker_TP{rank}" if args.tensor_parallel_size > 1 else "Worker"


def run(channel: Channel, args: Namespace, world: Figures, pids: Namespace, death_pipe: int, rank: int) -> int:
    rename(f"VLLM::{process_name(args, rank)}")
    lose_sigterm()
    worker = Worker(args, world, pids, rank)
    threading.Thread(target=_exit_with_parent, args=(death_pipe, worker), daemon=True).start()
    try:
        worker.init_device()
        worker.load_model()
    except Fatal as failure:
        worker.log.exception("multiproc_executor.py:953", "WorkerProc failed to start.", failure)
        worker.device.release(os.getpid())
        channel.send({"failed": failure.text})
        return 1
    channel.send({"ready": True})
    while (request := channel.receive()) is not None:
        if request["method"] == "serving":
            # The executor ends the Worker; a group-wide SIGTERM must not make it look like a death.
            heed_sigterm(lambda _number: None)
            continue
        try:
            result = getattr(worker, str(request["method"]))(*request.get("args", ()))  # type: ignore[misc]
        except Fatal as failure:
            worker.log.exception("multiproc_executor.py:1063", "WorkerProc hit an exception.", failure)
            channel.send({"error": failure.text.partition(": ")[2]})
        else:
            channel.send({"result": result})
    return 0


def _exit_with_parent(death_pipe: int, worker: Worker) -> None:
    os.read(death_pipe, 1)
    worker.log.info("multiproc_executor.py:843", "Parent process exited, terminating worker queues")
    worker.device.release(os.getpid())
    os._exit(0)
