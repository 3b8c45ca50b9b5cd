"""What is known of one death: the immutable values that flow from the evidence to the plan.

    Incident   everything that was seen, before anybody judged it (can be saved as JSON and replayed)
    Verdict    which memory ran out, or that it was not memory: a pure function of the Incident
    Plan       what the next launch does differently: a pure function of Verdict, command, settings and history

All sizes are bytes, all times are seconds; points in time are ISO 8601 strings with zone.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

Confidence = Literal["proven", "likely", "unknown"]
Action = Literal["adjust", "wait", "retry", "hold", "none"]

#: A kill for memory longer before the death than this had another end: the tree lived on. (A rank that lost another one
#: waits for it: NCCL's own time limit is 10 minutes.)
KILL_TO_DEATH_SEC = 1800.0

#: Names of the numbers that evidence may hold. One name means one thing in the whole project.
#:   estimated_max_model_len   vLLM's own estimate of the longest length that fits (tokens)
#:   max_model_len             the length that was asked for (tokens)
#:   kv_tokens                 tokens that the KV cache holds
#:   kv_needed_bytes, kv_available_bytes    KV cache of one request of max_model_len; what is there for it
#:   free_bytes, total_bytes   of the device that failed (vLLM's start check or torch's sentence)
#:   overhead_bytes            what a starting vLLM takes for itself before that check
#:   utilization, requested_bytes           what the start check wanted
#:   tried_bytes               the allocation that failed
#:   process_bytes, pytorch_bytes, reserved_unallocated_bytes   from torch's sentence
#:   device                    index of the failed device, of those that the program sees
#:   gpu_index, gpu_uuid       the driver's own number of it; its UUID where it is a MIG device
#:   rank                      tensor-parallel rank of the worker that says it
#:   weights_bytes, activation_bytes, non_torch_bytes, graph_bytes   measured by vLLM in this life
#:   initial_free_bytes, current_free_bytes  of vLLM's profiling assertion
#:   dummy_requests            sampler or pooler warm-up
#:   mamba_blocks              the largest legal max_num_seqs
#:   utilization_min           lower bound of the utilisation that vLLM names (CPU backend, 0.33)
#:   shm_required_bytes, shm_free_bytes
#:   swap_space_bytes          host memory that --swap-space asked for
#:   limit_bytes               limit of the memory cgroup that killed
#:   host_total_bytes, host_available_bytes    the host's memory; what of it was available before the start
#:   host_anonymous_bytes, host_shared_bytes   what its processes held of it at most (HostUse)
#:   holders                   list of {"pid", "bytes", "name", "owner"}; owner is orphan | neighbour | own; with
#:                             "elsewhere" true where the pid is none that can be looked at from here
Numbers = dict[str, Any]


@dataclass(frozen=True)
class ProcessRef:
    """One process that can be told from any other: pids are used again, (pid, start time) isn't.

    `start_time` is seconds since the epoch as psutil's create_time() gives it.
    """

    pid: int
    start_time: float
    name: str = ""


@dataclass(frozen=True)
class LogLine:
    """One line of the program's log. `number` counts from 1 in its file; None where the file is too large to count,
    then `offset` (bytes) says where it is. `source` is the file's role, `file` the name of a rotated one."""

    number: int | None
    text: str
    source: str = "vllm-log"
    offset: int | None = None
    file: str | None = None


@dataclass(frozen=True)
class CgroupMemory:
    """A memory cgroup's counters. `limit_bytes`: the lowest of its own and of those above it. `held_bytes`: what can't
    be reclaimed of its use. None: the kernel or the version doesn't have it."""

    path: str
    oom_kill_count: int | None = None
    limit_bytes: int | None = None
    usage_bytes: int | None = None
    fail_count: int | None = None
    held_bytes: int | None = None


@dataclass(frozen=True)
class GpuHolder:
    """A process that holds device memory. `bytes` is None where the driver doesn't say (containers). `elsewhere`: the
    pid is of another pid namespace, so that it names no process that could be looked at from here."""

    pid: int
    bytes: int | None
    name: str = ""
    owner: Literal["own", "orphan", "neighbour"] = "neighbour"
    elsewhere: bool = False


@dataclass(frozen=True)
class GpuMemory:
    """`index` is the driver's; MIG devices have that of their GPU, and its uuid in `parent_uuid`. `unified`: the host's
    own memory (GB10, Jetson). `driver`: its version. `holders` is empty where the list can't be read, too: then
    `holders_known` is False."""

    index: int
    uuid: str
    name: str
    total_bytes: int
    free_bytes: int
    holders: tuple[GpuHolder, ...] = ()
    unified: bool = False
    parent_uuid: str = ""
    gpu_instance: int | None = None
    compute_instance: int | None = None
    holders_known: bool = True
    driver: str = ""


