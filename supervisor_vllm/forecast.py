"""`plan`: before any death, which memory a launch would take and whether it fits. Works without a GPU.

The equation is the one by which a death is answered (policy/memory_equation.py); here all of its terms are estimated
from the model's config.json and the size of its files.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from .errors import UserError
from .evidence import device
from .evidence.gpu import GpuReading
from .evidence.model_config import launched_shape, shape_in
from .incident import GpuMemory, Plan, Verdict, to_json
from .policy import fit
from .policy.flags import LENGTH
from .policy.launch_command import LaunchCommand, parse_launch, whole_number
from .policy.levers import Situation
from .policy.memory_equation import Equation
from .policy.model_shape import ModelShape
from .policy.plan import plan_next
from .settings import Settings
from .units import gib


@dataclass(frozen=True)
class Forecast:
    """Bytes on the tightest device; they add up to `total`. `others`: what is taken already. `problem`: why it doesn't
    fit, None where it does. `longest`: the longest length that fits with this batch and utilisation; `concurrency`: how
    many requests of the length asked for are in the KV cache at once."""

    total: int
    others: int
    weights: int
    non_torch: int
    activations: int
    graphs: int
    kv_cache: int
    free: int
    kv_tokens: int
    longest: int
    concurrency: float
    kind: str | None
    problem: str | None
    plan: Plan

    @property
    def fits(self) -> bool:
        return self.problem is None


def forecast(
    command: str,
    settings: Settings,
    *,
    gpu_total: int | None = None,
    gpu_free: int | None = None,
    model_config: str | None = None,
    vllm_version: str | None = None,
    cpu_backend: bool = False,
) -> Forecast:
    """UserError: the model or the device isn't known."""
    launch = parse_launch(command)
    shape = _shape(launch, model_config)
    total, free = (gpu_total, gpu_free) if gpu_total is not None else _tightest(launch, cpu_backend)
    free = total if free is None else free
    numbers = {"total_bytes": total, "free_bytes": free}
    nothing = Verdict("unknown", "likely", "", numbers=numbers)
    situation = Situation(nothing, launch, settings, (), True, vllm_version, shape, cpu_backend)
    terms = fit.equation_of(situation)
    if terms is None:
        raise UserError("--kv-cache-memory-bytes is given: vLLM takes it as it is", hint="leave it out of --command")
    kind, problem = _first_failure(situation, terms)
    return _forecast(situation, terms, kind, problem, _remedy(situation, terms, command, kind, problem))


def _shape(launch: LaunchCommand, model_config: str | None) -> ModelShape:
    if model_config:
        path = Path(model_config)
        shape = shape_in(path, launch)
        if shape is None:
            raise UserError(
                f"{model_config} is no config.json of a language model, nor a directory with one",
                hint="give --model-config the model's config.json",
            )
        return shape
    shape = launched_shape(launch, {**os.environ, **launch.environment}, os.getcwd())
    if shape is None:
        raise UserError(
            f"the model {launch.model or '(none in the command)'} isn't on this machine",
            hint="give its config.json with --model-config FILE",
        )
    return shape


def _tightest(launch: LaunchCommand, cpu_backend: bool) -> tuple[int, int]:
    """(total, free) of the tightest of the devices that the command would use."""
    environment = {**os.environ, **launch.environment}
    reading: GpuReading = device.read_devices(cpu_backend=cpu_backend, environment=environment)
    if not reading.gpus:
        raise UserError(
            f"no GPU can be read here ({reading.problem or 'none is visible'})",
            hint="say what the GPU has: --gpu-total BYTES [--gpu-free BYTES]",
        )
    ranks = (whole_number(launch.get(f"--{name}-parallel-size")) or 1 for name in ("tensor", "pipeline"))
    count = next(ranks) * next(ranks)
    if count > len(reading.gpus):
        raise UserError(
            f"the command wants {count} GPUs, {len(reading.gpus)} are visible",
            hint="say what one of them has: --gpu-total BYTES [--gpu-free BYTES]",
        )
    tightest: GpuMemory = min(reading.gpus[:count], key=lambda gpu: gpu.free_bytes)
    return tightest.total_bytes, tightest.free_bytes


