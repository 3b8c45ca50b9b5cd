"""The ways in which real_deaths.py breaks vLLM: one table. Its truth comes from what is done, never from a log."""

from __future__ import annotations

import signal
from dataclasses import dataclass, replace

import deaths_deeds as deeds
from deaths_deeds import ENGINE, WORKER, Deed
from deaths_run import ARGUMENTS, LOADING, MIB, UP, breaking

Pairs = tuple[tuple[str, str], ...]

#: bfloat16 on a CPU with AMX that the host keeps back kills the worker at its first completion; float32 doesn't use it.
SERVE = ("--dtype", "float32")
LOAD_WEIGHTS = "vllm.model_executor.model_loader.default_loader:DefaultModelLoader.load_weights"
EXECUTE = "vllm.v1.worker.cpu_worker:CPUWorker.execute_model"
SCHEDULE = "vllm.v1.core.sched.scheduler:Scheduler.schedule"
GENERATE = "vllm.v1.engine.async_llm:AsyncLLM.generate"
GROW = "self.kept = [*getattr(self, 'kept', []), b'x' * (8 << 20)]"
ENGINE_INIT = "vllm.v1.engine.core:EngineCoreProc.__init__"
SLOW_LOAD = breaking(LOAD_WEIGHTS, "import time; time.sleep(30)")
ALLOCATE = "import torch; self.more = torch.empty(2**48, dtype=torch.uint8)"
CRASH: tuple[str, ...] = ("engine_crash",)
#: SIGSEGV and the like, sent by hand to a child: vLLM's log has no word of the number.
FATAL: tuple[str, ...] = ("engine_crash", "killed")
BAD_MODEL: tuple[str, ...] = ("bad_model",)
BAD_ARGUMENTS: tuple[str, ...] = ("bad_arguments",)


@dataclass(frozen=True)
class Way:
    """`kind`: what is right, the best first. `spoil` comes before the start, `strike` after it; `shell` runs before
    vLLM in its process; `memory_bytes` and `tasks` are limits of a cgroup that holds all of it from the start.
    `untold`: wrong, but no line of the log and no exit status tells it from the truth."""

    name: str
    how: str
    kind: tuple[str, ...]
    oom: bool = False
    phase: str | None = None
    arguments: tuple[str, ...] = ()
    environment: Pairs = ()
    utilization: str = "0.15"
    model: str | None = None
    shell: str = ""
    memory_bytes: int | None = None
    tasks: int | None = None
    spoil: Deed | None = None
    strike: Deed | None = None
    untold: tuple[str, ...] = ()


def flag(name: str, how: str, *arguments: str, kind: tuple[str, ...] = BAD_ARGUMENTS) -> Way:
    return Way(name, how, kind, arguments=arguments)


def model(name: str, how: str, spoil: Deed, *, phase: str | None = "weights", **more: object) -> Way:
    return replace(Way(name, how, BAD_MODEL, phase=phase, spoil=spoil), **more)  # type: ignore[arg-type]


def struck(name: str, how: str, kind: tuple[str, ...], who: str, number: int, moment: str) -> Way:
    way = Way(name, how, kind, phase="runtime" if moment == UP else None, strike=deeds.kill(who, number, moment))
    return replace(way, arguments=SERVE, environment=SLOW_LOAD if moment == LOADING else ())


def fault(name: str, how: str, kind: tuple[str, ...], action: str, *, oom: bool = False) -> Way:
    """In the worker's 4th forward of a completion."""
    environment = breaking(EXECUTE, action, nth=4)
    return Way(name, how, kind, oom, "runtime", SERVE, environment, strike=deeds.serve)


def address_space(name: str, kib: int, *untold: str) -> Way:
    limit = f"ulimit -v {kib}"
    return Way(f"address_space_{name}", limit, ("host_alloc",), oom=True, shell=limit, untold=untold)


