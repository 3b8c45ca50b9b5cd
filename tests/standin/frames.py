"""The frames of vLLM 0.32's tracebacks, by the place where it dies. Paths are relative to site-packages."""

from __future__ import annotations

from typing import NamedTuple

SITE = "/opt/vllm/lib/python3.11/site-packages"
PYTHON = "/usr/lib/python3.11"


class Frame(NamedTuple):
    path: str
    line: int
    function: str
    source: str


def _frames(*rows: tuple[str, int, str, str]) -> tuple[Frame, ...]:
    return tuple(Frame(*row) for row in rows)


_EXECUTOR = "vllm/v1/executor/multiproc_executor.py"
_CORE = "vllm/v1/engine/core.py"
_GPU_WORKER = "vllm/v1/worker/gpu_worker.py"
_RUNNER = "vllm/v1/worker/gpu_model_runner.py"
_LINEAR = "vllm/model_executor/layers/linear.py"
_QWEN = "vllm/model_executor/models/qwen2.py"
_ENTRY = "vllm/entrypoints/launchers/api_server/entry.py"

_WORKER_START = _frames(
    (_EXECUTOR, 920, "worker_main", "worker = WorkerProc(*args, **kwargs)"),
    ("vllm/tracing/otel.py", 175, "sync_wrapper", "return func(*args, **kwargs)"),
)
_WORKER_CALL = _frames(
    (_EXECUTOR, 1055, "_execute_worker_rpc", "output = func(*args, **kwargs)"),
    ("torch/utils/_contextlib.py", 124, "decorate_context", "return func(*args, **kwargs)"),
)
_PROFILE = _frames(
    (
        _GPU_WORKER,
        693,
        "determine_available_memory",
        "self.model_runner.profile_run(randomize_inputs=self.randomize_dummy_inputs)",
    ),
)
_FORWARD = _frames(
    ("torch/nn/modules/module.py", 1789, "_call_impl", "return forward_call(*args, **kwargs)"),
    (_QWEN, 507, "forward", "hidden_states = self.model("),
    (_QWEN, 310, "forward", "hidden_states = self.mlp(hidden_states)"),
    (_QWEN, 112, "forward", "gate_up, _ = self.gate_up_proj(x)"),
)

#: Frames of the Worker, by phase.
WORKER = {
    "init_device": _WORKER_START
    + _frames(
        (_EXECUTOR, 679, "__init__", "self.worker.init_device()"),
        ("vllm/v1/worker/worker_base.py", 350, "init_device", "self.worker.init_device()  # type: ignore"),
        (_GPU_WORKER, 535, "init_device", "self.requested_memory = request_memory("),
        ("vllm/v1/worker/utils.py", 762, "request_memory", "raise ValueError("),
    ),
    "load_model": _WORKER_START
    + _frames(
        (_EXECUTOR, 687, "__init__", "self.worker.load_model()"),
        (_GPU_WORKER, 594, "load_model", "self.model_runner.load_model(load_dummy_weights=load_dummy_weights)"),
        (_RUNNER, 5148, "load_model", "raise e"),
        (_RUNNER, 5057, "load_model", "self.model = model or model_loader.load_model("),
        ("vllm/model_executor/model_loader/base_loader.py", 53, "load_model", "model = initialize_model("),
        (_LINEAR, 519, "__init__", "self.quant_method.create_weights("),
        (_LINEAR, 193, "create_weights", "data=torch.empty("),
        ("torch/utils/_device.py", 122, "__torch_function__", "return func(*args, **kwargs)"),
    ),
    "profile_run": _WORKER_CALL
    + _PROFILE
    + _frames(
        (_RUNNER, 6193, "profile_run", "hidden_states, last_hidden_states = self._dummy_run("),
        (_RUNNER, 5843, "_dummy_run", "outputs = self.model("),
    )
    + _FORWARD,
    "memory_profiling": _WORKER_CALL
    + _frames((_GPU_WORKER, 719, "determine_available_memory", "assert init_free_memory >= free_gpu_memory, (")),
    "sampler": _WORKER_CALL
    + _PROFILE
    + _frames(
        (_RUNNER, 6200, "profile_run", "output = self._dummy_sampler_run(last_hidden_states)"),
        (_RUNNER, 5990, "_dummy_sampler_run", "raise RuntimeError("),
    ),
    "kv_alloc": _WORKER_CALL
    + _frames(
        (_GPU_WORKER, 894, "initialize_from_config", "self.model_runner.initialize_kv_cache("),
        (_RUNNER, 7102, "initialize_kv_cache", "kv_caches = self.initialize_kv_cache_tensors("),
        (_RUNNER, 7000, "initialize_kv_cache_tensors", "kv_caches = allocate_kv_cache("),
        (
            "vllm/v1/worker/utils.py",
            596,
            "allocate_kv_cache",
            "buf = torch.zeros(buf_size, dtype=torch.int8, device=device)",
        ),
    ),
    "capture_model": _WORKER_CALL
    + _frames(
        (_GPU_WORKER, 962, "compile_or_warm_up_model", "cuda_graph_memory_bytes = self.model_runner.capture_model()"),
        (_RUNNER, 6548, "capture_model", "self._capture_cudagraphs("),
        (_RUNNER, 6679, "_capture_cudagraphs", "self._warmup_and_capture("),
        (_RUNNER, 6624, "_warmup_and_capture", "self._dummy_run("),
        (_RUNNER, 5843, "_dummy_run", "outputs = self.model("),
        ("vllm/compilation/cuda_graph.py", 320, "__call__", "output = self.runnable(*args, **kwargs)"),
    ),
    "execute_model": _WORKER_CALL
    + _frames(
        ("vllm/v1/worker/worker_base.py", 370, "execute_model", "return self.worker.execute_model(scheduler_output)"),
        (_GPU_WORKER, 1328, "execute_model", "output = self.model_runner.execute_model("),
        (_RUNNER, 4207, "execute_model", "model_output = self._model_forward("),
        (_RUNNER, 3645, "_model_forward", "return self.model("),
    )
    + _FORWARD,
}