def _first_failure(s: Situation, terms: Equation) -> tuple[str | None, str | None]:
    """(kind, sentence) of the check that fails first, in vLLM's order."""
    budget, size = terms.budget(s.utilization), terms.kv_cache(s.utilization)
    if reason := fit.too_large(terms, s.shape):
        return "gpu_weights", reason
    free = terms.free - terms.others
    if budget > free:
        return "gpu_neighbour", f"{gib(free)} are free, {gib(budget)} are wanted (utilisation {s.utilization:g})"
    if terms.weights + terms.non_torch > terms.free:
        return "gpu_weights", f"weights of {gib(terms.weights)} don't fit into the {gib(terms.free)} that are free"
    if not terms.profile_fits():
        return (
            "gpu_profile",
            f"activations of {gib(terms.activations)} don't fit beside weights of {gib(terms.weights)}",
        )
    if size <= 0:
        return "gpu_kv_none", f"nothing is left for the KV cache of the budget of {gib(budget)}"
    asked = _asked(s, terms)
    needed = fit.request_bytes(s, terms, asked) if asked else None
    if needed and needed > size:
        return "gpu_kv_small", f"one request of {asked} tokens needs {gib(needed)} of KV cache, {gib(size)} are there"
    if not terms.graphs_in_budget and budget + terms.graphs > terms.free:
        return "gpu_graph", f"CUDA graphs of {gib(terms.graphs)} don't fit beside the budget of {gib(budget)}"
    return None, None


def _asked(s: Situation, terms: Equation) -> int | None:
    """`auto` is what fits."""
    asked = fit.asked_length(s)
    if s.launch.get(LENGTH) not in ("auto", "-1"):
        return asked
    fits = fit.longest(s, terms, terms.kv_cache(s.utilization))
    return min(asked, fits) if asked else fits


def _remedy(s: Situation, terms: Equation, command: str, kind: str | None, problem: str | None) -> Plan:
    if kind is None:
        return Plan("none", "it fits", command=command)
    numbers = dict(s.numbers)
    if kind == "gpu_kv_small":
        asked = fit.asked_length(s) or 0
        needed = fit.request_bytes(s, terms, asked)
        numbers |= {
            "max_model_len": asked,
            "kv_needed_bytes": needed,
            "kv_available_bytes": terms.kv_cache(s.utilization),
        }
    verdict = Verdict(kind, "likely", f"{problem}.", numbers=numbers)
    return plan_next(
        verdict, command, s.settings, waited=True, vllm_version=s.version, shape=s.shape, cpu_backend=s.cpu_backend
    )


def _forecast(s: Situation, terms: Equation, kind: str | None, problem: str | None, plan: Plan) -> Forecast:
    size = max(0, terms.kv_cache(s.utilization))
    asked = _asked(s, terms) or 0
    needed = fit.request_bytes(s, terms, asked) if asked else None
    longest = fit.longest(s, terms, size)
    others = terms.total - terms.free
    used = terms.weights + terms.non_torch + terms.activations + terms.graphs + size + others
    return Forecast(
        total=terms.total,
        others=others,
        weights=terms.weights,
        non_torch=terms.non_torch,
        activations=terms.activations,
        graphs=terms.graphs,
        kv_cache=size,
        free=max(0, terms.total - used),
        kv_tokens=int(size / needed * asked) if needed else 0,
        longest=min(longest, s.shape.max_position) if s.shape and s.shape.max_position else longest,
        concurrency=round(size / needed, 2) if needed else 0.0,
        kind=kind,
        problem=problem,
        plan=plan,
    )


def forecast_json(found: Forecast) -> dict[str, object]:
    """The contract of `plan --json`; sizes in bytes."""
    parts = ("total", "others", "weights", "non_torch", "activations", "graphs", "kv_cache", "free")
    plan = to_json(found.plan)
    return {
        "fits": found.fits,
        "kind": found.kind,
        "problem": found.problem,
        "memory": {name: getattr(found, name) for name in parts},
        "kv_tokens": found.kv_tokens,
        "longest_max_model_len": found.longest,
        "concurrency": found.concurrency,
        "plan": {name: plan[name] for name in ("action", "reason", "changes", "command")},
    }