ARGUMENT_WAYS = (
    flag("json_argument", "half a JSON object as --compilation-config", "--compilation-config", '{"mode": '),
    flag(
        "batched_tokens_small",
        "fewer batched tokens than sequences",
        "--max-num-batched-tokens",
        "16",
        "--max-num-seqs",
        "64",
    ),
    flag("chat_template_missing", "a chat template file that isn't there", "--chat-template", "/srv/no/such.jinja"),
    flag("host_foreign", "an address that isn't this host's", "--host", "203.0.113.9", kind=("bad_arguments", *CRASH)),
    Way(
        "environment_value",
        "a word where VLLM_CPU_KVCACHE_SPACE wants a number",
        BAD_ARGUMENTS,
        environment=(("VLLM_CPU_KVCACHE_SPACE", "much"),),
    ),
    Way(
        "lora_missing",
        "a LoRA adapter that isn't there",
        ("bad_model", "bad_arguments"),
        arguments=("--enable-lora", "--lora-modules", "own=/srv/no/such-lora"),
    ),
)

MODEL_WAYS = (
    model(
        "architecture_word",
        "a known model_type with an unknown class",
        deeds.config(architectures=["Qwen2ForNothing"]),
        phase="startup",
    ),
    model("vocabulary_mismatch", "a larger vocabulary than the weights'", deeds.config(vocab_size=5000)),
    model("tokenizer_broken", "half a tokenizer.json", deeds.cut("tokenizer.json", 4000), phase="startup"),
    Way(
        "tokenizer_missing",
        "--tokenizer names a directory that isn't there",
        ("bad_model", "bad_arguments"),
        arguments=("--tokenizer", "/srv/models/no-tokenizer"),
    ),
)

#: Root without the right to read what isn't for root.
NOBODY = 'set -- setpriv --inh-caps=-dac_override,-dac_read_search --bounding-set=-dac_override,-dac_read_search "$@"'

LIMIT_WAYS = (
    model("weights_forbidden", "no permission on model.safetensors", deeds.forbid("model.safetensors"), shell=NOBODY),
    model(
        "config_forbidden", "no permission on config.json", deeds.forbid("config.json"), phase="startup", shell=NOBODY
    ),
    model(
        "directory_forbidden",
        "no permission on the model's directory",
        deeds.forbid("."),
        phase="startup",
        shell=NOBODY,
    ),
    Way("files_limit", "ulimit -n 24", CRASH, shell="ulimit -n 24"),
    Way("tasks_limit", "a pids cgroup with room for 12 threads", CRASH, tasks=12),
    Way(
        "disk_full_cache",
        "the compile cache is on a file system without room",
        CRASH,
        shell="mount -t tmpfs -o size=64k tmpfs /mnt",
        environment=(
            ("VLLM_CACHE_ROOT", "/mnt/vllm"),
            ("TORCHINDUCTOR_CACHE_DIR", "/mnt/inductor"),
            ("TRITON_CACHE_DIR", "/mnt/triton"),
        ),
        arguments=("--no-enforce-eager",),
    ),
    Way("shm_readonly", "/dev/shm can't be written", CRASH, shell="mount -t tmpfs -o ro tmpfs /dev/shm"),
)

