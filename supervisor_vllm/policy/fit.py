"""The least loss with which a launch fits, by vLLM's memory equation. Pure.

What is lost in this order, as vLLM's own advice has it: utilisation moves first (it costs nothing while memory is
free), then the batch is halved as little as possible, then the length is shortened to what is left. One plan may change
several flags, so that one restart is enough.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ..incident import Change, Numbers
from ..units import gib
from . import levers
from .flags import LENGTH, SEQS, TOKENS, UTILIZATION, parse_version
from .launch_command import whole_number
from .levers import Situation
from .memory_equation import Batch, Equation, equation
from .model_shape import ModelShape, kv_bytes, longest_request

#: A request of fewer tokens serves nobody; one of an eighth of what was asked for is worth a smaller batch.
_SMALLEST_REQUEST_TOKENS, _USEFUL_REQUEST_TOKENS = 256, 2048
#: Of a measured KV cache all but vLLM's rounding is counted on. An estimated one may hold a tenth more or less: the
#: length isn't shortened for what may fit all the same, and once it must be, then by enough.
_MEASURED_SHARE = 0.995
_ESTIMATED_AT_MOST, _ESTIMATED_AT_LEAST = 1.1, 0.9
_HALVINGS = 7
#: vLLM's log says sizes to a hundredth of a GiB; from such a size on that is less than a hundredth of it.
_ROUNDING_BYTES, _EXACT_BYTES = int(0.005 * 2**30), int(0.5 * 2**30)


def equation_of(s: Situation) -> Equation | None:
    """None: the device's memory isn't known, or neither the model's shape nor what it takes beside its weights."""
    total, free = s.total_bytes, free_at_start(s.numbers)
    if not total or free is None or levers.kv_bytes(s):
        return None
    terms = equation(
        total=total,
        free=free,
        utilization=s.utilization,
        batch=Batch(s.tokens, s.seqs, s.launch.get("--enforce-eager") == "true"),
        version=s.version,
        ranks=_ranks(s),
        shape=s.shape,
        numbers=s.numbers,
        cpu_backend=s.cpu_backend,
    )
    return terms if terms and (s.shape or terms.is_measured) else None


def free_at_start(numbers: Numbers) -> int | None:
    """Torch says what is free at the failure, beside what the process holds already."""
    free = numbers.get("free_bytes")
    return None if free is None else free + (numbers.get("process_bytes") or 0)


def _ranks(s: Situation) -> int:
    return whole_number(s.launch.get("--tensor-parallel-size")) or 1


Target = Callable[[Batch], float]


def least_loss(s: Situation, terms: Equation, target: Target, why: str) -> tuple[Change, ...] | None:
    """The changes with which it fits, none of them where it fits as it is. None: nothing fits.

    `target`: the utilisation that is wanted with a batch; it is kept inside what settings and earlier attempts allow.
    """
    for smallest in _smallest_requests(s):
        for batch in _batches(s):
            if not terms.profile_fits(batch):
                continue
            step = _utilization_step(terms.at(batch), target(batch))
            utilization = _allowed_utilization(s, target(batch), step)
            length = _length(s, terms.at(batch), utilization, smallest)
            if length is None:
                continue
            moved = levers.utilization_to(s, utilization, why, step)
            return (*((moved,) if moved else ()), *_batch(s, batch), *length)
    return None


def _smallest_requests(s: Situation) -> tuple[int, ...]:
    asked, floor = asked_length(s) or 0, max(s.settings.max_model_len_min, 1)
    return smallest_useful_request(s), max(floor, min(asked, _SMALLEST_REQUEST_TOKENS))