@dataclass(frozen=True)
class HostMemory:
    """From /proc/meminfo and /proc/vmstat. `oom_kill_count` is host-wide, None before Linux 4.13."""

    total_bytes: int
    available_bytes: int
    oom_kill_count: int | None = None
    shm_total_bytes: int | None = None
    shm_free_bytes: int | None = None


@dataclass(frozen=True)
class HostUse:
    """What processes hold of the host's memory: anonymous pages, swapped ones too, and shared ones (the largest
    process's: they may be the same pages). CUDA's pinned memory is shared memory to the kernel."""

    anonymous_bytes: int = 0
    shared_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return self.anonymous_bytes + self.shared_bytes


@dataclass(frozen=True)
class Incident:
    """Everything known of one death. Fields that nobody could see keep their defaults, which prove nothing."""

    program: str
    time: str
    command: str = ""
    pid: int | None = None
    tree: tuple[ProcessRef, ...] = ()
    exit_status: int | None = None
    signal: str | None = None
    #: a person or a shutdown asked for it (STOPPING/STOPPED, not EXITED/FATAL)
    stop_requested: bool = False
    #: death of a server that was ours to keep running; `explain` of a log alone says None: still alive, maybe
    dead: bool | None = True
    log: tuple[LogLine, ...] = ()
    #: kernel log lines since the life began, as the kernel wrote them
    kernel_log: tuple[str, ...] = ()
    #: the kernel's log names processes by other numbers than ours
    in_pid_namespace: bool = False
    #: when it died, on the clock of the kernel's log
    died_boot_seconds: float | None = None
    cgroup_before: CgroupMemory | None = None
    cgroup_after: CgroupMemory | None = None
    host_before: HostMemory | None = None
    host_after: HostMemory | None = None
    #: at most, as far as it was looked at while it lived
    host_use: HostUse | None = None
    gpus: tuple[GpuMemory, ...] = ()
    #: the devices before this life took any memory (memory nodes too: vLLM's CPU backend)
    gpus_before: tuple[GpuMemory, ...] = ()
    #: processes of the dead tree that live on
    orphans: tuple[ProcessRef, ...] = ()
    vllm_version: str | None = None
    #: reached HEALTHY in this life
    was_healthy: bool = False


@dataclass(frozen=True)
class Evidence:
    """A line that decides. `source` is vllm-log, kernel-log, cgroup, exit-status, gpu, host or supervisord.
    `line` counts from 1; None in a log too large to count: `offset` is in bytes. `file`: a rotated one."""

    source: str
    text: str
    line: int | None = None
    offset: int | None = None
    file: str | None = None


@dataclass(frozen=True)
class Verdict:
    kind: str
    confidence: Confidence
    summary: str
    phase: str | None = None
    evidence: tuple[Evidence, ...] = ()
    numbers: Numbers = field(default_factory=dict)


@dataclass(frozen=True)
class Change:
    """One flag, in vLLM's long spelling. None: the flag is absent on that side."""

    flag: str
    from_: str | None
    to: str | None
    why: str


@dataclass(frozen=True)
class Plan:
    """`command` is the whole next command. `reason` is one sentence: for hold, what a person must do."""

    action: Action
    reason: str
    changes: tuple[Change, ...] = ()
    command: str = ""


_T = TypeVar("_T")


def to_json(value: Any) -> Any:
    """Dataclasses as plain JSON values; a trailing underscore (`from_`) is only Python's need and goes."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name.rstrip("_"): to_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    if isinstance(value, dict):
        return {str(key): to_json(item) for key, item in value.items()}
    return value


def from_json(cls: type[_T], data: Any) -> _T:
    """The inverse of to_json for the dataclasses of this module. Unknown keys are of a newer version: left out."""
    hints = typing.get_type_hints(cls)
    values = {}
    for f in dataclasses.fields(cls):  # type: ignore[arg-type]
        key = f.name.rstrip("_")
        if key in data:
            values[f.name] = _value_from_json(hints[f.name], data[key])
    return cls(**values)


def _value_from_json(hint: Any, value: Any) -> Any:
    if value is None:
        return None
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        inner = next(arg for arg in typing.get_args(hint) if arg is not type(None))
        return _value_from_json(inner, value)
    if origin is tuple:
        return tuple(_value_from_json(typing.get_args(hint)[0], item) for item in value)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return from_json(hint, value)
    return value
