"""Random machines and models on which a vLLM dies: what the policy is measured against (bench_policy.py).

The truth here is *another* equation than the one that decides: each term has a hidden error of up to 10 %, the
allocator rounds in its own way, and all that a policy learns is what vLLM of a random version writes into its log.
Shapes are those of published config.json files. Sizes in bytes.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

from supervisor_vllm.policy.flags import LENGTH, SEQS, TOKENS, UTILIZATION, default_utilization, parse_version
from supervisor_vllm.policy.launch_command import LaunchCommand, parse_launch, whole_number

GIB = 2**30
VERSIONS = ("0.9.2", "0.10.2", "0.11.2", "0.14.1", "0.18.1", "0.21.0", "0.27.1", "0.32.0")
GPUS_GB = (8, 12, 16, 24, 32, 40, 48, 80, 96, 141, 192)


@dataclass(frozen=True)
class Shape:
    """`kv_heads` 0: one latent of `head_size` a token (MLA). `window`: of those layers that `window_every` leaves."""

    name: str
    parameters: float
    layers: int
    kv_heads: int
    head_size: int
    hidden: int
    intermediate: int
    vocabulary: int
    max_position: int
    weight_bytes: float = 2.0
    window: int = 0
    full_every: int = 1


SHAPES = (
    Shape("Qwen2.5-0.5B", 0.494e9, 24, 2, 64, 896, 4864, 151936, 32768),
    Shape("Qwen2.5-7B", 7.62e9, 28, 4, 128, 3584, 18944, 152064, 131072),
    Shape("Qwen2.5-14B-AWQ", 14.8e9, 48, 8, 128, 5120, 13824, 152064, 131072, 0.62),
    Shape("Qwen2.5-32B", 32.8e9, 64, 8, 128, 5120, 27648, 152064, 131072),
    Shape("Qwen2.5-72B", 72.7e9, 80, 8, 128, 8192, 29568, 152064, 131072),
    Shape("Qwen3-8B", 8.19e9, 36, 8, 128, 4096, 12288, 151936, 40960),
    Shape("Qwen3-30B-A3B", 30.5e9, 48, 4, 128, 2048, 6144, 151936, 40960),
    Shape("Qwen3-235B-A22B-FP8", 235e9, 94, 4, 128, 4096, 12288, 151936, 40960, 1.02),
    Shape("Llama-3.1-8B", 8.03e9, 32, 8, 128, 4096, 14336, 128256, 131072),
    Shape("Llama-3.1-70B-AWQ", 70.6e9, 80, 8, 128, 8192, 28672, 128256, 131072, 0.58),
    Shape("Mistral-7B", 7.25e9, 32, 8, 128, 4096, 14336, 32768, 32768),
    Shape("Mistral-Small-24B", 23.6e9, 40, 8, 128, 5120, 32768, 131072, 32768),
    Shape("DeepSeek-V2-Lite", 15.7e9, 27, 0, 576, 2048, 10944, 102400, 163840),
    Shape("DeepSeek-V3", 671e9, 61, 0, 576, 7168, 18432, 129280, 163840, 1.02),
    Shape("gemma-2-9b", 9.24e9, 42, 8, 256, 3584, 14336, 256000, 8192, window=4096, full_every=2),
    Shape("gemma-3-27b", 27.4e9, 62, 16, 128, 5376, 21504, 262208, 131072, window=1024, full_every=6),
)


@dataclass(frozen=True)
class World:
    """One device (the tightest), a model on it, and the user's command. `errors`: hidden factors of the terms."""

    seed: int
    shape: Shape
    version: str
    total: int
    tensor_parallel: int
    neighbours: int
    reserved: int
    runtime_extra: int
    errors: dict[str, float]
    command: str

    @property
    def free_at_start(self) -> int:
        return self.total - self.reserved - self.neighbours


@dataclass(frozen=True)
class Asked:
    utilization: float
    length: int
    tokens: int
    seqs: int
    eager: bool
    kv_bytes: int | None
    auto_length: bool = False


@dataclass(frozen=True)
class Outcome:
    """`failed`: the step that failed, None: it serves. `kv_tokens` × `length` is the capacity."""

    failed: str | None
    kv_tokens: int = 0
    length: int = 0
    numbers: dict[str, int] | None = None

    @property
    def capacity(self) -> int:
        return self.kv_tokens * self.length