_ENGINE_START = _frames(
    (_CORE, 1482, "run_engine_core", "engine_core = EngineCoreProc(*args, engine_index=dp_rank, **kwargs)"),
    ("vllm/tracing/otel.py", 175, "sync_wrapper", "return func(*args, **kwargs)"),
    (_CORE, 1194, "__init__", "super().__init__("),
)
_KV_CACHES = _ENGINE_START + _frames(
    (_CORE, 157, "__init__", "kv_cache_config = self._initialize_kv_caches(vllm_config)"),
    ("vllm/tracing/otel.py", 175, "sync_wrapper", "return func(*args, **kwargs)"),
)
_RPC = _frames(
    (_EXECUTOR, 455, "collective_rpc", "return future if non_block else future.result()"),
    (_EXECUTOR, 99, "result", "return super().result()"),
    (f"{PYTHON}/concurrent/futures/_base.py", 449, "result", "return self.__get_result()"),
    (f"{PYTHON}/concurrent/futures/_base.py", 401, "__get_result", "raise self._exception"),
    (_EXECUTOR, 103, "_wait_for_response", "response = self.aggregate(self.get_response())"),
)
_WORKER_FAILED = _frames((_EXECUTOR, 444, "get_response", "raise RuntimeError("))
_CANCELLED = _frames(
    (_EXECUTOR, 440, "get_response", "status, result = mq.dequeue(timeout=dequeue_timeout)"),
    (
        "vllm/distributed/device_communicators/shm_broadcast.py",
        971,
        "dequeue",
        "with self.acquire_read(timeout, indefinite) as buf:",
    ),
    (f"{PYTHON}/contextlib.py", 137, "__enter__", "return next(self.gen)"),
    (
        "vllm/distributed/device_communicators/shm_broadcast.py",
        867,
        "acquire_read",
        'raise RuntimeError("cancelled")',
    ),
)
_DETERMINE = _KV_CACHES + _frames(
    (
        _CORE,
        315,
        "_initialize_kv_caches",
        "available_gpu_memory = self.model_executor.determine_available_memory()",
    ),
    (
        "vllm/v1/executor/abstract.py",
        163,
        "determine_available_memory",
        'return self.collective_rpc("determine_available_memory")',
    ),
)
_FROM_CONFIG = _KV_CACHES + _frames(
    (_CORE, 377, "_initialize_kv_caches", "self.model_executor.initialize_from_config(kv_cache_configs)"),
    (
        "vllm/v1/executor/abstract.py",
        137,
        "initialize_from_config",
        'self.collective_rpc("initialize_from_config", args=(kv_cache_configs,))',
    ),
)
_WARM_UP = _KV_CACHES + _frames(
    (_CORE, 379, "_initialize_kv_caches", "self.model_executor.compile_or_warm_up_model()"),
    (
        "vllm/v1/executor/abstract.py",
        141,
        "compile_or_warm_up_model",
        "compilation_times: list[CompilationTimes] = self.collective_rpc(",
    ),
)
_BUSY_LOOP = _frames(
    (_CORE, 1496, "run_engine_core", "engine_core.run_busy_loop()"),
    (
        "vllm/v1/fault_tolerance/engine_core_sentinel.py",
        178,
        "run_with_fault_tolerance",
        "busy_loop_func(self)",
    ),
)
_STEP = _BUSY_LOOP + _frames(
    (_CORE, 1555, "run_busy_loop", "self._process_engine_step()"),
    (_CORE, 1606, "_process_engine_step", "outputs, model_executed = self.step_fn()"),
    (_CORE, 674, "step", "model_output = future.result()"),
)