MEMORY_WAYS = (
    Way(
        "two_at_once",
        "another vLLM serves already, and both together want more than there is",
        ("gpu_neighbour",),
        oom=True,
        phase="startup",
        utilization="0.85",
        spoil=deeds.first_of_two,
    ),
    Way(
        "neighbour_while_loading",
        "a neighbour takes the memory between the check at the start and the KV cache",
        ("gpu_unstable", "gpu_neighbour"),
        oom=True,
        phase="kv_cache",
        utilization="0.7",
        environment=breaking(LOAD_WEIGHTS, "import time; time.sleep(12)"),
        strike=deeds.neighbour_while_loading,
    ),
    Way(
        "kv_small_space",
        "VLLM_CPU_KVCACHE_SPACE=1 (GiB), --max-model-len 2000000",
        ("gpu_kv_small",),
        oom=True,
        phase="kv_cache",
        arguments=("--max-model-len", "2000000"),
        environment=(("VLLM_CPU_KVCACHE_SPACE", "1"),),
        spoil=deeds.config(max_position_embeddings=4_000_000),
    ),
    Way(
        "kv_small_blocks",
        "--num-gpu-blocks-override below one request",
        ("gpu_kv_small",),
        oom=True,
        phase="kv_cache",
        arguments=("--num-gpu-blocks-override", "3"),
    ),
    Way(
        "kv_over_node",
        "--kv-cache-memory-bytes beyond the whole node",
        ("gpu_kv_alloc",),
        oom=True,
        phase="kv_cache",
        arguments=("--kv-cache-memory-bytes", "900G"),
    ),
    Way(
        "weights_too_large",
        "a vocabulary whose embedding alone is larger than the host's memory",
        ("gpu_weights", "host_alloc"),
        oom=True,
        phase="weights",
        spoil=deeds.config(vocab_size=800_000_000),
    ),
    address_space("torch", 250000),
    address_space("import", 700000, "engine_crash"),
    address_space("module", 900000),
    address_space("server", 1300000, "engine_crash"),
    address_space("child", 1700000),
    address_space("engine", 2050000),
    Way(
        "address_space_kv",
        "ulimit -v 3000000, a KV cache of 2 GiB",
        ("host_alloc", "gpu_kv_alloc"),
        oom=True,
        phase="kv_cache",
        arguments=("--kv-cache-memory-bytes", "2G"),
        shell="ulimit -v 3000000",
    ),
    Way(
        "shm_second",
        "a /dev/shm with room for the first of two buffers",
        ("shm_full",),
        oom=True,
        shell="mount -t tmpfs -o size=200m tmpfs /dev/shm",
    ),
    Way(
        "shm_leftovers",
        "a /dev/shm of 512 MiB, full of another program's files",
        ("shm_full",),
        oom=True,
        shell="mount -t tmpfs -o size=512m tmpfs /dev/shm; head -c 500M /dev/zero > /dev/shm/psm_left",
    ),
    Way(
        "memcg_engine",
        "EngineCore alone meets a limit at its import",
        ("host_oom_kill",),
        oom=True,
        strike=deeds.engine_alone,
    ),
    Way(
        "memcg_weights",
        "a memory limit that the weights go over, read eagerly (mapped, the page cache only thrashes)",
        ("host_oom_kill",),
        oom=True,
        phase="weights",
        memory_bytes=1700 * MIB,
        spoil=deeds.big_weights,
        arguments=("--kv-cache-memory-bytes", "50M", "--safetensors-load-strategy", "eager"),
    ),
    Way(
        "memcg_serving_worker",
        "the worker meets a limit while it serves",
        ("host_oom_kill",),
        oom=True,
        phase="runtime",
        arguments=SERVE,
        environment=breaking(EXECUTE, GROW),
        strike=deeds.shrink(WORKER),
    ),
    Way(
        "memcg_serving_engine",
        "EngineCore meets a limit while it serves",
        ("host_oom_kill",),
        oom=True,
        phase="runtime",
        arguments=SERVE,
        environment=breaking(SCHEDULE, GROW),
        strike=deeds.shrink(ENGINE),
    ),
    Way(
        "memcg_serving_leader",
        "the API server meets a limit while it serves",
        ("host_oom_kill",),
        oom=True,
        phase="runtime",
        arguments=SERVE,
        environment=breaking(GENERATE, GROW),
        strike=deeds.shrink("leader"),
    ),
    Way(
        "memcg_leak",
        "each forward keeps 64 MiB, under a limit of 2200 MiB",
        ("host_oom_kill",),
        oom=True,
        phase="runtime",
        arguments=(*SERVE, "--kv-cache-memory-bytes", "100M"),
        environment=breaking(EXECUTE, "self.kept = [*getattr(self, 'kept', []), b'x' * (64 << 20)]"),
        memory_bytes=2200 * MIB,
        strike=deeds.serve,
    ),
)

