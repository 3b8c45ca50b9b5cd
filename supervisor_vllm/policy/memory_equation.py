"""vLLM's memory budget on one device, by version, and what a launch would come to. Pure.

    budget     = total × utilisation                     (v1/worker/gpu_worker.py; must be free at the start)
    KV cache   = budget − weights − non-torch − activations − graphs (in the budget from 0.21 on, else outside)
    beside it  = free at the start − budget: graphs (before 0.21), and what a server takes that the profile run didn't

The device is the tightest one. What the log measured (weights, the memory left for the KV cache, graphs) replaces what
is estimated from the model's shape: an estimate is right to some 10 %, a measurement to a hundredth.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from ..incident import Numbers
from .flags import parse_version
from .model_shape import ModelShape

_GIB = 2**30

#: CUDA context, cuBLAS and the like, and NCCL's buffers (0.32, H100 and L4 reports: 0.2 to 0.4, and 0.6 to 1.2 GiB)
_NON_TORCH_BYTES, _NCCL_BYTES = int(0.3 * _GIB), int(0.8 * _GIB)
#: vLLM's CPU backend (0.32, measured): what a worker holds beside weights and KV cache, and its other processes.
_CPU_WORKER_BYTES, _CPU_OTHERS_BYTES = int(0.7 * _GIB), int(1.3 * _GIB)
#: A server takes more than the profile run did: of the device's total (docs: "keep a margin"; #57475: .98 → .97).
SERVING_MARGIN = 0.02
#: But of the KV cache no more than this.
MARGIN_OF_CACHE = 0.2
#: Where nothing fits with that margin, a launch with hardly any is tried before a person is called.
SMALLEST_MARGIN = 0.005
#: The estimate of graphs or activations may be too low by so much.
_ESTIMATE_MARGIN = 1.15


@dataclass(frozen=True)
class Batch:
    """What a launch asks of the profile run."""

    tokens: int
    seqs: int
    eager: bool = False


@dataclass(frozen=True)
class Equation:
    """The terms in bytes, at `batch`. `measured`: the names of those that vLLM measured itself. `others`: what vLLM's
    own other processes take before it looks at what is free (CPU backend)."""

    total: int
    free: int
    weights: int
    non_torch: int
    activations: int
    graphs: int
    batch: Batch
    graphs_in_budget: bool
    shape: ModelShape | None = None
    ranks: int = 1
    measured: frozenset[str] = frozenset()
    others: int = 0
    margin: float = SERVING_MARGIN

    @property
    def is_measured(self) -> bool:
        """vLLM measured what isn't KV cache in this life; only the batch could change it."""
        return {"weights", "activations"} <= self.measured

    def budget(self, utilization: float) -> int:
        return int(self.total * utilization)

    def kv_cache(self, utilization: float, batch: Batch | None = None) -> int:
        """What is left for the KV cache; not above 0: nothing."""
        now = self.at(batch or self.batch)
        counted = now.graphs if now.graphs_in_budget else 0
        return now.budget(utilization) - now.weights - now.non_torch - now.activations - counted

    def utilization_for(self, kv_bytes: int, batch: Batch | None = None) -> float:
        """The utilisation that leaves so much for the KV cache."""
        return (kv_bytes - self.kv_cache(0.0, batch)) / self.total

    def highest_utilization(self, batch: Batch | None = None) -> float:
        """What must stay free beside the budget is left beside it."""
        now = self.at(batch or self.batch)
        outside = 0 if now.graphs_in_budget else int(now.graphs * (1 if "graphs" in now.measured else _ESTIMATE_MARGIN))
        return (now.free - outside - now.others) / now.total - now.margin

    @property
    def serving_margin(self) -> float:
        """No more than a fifth of the KV cache is given away for what may come: of the device's total."""
        bare = dataclasses.replace(self, margin=0.0)
        kv_share = bare.kv_cache(bare.highest_utilization()) / self.total
        return min(SERVING_MARGIN, max(SMALLEST_MARGIN, kv_share * MARGIN_OF_CACHE))

    def profile_fits(self, batch: Batch | None = None) -> bool:
        now = self.at(batch or self.batch)
        activations = now.activations * (1 if "activations" in now.measured else 1.05)
        return now.weights + now.non_torch + int(activations) <= now.free

    def at(self, batch: Batch) -> Equation:
        """With another batch: activations and graphs change as their estimates do."""
        if batch == self.batch:
            return self
        ratio = activation_estimate(self.shape, batch, self.ranks) / max(
            1, activation_estimate(self.shape, self.batch, self.ranks)
        )
        graphs = graph_estimate(self.shape, batch) / max(1, graph_estimate(self.shape, self.batch))
        if self.batch.eager:
            graphs = 0
        return dataclasses.replace(
            self,
            activations=int(self.activations * ratio),
            graphs=int(self.graphs * graphs),
            batch=batch,
            measured=self.measured - {"activations"},
        )