def smallest_useful_request(s: Situation) -> int:
    asked = asked_length(s) or 0
    return max(s.settings.max_model_len_min, 1, min(asked, max(_USEFUL_REQUEST_TOKENS, asked // 8)))


def _batches(s: Situation) -> Iterator[Batch]:
    """The batch as it is, then halved in tokens or sequences, the smaller loss first."""
    eager = s.launch.get("--enforce-eager") == "true"
    pairs = sorted(((a, b) for a in range(_HALVINGS) for b in range(_HALVINGS)), key=lambda pair: (sum(pair), pair[1]))
    for tokens_halved, seqs_halved in pairs:
        tokens, seqs = s.tokens >> tokens_halved, s.seqs >> seqs_halved
        if tokens_halved and (s.pinned(TOKENS) or tokens < max(s.settings.max_num_batched_tokens_min, 1)):
            continue
        if seqs_halved and (s.pinned(SEQS) or seqs < max(s.settings.max_num_seqs_min, 1)):
            continue
        if tokens_halved and not levers.tokens_to(s, tokens, ""):
            continue
        if seqs <= tokens:
            yield Batch(tokens, seqs, eager)


def _batch(s: Situation, batch: Batch) -> tuple[Change, ...]:
    found: dict[str, Change] = {}
    if batch.tokens < s.tokens:
        why = "a smaller batch needs less memory beside the KV cache"
        found |= {change.flag: change for change in levers.tokens_to(s, batch.tokens, why)}
    if batch.seqs < s.seqs and (fewer := levers.seqs_to(s, batch.seqs, "fewer sequences: smaller logits and graphs")):
        found[fewer.flag] = fewer
    return tuple(found.values())


def _allowed_utilization(s: Situation, wanted: float, step: float) -> float:
    if s.pinned(UTILIZATION):
        return s.utilization
    lowest, highest = levers.utilization_bounds(s)
    return min(max(levers.rounded_down(wanted, step), lowest), max(highest, lowest))


def _utilization_step(terms: Equation, wanted: float) -> float:
    """A whole hundredth, as people write it, unless that is more than a twentieth of the KV cache."""
    return levers.STEP if terms.budget(levers.STEP) <= terms.kv_cache(wanted) / 20 else levers.FINE_STEP


def _length(s: Situation, terms: Equation, utilization: float, smallest: int) -> tuple[Change, ...] | None:
    """What shortens the length to what fits, nothing where it fits as it is. None: not even the smallest request that
    is worth a launch fits."""
    size, asked = terms.kv_cache(utilization), asked_length(s)
    if size <= 0:
        return None
    if asked is None:
        return ()
    measured = terms.is_measured
    needed = request_bytes(s, terms, asked)
    at_most = size * _MEASURED_SHARE - _ROUNDING_BYTES if measured else size * _ESTIMATED_AT_MOST
    if needed is None or needed <= at_most:
        return ()
    counted = int(size * (_MEASURED_SHARE if measured else _ESTIMATED_AT_LEAST)) - _ROUNDING_BYTES
    fits = longest(s, terms, counted)
    if fits < smallest:
        return None
    if not measured and _auto_fits(s):
        return _changes(levers.change(s, LENGTH, "auto", "vLLM takes the longest length that fits"))
    return _changes(levers.length_to(s, fits // 16 * 16, f"what fits into {gib(size)} of KV cache"))


def longest(s: Situation, terms: Equation, size: int) -> int:
    """The longest request whose KV cache fits into `size` bytes, in tokens; 0 where that isn't known."""
    if s.shape and s.shape.kv_is_exact:
        value, bare = cache_value_bytes(s), int(size / _measured_factor(s, terms.ranks))
        return longest_request(s.shape, bare, terms.batch.tokens, ranks=terms.ranks, value_bytes=value)
    per_token = _measured_per_token(s.numbers)
    return int(size / per_token) if per_token else 0


def _changes(change: Change | None) -> tuple[Change, ...] | None:
    return (change,) if change else None


def _auto_fits(s: Situation) -> bool:
    """`auto` (0.14.1 on) takes the model's own length where it fits: the same as no flag, and no more than that."""
    parsed = parse_version(s.version)
    known = parsed is not None and parsed >= (0, 14, 1)
    return known and s.launch.get(LENGTH) is None and not s.pinned(LENGTH) and s.settings.max_model_len_min <= 1


def asked_length(s: Situation) -> int | None:
    """Of the command; else what vLLM said, or the model's own."""
    return (
        s.launch.max_model_len or s.numbers.get("max_model_len") or (s.shape.max_position if s.shape else None) or None
    )


def request_bytes(s: Situation, terms: Equation, length: int) -> int | None:
    """KV cache of one request of that length."""
    if s.shape and s.shape.kv_is_exact:
        value, factor = cache_value_bytes(s), _measured_factor(s, terms.ranks)
        return int(factor * kv_bytes(s.shape, length, terms.batch.tokens, ranks=terms.ranks, value_bytes=value))
    per_token = _measured_per_token(s.numbers)
    return int(length * per_token) if per_token else None


def cache_value_bytes(s: Situation) -> float:
    """0: as the model's own."""
    return 1.0 if (s.launch.get("--kv-cache-dtype") or "auto").startswith("fp8") else 0.0


def _measured_factor(s: Situation, ranks: int) -> float:
    """What one request really takes, by vLLM's own lines, of what the model's shape says: the shape gives the curve,
    the measurement its height. Only from figures that rounding leaves exact to a hundredth."""
    length, per_token = s.numbers.get("max_model_len"), _measured_per_token(s.numbers)
    if not (s.shape and length and per_token) or length * per_token < _EXACT_BYTES:
        return 1.0
    said = kv_bytes(s.shape, length, s.tokens, ranks=ranks, value_bytes=cache_value_bytes(s))
    factor = length * per_token / max(1, said)
    return factor if 0.5 < factor < 2 else 1.0


def _measured_per_token(numbers: Numbers) -> float | None:
    """Bytes of KV cache a token, as vLLM's own lines have it."""
    size, tokens = numbers.get("kv_available_bytes"), numbers.get("kv_tokens")
    if not (size and tokens and size > 0):
        size, tokens = numbers.get("kv_needed_bytes"), numbers.get("max_model_len")
    return size / tokens if size and tokens else None


def too_large(terms: Equation, shape: ModelShape | None) -> str | None:
    """The arithmetic where the weights alone don't fit: no launch can work."""
    sure = "weights" in terms.measured or (shape is not None and shape.weights_are_exact)
    needed = terms.weights + terms.non_torch
    if needed <= terms.total * (1.0 if sure else 1.15):
        return None
    ranks = terms.ranks
    while ranks < 64 and terms.weights * terms.ranks / ranks + terms.non_torch > terms.total * 0.9:
        ranks *= 2
    return (
        f"weights {gib(terms.weights)}, device {gib(terms.total)}: needs --tensor-parallel-size {ranks} or a quantised "
        "checkpoint"
    )


def nothing_fits(s: Situation, terms: Equation) -> str:
    """The arithmetic where no batch and no length would do."""
    top = min(terms.highest_utilization(), levers.utilization_bounds(s)[1])
    lines = " (with the settings' floors and pins)" if s.settings.pin or s.settings.max_model_len_min > 1 else ""
    return (
        f"weights {gib(terms.weights)}, beside them {gib(terms.non_torch + terms.activations)}, and at most "
        f"{gib(terms.budget(top))} of the device's {gib(terms.total)} may be taken: no smaller batch or length leaves "
        f"a useful KV cache{lines}; needs a larger --tensor-parallel-size, a quantised checkpoint or a larger device"
    )