def random_world(seed: int) -> World:
    rng = random.Random(seed)
    shape = rng.choice(SHAPES)
    weights = shape.parameters * shape.weight_bytes
    fitting = [
        (gb, tp)
        for gb in GPUS_GB
        for tp in (1, 2, 4, 8)
        if 0.05 < weights / tp / (gb * 1e9) < 1.15 and (shape.kv_heads or 8) * 4 % tp == 0
    ]
    gb, tp = rng.choice(fitting)
    total = int(gb * 1e9 * rng.uniform(0.97, 1.03))
    version = rng.choice(VERSIONS)
    flags = []
    if rng.random() < 0.6:
        flags.append(f"--gpu-memory-utilization {rng.choice([0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.97, 0.98])}")
    if rng.random() < 0.6:
        flags.append(
            f"--max-model-len {min(shape.max_position, rng.choice([4096, 8192, 16384, 32768, 65536, 131072]))}"
        )
    if rng.random() < 0.4:
        flags.append(f"--max-num-seqs {rng.choice([16, 64, 128, 256, 512, 1024])}")
    if rng.random() < 0.4:
        flags.append(f"--max-num-batched-tokens {rng.choice([2048, 4096, 8192, 16384, 32768, 65536])}")
    if rng.random() < 0.1:
        flags.append("--enforce-eager")
    if tp > 1:
        flags.append(f"--tensor-parallel-size {tp}")
    return World(
        seed=seed,
        shape=shape,
        version=version,
        total=total,
        tensor_parallel=tp,
        neighbours=int(total * rng.uniform(0.05, 0.45)) if rng.random() < 0.15 else 0,
        reserved=int(total * rng.uniform(0.005, 0.012) + rng.uniform(0.2, 0.5) * GIB),
        runtime_extra=int(total * rng.uniform(0.0, 0.03)),
        errors={name: rng.uniform(0.9, 1.1) for name in ("weights", "non_torch")}
        | {"hidden": rng.uniform(4, 9), "intermediate": rng.uniform(2, 4), "logits": rng.uniform(6, 12)}
        | {"graph": rng.uniform(0.6, 1.5)},
        command=" ".join(["vllm serve", f"/models/{shape.name}", *flags]),
    )


def asked(world: World, launch: LaunchCommand) -> Asked:
    """The user's flags and vLLM's defaults (0.32 engine/arg_utils.py)."""
    large = world.total >= 70 * GIB
    tokens = whole_number(launch.get(TOKENS)) or (16384 if world.total >= 160 * GIB else 8192 if large else 2048)
    return Asked(
        utilization=float(launch.get(UTILIZATION) or default_utilization(world.version)),
        length=whole_number(launch.get(LENGTH)) or world.shape.max_position,
        tokens=tokens,
        seqs=whole_number(launch.get(SEQS)) or (1024 if large else 256),
        eager=launch.get("--enforce-eager") == "true",
        kv_bytes=whole_number(launch.get("--kv-cache-memory-bytes")),
        auto_length=launch.get(LENGTH) == "auto",
    )