def equation(
    *,
    total: int,
    free: int,
    utilization: float,
    batch: Batch,
    version: str | None,
    ranks: int,
    shape: ModelShape | None,
    numbers: Numbers,
    cpu_backend: bool = False,
) -> Equation | None:
    """From what is known of the failed launch (`numbers`, as a verdict has them) and of the model. None: not enough is
    known to say anything of the weights."""
    measured = set()
    weights = numbers.get("weights_bytes")
    if weights:
        measured.add("weights")
    elif shape:
        weights = shape.weights_bytes // max(1, ranks)
    else:
        return None
    graphs, in_budget = numbers.get("graph_bytes"), cpu_backend or graphs_are_in_budget(version)
    if batch.eager or cpu_backend:
        graphs = 0
    if graphs is not None:
        measured.add("graphs")
    else:
        graphs = graph_estimate(shape, batch)
    non_torch = _NON_TORCH_BYTES + (_NCCL_BYTES if ranks > 1 else 0)
    activations = activation_estimate(shape, batch, ranks)
    if cpu_backend:  # the budget is less than what the worker holds by then: no peak is counted
        non_torch, activations = _CPU_WORKER_BYTES, 0
    if shape and "weights" not in measured:  # "Model loading took" has it in it
        non_torch += shape.rotary_bytes
    available = numbers.get("kv_available_bytes")
    if available is not None:
        measured.add("activations")
        rest = int(total * utilization) - available - weights - (graphs if in_budget else 0)
        # which part of the rest is which isn't said; both don't go below what any vLLM takes
        non_torch = min(non_torch, max(0, rest))
        activations = rest - non_torch
    return Equation(
        total=total,
        free=free,
        weights=weights,
        non_torch=non_torch,
        activations=activations,
        graphs=graphs,
        batch=batch,
        graphs_in_budget=in_budget,
        shape=shape,
        ranks=ranks,
        measured=frozenset(measured),
        others=_CPU_OTHERS_BYTES if cpu_backend else 0,
    )


def graphs_are_in_budget(version: str | None) -> bool:
    """From 0.20.2 on (VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS is on by default); an unknown version: no."""
    parsed = parse_version(version)
    return parsed is not None and parsed >= (0, 20, 2)


def activation_estimate(shape: ModelShape | None, batch: Batch, ranks: int) -> int:
    """Peak of the profile run: a batch of tokens through the widest layer, or the logits of all sequences."""
    if shape is None:
        return int(batch.tokens * 131072 * 2 + 0.2 * _GIB)
    forward = batch.tokens * (shape.hidden_size * 6 + shape.intermediate_size * 3 // max(1, ranks)) * 2
    logits = min(batch.seqs, batch.tokens) * shape.vocabulary * 8
    return int(max(forward, logits) + 0.15 * _GIB)


def graph_estimate(shape: ModelShape | None, batch: Batch) -> int:
    """Capture sizes are 1, 2, 4 and then each 8th up to twice the sequences, 512 at most (config/compilation.py)."""
    if batch.eager:
        return 0
    layers = shape.full_layers + shape.window_layers if shape else 40
    sizes = 3 + min(2 * batch.seqs, 512) / 8
    return int((0.2 + sizes * layers * 2e-4) * _GIB)