#: Frames of EngineCore when it waits for the Worker in a phase: the Worker raised, or the Worker is gone.
ENGINE_WORKER_FAILED = {
    "determine_available_memory": _DETERMINE + _RPC + _WORKER_FAILED,
    "initialize_from_config": _FROM_CONFIG + _RPC + _WORKER_FAILED,
    "compile_or_warm_up_model": _WARM_UP + _RPC + _WORKER_FAILED,
    "execute_model": _STEP + _RPC[1:] + _WORKER_FAILED,
}
ENGINE_WORKER_GONE = {
    "determine_available_memory": _DETERMINE + _RPC + _CANCELLED,
    "initialize_from_config": _FROM_CONFIG + _RPC + _CANCELLED,
    "compile_or_warm_up_model": _WARM_UP + _RPC + _CANCELLED,
}
ENGINE_INIT = _ENGINE_START + _frames(
    (_CORE, 144, "__init__", "self.model_executor = executor_class(vllm_config)"),
    (_EXECUTOR, 116, "__init__", "super().__init__(vllm_config)"),
    ("vllm/tracing/otel.py", 175, "sync_wrapper", "return func(*args, **kwargs)"),
    ("vllm/v1/executor/abstract.py", 126, "__init__", "self._init_executor()"),
    (_EXECUTOR, 215, "_init_executor", "self.workers = WorkerProc.wait_for_ready(unready_workers)"),
    (_EXECUTOR, 815, "wait_for_ready", "raise e from None"),
)
ENGINE_KV_CHECK = _KV_CACHES + _frames(
    (_CORE, 326, "_initialize_kv_caches", "kv_cache_configs = get_kv_cache_configs("),
    ("vllm/v1/core/kv_cache_utils.py", 1132, "get_kv_cache_configs", "_check_enough_kv_cache_memory("),
    ("vllm/v1/core/kv_cache_utils.py", 1010, "_check_enough_kv_cache_memory", "raise ValueError("),
)
ENGINE_EXECUTOR_FAILED = _BUSY_LOOP + _frames(
    (_CORE, 1551, "run_busy_loop", "self._process_input_queue()"),
    (_CORE, 1589, "_process_input_queue", "self._handle_client_request(*req)"),
    (_CORE, 1702, "_handle_client_request", 'raise RuntimeError("Executor failed.")'),
)
PROCESS_HEAD = _frames(
    (f"{PYTHON}/multiprocessing/process.py", 314, "_bootstrap", "self.run()"),
    (f"{PYTHON}/multiprocessing/process.py", 108, "run", "self._target(*self._args, **self._kwargs)"),
    (_CORE, 1514, "run_engine_core", "raise e"),
)
API_OUTPUT = _frames(
    ("vllm/v1/engine/async_llm.py", 849, "output_handler", "outputs = await engine_core.get_output_async()"),
    ("vllm/v1/engine/core_client.py", 1235, "get_output_async", "raise self._format_exception(outputs) from None"),
)
API_MAIN = _frames(
    ("/opt/vllm/bin/vllm", 6, "<module>", "sys.exit(main())"),
    ("vllm/entrypoints/cli/main.py", 120, "main", "args.dispatch_function(args)"),
    ("vllm/entrypoints/cli/serve.py", 156, "cmd", "uvloop.run(run_server(args))"),
    ("uvloop/__init__.py", 92, "run", "return runner.run(wrapper())"),
    (f"{PYTHON}/asyncio/runners.py", 118, "run", "return self._loop.run_until_complete(task)"),
    ("uvloop/__init__.py", 48, "wrapper", "return await main"),
)
API_ENGINE_START = API_MAIN + _frames(
    (_ENTRY, 177, "run_server", "await run_server_worker(listen_address, sock, args, **uvicorn_kwargs)"),
    (_ENTRY, 195, "run_server_worker", "async with build_async_engine_client("),
    ("vllm/v1/engine/async_llm.py", 184, "__init__", "self.engine_core = EngineCoreClient.make_async_mp_client("),
    ("vllm/v1/engine/core_client.py", 682, "__init__", "with launch_core_engines("),
    ("vllm/v1/engine/utils.py", 1351, "launch_core_engines", "wait_for_engine_startup("),
    ("vllm/v1/engine/utils.py", 1431, "wait_for_engine_startup", "raise RuntimeError("),
)
API_PORT = API_MAIN + _frames(
    (_ENTRY, 176, "run_server", "listen_address, sock = setup_server(args, reuse_port=False)"),
    ("vllm/tracing/otel.py", 175, "sync_wrapper", "return func(*args, **kwargs)"),
    (
        "vllm/entrypoints/launchers/launcher.py",
        398,
        "setup_server",
        "sock = create_server_socket(sock_addr, reuse_port=reuse_port)",
    ),
    ("vllm/entrypoints/launchers/launcher.py", 348, "create_server_socket", "sock.bind(addr)"),
)
API_CONFIG = API_MAIN + _frames(
    (_ENTRY, 177, "run_server", "await run_server_worker(listen_address, sock, args, **uvicorn_kwargs)"),
    ("vllm/engine/arg_utils.py", 2240, "create_engine_config", "model_config = self.create_model_config()"),
    ("vllm/engine/arg_utils.py", 1955, "create_model_config", "return ModelConfig("),
    (
        "pydantic/_internal/_dataclasses.py",
        121,
        "__init__",
        "s.__pydantic_validator__.validate_python(ArgsKwargs(args, kwargs), self_instance=s)",
    ),
)