def outcome(world: World, wanted: Asked) -> Outcome:
    """What the launch comes to: vLLM's checks in their order."""
    weights, fixed = _weights(world), _non_torch(world)
    activation = _activation(world, wanted)
    graphs = _graphs(world, wanted)
    free = world.free_at_start
    requested = math.ceil(world.total * wanted.utilization)
    known = {"requested": requested, "weights": weights, "fixed": fixed, "activation": activation, "graphs": graphs}
    if wanted.seqs > wanted.tokens:
        return Outcome("arguments", numbers=known)
    if wanted.kv_bytes is None and free < requested:
        return Outcome("free_check", numbers=known)
    if weights + fixed * 0.3 > free:
        return Outcome("weights", numbers={**known, "tried": int(world.shape.hidden * world.shape.intermediate * 2)})
    if weights + fixed + activation > free:
        return Outcome("profile", numbers={**known, "tried": activation // 2})
    counted = graphs if parse_version(world.version) >= (0, 21) else 0  # type: ignore[operator]
    kv = wanted.kv_bytes or requested - weights - fixed - activation - counted
    known["kv"] = kv
    if kv <= 0:
        return Outcome("kv_none", numbers=known)
    if wanted.auto_length:  # 0.14.1 on
        fits = min(wanted.length, longest(world, kv))
        wanted = replace(wanted, length=fits, auto_length=False)
        if not fits:
            return Outcome("kv_none", numbers=known)
    needed = request_bytes(world, wanted.length)
    known["needed"] = needed
    if kv < needed:
        return Outcome("kv_small", numbers={**known, "estimate": longest(world, kv)})
    tokens = int(kv / needed * wanted.length)
    # the profile run's cached blocks are given back but for what is fragmented
    held = weights + fixed + int(activation * 0.15) + kv
    if held > free:
        return Outcome("kv_alloc", numbers={**known, "tried": kv // world.shape.layers, "held": held})
    if held + graphs > free:
        return Outcome("graph", numbers={**known, "tried": int(graphs * 0.1), "held": held, "tokens": tokens})
    if held + graphs + activation * 0.85 + world.runtime_extra > free:
        return Outcome("runtime", tokens, wanted.length, {**known, "tried": activation // 3, "tokens": tokens})
    return Outcome(None, tokens, wanted.length, {**known, "tokens": tokens})


def _weights(world: World) -> int:
    return int(world.shape.parameters * world.shape.weight_bytes / world.tensor_parallel * world.errors["weights"])


def _non_torch(world: World) -> int:
    nccl = 0.7 if world.tensor_parallel > 1 else 0.0
    return int((0.25 + nccl) * GIB * world.errors["non_torch"])


def _activation(world: World, wanted: Asked) -> int:
    shape = world.shape
    inner = shape.intermediate / world.tensor_parallel
    forward = wanted.tokens * (shape.hidden * world.errors["hidden"] + inner * world.errors["intermediate"]) * 2
    logits = wanted.seqs * shape.vocabulary * world.errors["logits"]
    return int(math.ceil((max(forward, logits) + 0.1 * GIB) / 2**21) * 2**21)


def _graphs(world: World, wanted: Asked) -> int:
    if wanted.eager:
        return 0
    sizes = 3 + min(2 * wanted.seqs, 512) / 8
    return int((0.12 + sizes * (20 + world.shape.layers) * 1.6e-4) * GIB * world.errors["graph"])


def request_bytes(world: World, length: int) -> int:
    """KV cache of one request, in whole blocks of 16 tokens."""
    shape = world.shape
    blocks = math.ceil(length / 16) * 16
    if not shape.kv_heads:
        return int(blocks * shape.layers * shape.head_size * 2)
    per_layer = 2 * max(1, shape.kv_heads // world.tensor_parallel) * shape.head_size * 2
    full = math.ceil(shape.layers / shape.full_every)
    windowed = min(blocks, shape.window + 2048) if shape.window else 0
    return int(per_layer * (full * blocks + (shape.layers - full) * windowed))


def longest(world: World, kv: int) -> int:
    low, high = 0, world.shape.max_position
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if request_bytes(world, middle) <= kv else (low, middle - 1)
    return low


def best(world: World, *, context_first: bool) -> Outcome | None:
    """By trying everything: the user's batch as large as it can stay, then the largest capacity. None: nothing fits.

    Within what the operator wished: utilisation goes above his own value only where nothing is left for the KV cache,
    or (context first) as far as his length needs it.
    """
    start = asked(world, parse_launch(world.command))
    limit = _wished_utilization(world, start, context_first)
    halves = sorted(((a, b) for a in range(8) for b in range(8)), key=lambda pair: (sum(pair), pair))
    found: Outcome | None = None
    cost = 0
    for a, b in halves:
        tokens, seqs = start.tokens >> a, start.seqs >> b
        if (found and a + b > cost) or not tokens or not seqs or seqs > tokens:
            continue
        for percent in range(50, limit + 1):
            wanted = Asked(percent / 100, 1, tokens, seqs, start.eager, None)
            probe = outcome(world, wanted)
            if probe.failed is not None or probe.numbers is None:
                continue
            length = min(start.length, longest(world, probe.numbers["kv"]))
            if length < SHORTEST:
                continue
            result = outcome(world, replace(wanted, length=length))
            if result.failed is None and (found is None or result.capacity > found.capacity):
                found, cost = result, a + b
    return found


#: A server for less is of no use to anybody.
SHORTEST = 256


def _wished_utilization(world: World, start: Asked, context_first: bool) -> int:
    """In hundredths."""
    own = min(95, int(start.utilization * 100 + 1e-6))
    kind = outcome(world, start).failed
    if kind not in ("kv_none", "kv_small", "profile") or (kind == "kv_small" and not context_first):
        return own
    if kind == "kv_small":
        for percent in range(own, 96):
            if outcome(world, replace(start, utilization=percent / 100)).failed is None:
                return percent
    return 95


# -- what vLLM writes --------------------------------------------------------------------------------------------------


def log_of(world: World, wanted: Asked, result: Outcome) -> list[str]:
    known = result.numbers or {}
    step = result.failed
    lines = [
        f"(EngineCore_DP0 pid=71) INFO 05-01 12:00:00 [core.py:77] Initializing a V1 LLM engine "
        f"(v{world.version}) with config: model='/models/{world.shape.name}', max_seq_len={wanted.length}"
    ]
    if step == "arguments":
        return [*lines, _raised("ValueError", "max_num_batched_tokens must be greater than or equal to max_num_seqs")]
    if step == "free_check":
        return lines + _failed(
            "init_device",
            f"ValueError: Free memory on device cuda:0 ({_gib(world.free_at_start)}/{_gib(world.total)} GiB) on "
            f"startup is less than desired GPU memory utilization ({wanted.utilization}, {_gib(known['requested'])} "
            "GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes.",
        )
    lines.append(_info("gpu_model_runner.py:50", f"Starting to load model /models/{world.shape.name}..."))
    if step == "weights":
        return lines + _failed("load_model", _oom(world, known["tried"], world.free_at_start - known["tried"] // 3))
    lines.append(_info("gpu_model_runner.py:51", f"Model loading took {_gib(known['weights'], 4)} GiB and 9.1 seconds"))
    if step == "profile":
        held = known["weights"] + known["fixed"] + known["activation"] - known["tried"]
        return lines + _failed(
            "determine_available_memory", _oom(world, known["tried"], min(held, world.free_at_start))
        )
    lines.append(_info("gpu_worker.py:76", f"Available KV cache memory: {_gib(known['kv'])} GiB"))
    if step == "kv_none":
        return lines + _failed(
            "_check_enough_kv_cache_memory",
            "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when "
            "initializing the engine.",
        )
    if step == "kv_small":
        return lines + _failed(
            "_check_enough_kv_cache_memory",
            f"ValueError: To serve at least one request with the models's max seq len ({wanted.length}), "
            f"({_gib(known['needed'])} GiB KV cache is needed, which is larger than the available KV cache memory "
            f"({_gib(known['kv'])} GiB). Based on the available memory, the estimated maximum model length is "
            f"{known['estimate']}. Try increasing `gpu_memory_utilization` or decreasing `max_model_len` when "
            "initializing the engine.",
        )
    if step == "kv_alloc":
        return lines + _failed(
            "initialize_kv_cache_tensors", _oom(world, known["tried"], world.free_at_start - known["tried"] // 2)
        )
    lines.append(_info("kv_cache_utils.py:23", f"GPU KV cache size: {known['tokens']:,} tokens"))
    if step == "graph":
        return lines + _failed(
            "capture_model", _oom(world, known["tried"], max(known["held"], world.free_at_start - known["tried"] // 2))
        )
    lines += [
        _info("gpu_model_runner.py:60", f"Graph capturing finished in 9 secs, took {_gib(known['graphs'])} GiB"),
        "INFO:     Application startup complete.",
    ]
    if step == "runtime":
        lines.append("(EngineCore_DP0 pid=71) ERROR 05-01 12:09:00 [core.py:90] EngineCore encountered a fatal error.")
        return lines + _failed("execute_model", _oom(world, known["tried"], world.free_at_start - known["tried"] // 2))
    return lines


def _info(place: str, text: str) -> str:
    return f"(EngineCore_DP0 pid=71) INFO 05-01 12:00:01 [{place}] {text}"


def _raised(name: str, text: str) -> str:
    return f"(EngineCore_DP0 pid=71) ERROR 05-01 12:00:02 [core.py:90] {name}: {text}"


def _failed(function: str, error: str) -> list[str]:
    head = "(EngineCore_DP0 pid=71) ERROR 05-01 12:00:02 [core.py:90] "
    return [
        head + "Traceback (most recent call last):",
        head + f'  File "/v/vllm/v1/worker/gpu_worker.py", line 1, in {function}',
        head + error,
    ]


def _oom(world: World, tried: int, held: int) -> str:
    """Torch's sentence; `held` by this process of the device."""
    free = max(0, world.free_at_start - held)
    return (
        f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {_size(tried)}. GPU 0 has a total capacity of "
        f"{_size(world.total)} of which {_size(free)} is free. Including non-PyTorch memory, this process has "
        f"{_size(held)} memory in use. Of the allocated memory {_size(int(held * 0.95))} is allocated by PyTorch, and "
        f"{_size(int(held * 0.02))} is reserved by PyTorch but unallocated."
    )


def _gib(size: int, digits: int = 2) -> str:
    return f"{size / GIB:.{digits}f}"


def _size(size: int) -> str:
    return f"{_gib(size)} GiB" if size >= GIB else f"{size / 2**20:.2f} MiB"