SIGNAL_WAYS = (
    struck("segv_worker_serving", "SIGSEGV to the worker while serving", FATAL, WORKER, signal.SIGSEGV, UP),
    struck("bus_worker_serving", "SIGBUS to the worker while serving", FATAL, WORKER, signal.SIGBUS, UP),
    struck("abrt_worker_serving", "SIGABRT to the worker while serving", FATAL, WORKER, signal.SIGABRT, UP),
    struck("bus_worker_loading", "SIGBUS to the worker while loading", FATAL, WORKER, signal.SIGBUS, LOADING),
    struck("abrt_engine_serving", "SIGABRT to EngineCore while serving", FATAL, ENGINE, signal.SIGABRT, UP),
    struck("segv_leader_serving", "SIGSEGV to the API server while serving", FATAL, "leader", signal.SIGSEGV, UP),
    struck("term_leader_serving", "SIGTERM to the API server while serving", ("stopped",), "leader", 15, UP),
    struck("term_leader_starting", "SIGTERM to the API server at its start", ("stopped",), "leader", 15, ARGUMENTS),
    struck("int_leader_serving", "SIGINT to the API server while serving", ("stopped",), "leader", 2, UP),
    struck("hup_leader_serving", "SIGHUP to the API server", ("stopped", "killed"), "leader", 1, UP),
    struck("term_worker_serving", "SIGTERM to the worker", ("killed", *CRASH), WORKER, 15, UP),
    struck("term_engine_serving", "SIGTERM to EngineCore", ("killed", *CRASH), ENGINE, 15, UP),
    Way(
        "kill_worker_stranger",
        "the kernel kills a stranger of the worker's name for memory, and the worker is killed by hand",
        ("killed",),
        phase="runtime",
        arguments=SERVE,
        strike=deeds.stranger_then_kill,
    ),
    Way(
        "kill_worker_quoting",
        "users' prompts quote memory errors at log level DEBUG, and the worker is killed by hand",
        ("killed",),
        phase="runtime",
        arguments=(*SERVE, "--enable-log-requests"),
        environment=(("VLLM_LOGGING_LEVEL", "DEBUG"),),
        strike=deeds.quote_then_kill,
    ),
)

ENDED: tuple[str, ...] = ("engine_crash", "unknown")

FAULT_WAYS = (
    Way(
        "exit_loading",
        "the worker ends itself while loading",
        ENDED,
        environment=breaking(LOAD_WEIGHTS, "import os; os._exit(3)"),
        untold=("killed",),
    ),
    Way(
        "exit_engine",
        "EngineCore ends itself at its start, status 0",
        ENDED,
        environment=breaking(ENGINE_INIT, "import os; os._exit(0)"),
    ),
    fault("exit_serving", "the worker ends itself in a forward", ENDED, "import os; os._exit(1)"),
    Way(
        "raise_loading",
        "an exception while the weights are loaded",
        CRASH,
        environment=breaking(LOAD_WEIGHTS, "raise RuntimeError('the plugin broke')"),
    ),
    fault(
        "raise_serving", "an exception in a forward", CRASH, "raise RuntimeError('index 7 is out of bounds: size 4')"
    ),
    Way(
        "raise_scheduler",
        "an assertion in the scheduler",
        CRASH,
        phase="runtime",
        arguments=SERVE,
        environment=breaking(SCHEDULE, "assert not self.running", nth=4),
        strike=deeds.serve,
    ),
    fault("segv_forward", "a forward reads from address 0", FATAL, "import ctypes; ctypes.string_at(0)"),
    fault(
        "illegal_forward",
        "a forward meets an instruction that the CPU doesn't have",
        FATAL,
        "import os, signal; os.kill(os.getpid(), signal.SIGILL)",
    ),
    replace(
        fault(
            "hang_forward",
            "a forward never comes back, vLLM's own limit of 8 s ends it",
            ("engine_crash", "hung"),
            "import time; time.sleep(300)",
        ),
        environment=(
            *breaking(EXECUTE, "import time; time.sleep(300)", nth=4),
            ("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", "8"),
        ),
    ),
    fault("allocate_serving", "a forward asks torch for 256 TiB", ("host_alloc", "gpu_runtime"), ALLOCATE, oom=True),
    fault(
        "bytes_serving", "a forward asks Python for 4 EiB", ("host_alloc",), "self.more = bytearray(2**62)", oom=True
    ),
    Way(
        "allocate_loading",
        "torch is asked for 256 TiB while the weights are loaded",
        ("host_alloc", "gpu_weights"),
        oom=True,
        phase="weights",
        environment=breaking(LOAD_WEIGHTS, ALLOCATE),
    ),
)

WAYS = (*ARGUMENT_WAYS, *MODEL_WAYS, *LIMIT_WAYS, *MEMORY_WAYS, *SIGNAL_WAYS, *FAULT_WAYS)
