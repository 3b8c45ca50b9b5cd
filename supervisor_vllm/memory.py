"""How much memory the next launch needs to find free, and whether it is: measured on the device, not assumed."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from . import launch, watch
from .context import Context
from .errors import UserError
from .evidence import cgroup, device, host
from .evidence.gpu import GpuReading
from .incident import Change, GpuHolder, GpuMemory, Incident, Numbers, Plan
from .journal import IncidentRow
from .policy.flags import UTILIZATION, default_utilization
from .policy.launch_command import parse_launch
from .target import effective_environment
from .units import gib

#: Of the host memory that the last life held at most, this much must be available for the next one.
_HOST_SHARE = 0.9
#: Of the device, over what vLLM's start check wants, before a neighbour counts as gone.
_NEIGHBOUR_MARGIN = 0.02


@dataclass(frozen=True)
class Need:
    """`fraction` of each device's total must be free (vLLM's own start check), after `overhead_bytes` that vLLM takes
    for itself before it looks. None: the launch makes no such check. `host_bytes`: host memory, available on the host
    and in the cgroup `cgroup_path`."""

    cpu_backend: bool
    device_count: int
    fraction: float | None = None
    overhead_bytes: int = 0
    host_bytes: int = 0
    cgroup_path: str | None = None


@dataclass(frozen=True)
class Reading:
    """`shortfall` is a sentence, None when all is free. `numbers` are of the tightest device, as a verdict has them.
    `problem`: why no device could be measured."""

    shortfall: str | None
    numbers: Numbers = dataclasses.field(default_factory=dict)
    problem: str | None = None


def read_devices(context: Context, incident: Incident) -> GpuReading:
    return _read(context, device.on_cpu_backend(incident.log))


def note_baseline(context: Context) -> None:
    """The device memory before vLLM takes any: read once, right after a start."""
    if context.life is None or context.life.devices:
        return
    devices = (*_read(context, False).gpus, *device.read_memory_nodes())
    context.life = dataclasses.replace(context.life, devices=devices)
    watch.keep(context)


def need_of(context: Context, incident: Incident, row: IncidentRow, plan: Plan) -> Need:
    cpu_backend = device.on_cpu_backend(incident.log)
    try:
        parsed = parse_launch(launch.current_command(context))
    except UserError:
        return Need(cpu_backend, 0)
    path = incident.cgroup_after.path if incident.cgroup_after else None
    need = Need(cpu_backend, parsed.local_ranks, host_bytes=_host_bytes(incident, plan), cgroup_path=path)
    checked = parsed.get("--kv-cache-memory-bytes") is None and "VLLM_CPU_KVCACHE_SPACE" not in parsed.environment
    if not checked:
        return need
    planned = next((change.to for change in plan.changes if change.flag == "--gpu-memory-utilization"), None)
    waits = plan.action == "wait" and row.verdict.kind == "gpu_neighbour"
    if waits:
        planned = None  # what is waited for is room for the unchanged command
    text = planned or parsed.get("--gpu-memory-utilization")
    fraction = _fraction(text, incident.vllm_version)
    overhead = _overhead_bytes(incident, row.verdict.numbers) if waits else 0
    return dataclasses.replace(need, fraction=fraction, overhead_bytes=overhead)


def _host_bytes(incident: Incident, plan: Plan) -> int:
    """What the last life held of the host's memory, where the next one is to hold the same: a brake, so that a restart
    doesn't drive a host that is short already into thrashing."""
    if incident.host_use is None or plan.changes:
        return 0
    return int(incident.host_use.total_bytes * _HOST_SHARE)


def without_neighbours(context: Context, row: IncidentRow) -> tuple[Change, ...]:
    """The changes that take back what was given way to a neighbour, where its memory is free now."""
    given_way = [
        (learned.change, context.journal.incident_row(learned.incident_id))
        for learned in context.journal.learned(context.name)
        if learned.change.flag == UTILIZATION and learned.incident_id is not None
    ]
    for change, learned_from in given_way:
        if learned_from.verdict.kind != "gpu_neighbour" or row.verdict.kind.startswith("gpu_"):
            continue
        incident = context.journal.incident(learned_from.id)
        fraction = _fraction(change.from_, incident.vllm_version)
        overhead = int(learned_from.verdict.numbers.get("overhead_bytes", 0))
        need = Need(device.on_cpu_backend(incident.log), 0, min(1.0, fraction + _NEIGHBOUR_MARGIN), overhead)
        reading = measure(context, need)
        if reading.numbers and reading.shortfall is None:
            why = "the neighbour's memory is free again: your own value"
            return (Change(UTILIZATION, change.to, change.from_, why),)
    return ()


def measure(context: Context, need: Need) -> Reading:
    problems = []
    tightest: GpuMemory | None = None
    reading = GpuReading()
    if need.fraction is not None:
        reading = _read(context, need.cpu_backend)
        for memory in reading.gpus[: need.device_count or None]:
            missing = int(memory.total_bytes * need.fraction) + need.overhead_bytes - memory.free_bytes
            if missing > 0:
                problems.append(_sentence(memory, need))
            if tightest is None or memory.free_bytes < tightest.free_bytes:
                tightest = memory
    available = host.read_host(context.roots).available_bytes
    if available < need.host_bytes:
        problems.append(f"host memory: {gib(available)} of the {gib(need.host_bytes)} needed are available")
    if need.cgroup_path and (shortfall := _cgroup_shortfall(context, need)):
        problems.append(shortfall)
    return Reading("; ".join(problems) or None, _numbers(tightest, need), reading.problem)


def _cgroup_shortfall(context: Context, need: Need) -> str | None:
    """What others in its cgroup hold. A limit that is below the need by itself is nothing to wait for."""
    now = cgroup.read_cgroup(need.cgroup_path or "", context.roots)
    if now is None or now.limit_bytes is None or now.held_bytes is None or need.host_bytes > now.limit_bytes:
        return None
    free = now.limit_bytes - now.held_bytes
    if free >= need.host_bytes:
        return None
    return f"memory cgroup {now.path}: {gib(max(0, free))} of the {gib(need.host_bytes)} needed are free"


def _read(context: Context, cpu_backend: bool) -> GpuReading:
    try:
        command = launch.current_command(context)
    except UserError:  # the section is being edited: what it said when it was last read
        command = context.section.command
    environment = effective_environment(context.section, command)
    return device.read_devices(cpu_backend=cpu_backend, environment=environment, roots=context.roots)


def _overhead_bytes(incident: Incident, numbers: Numbers) -> int:
    """What vLLM itself had taken when it looked: free before its start, less what its check found."""
    nodes = device.on_cpu_backend(incident.log)
    before = [memory for memory in incident.gpus_before if memory.uuid.startswith("node") == nodes]
    found = numbers.get("free_bytes")
    index = numbers.get("device", 0)
    if found is None or index >= len(before):
        return 0
    return max(0, before[index].free_bytes - int(found))


def _numbers(memory: GpuMemory | None, need: Need) -> Numbers:
    if memory is None:
        return {}
    holders = [dataclasses.asdict(holder) for holder in memory.holders]
    free_bytes = max(0, memory.free_bytes - need.overhead_bytes)
    numbers = {"free_bytes": free_bytes, "total_bytes": memory.total_bytes, "holders": holders}
    return numbers | ({"overhead_bytes": need.overhead_bytes} if need.overhead_bytes else {})


def _sentence(memory: GpuMemory, need: Need) -> str:
    needed = int(memory.total_bytes * (need.fraction or 0)) + need.overhead_bytes
    name = memory.name if memory.uuid.startswith("node") else f"GPU {memory.index}"
    text = f"{name}: {gib(memory.free_bytes)} free, {gib(needed)} needed"
    if memory.holders:
        text += f"; held by {', '.join(map(_holder, memory.holders))}"
    return text if memory.holders_known else f"{text}; who holds it can't be seen from here"


def _holder(holder: GpuHolder) -> str:
    size = gib(holder.bytes) if holder.bytes else "unknown size"
    if holder.elsewhere:
        return f"pid {holder.pid} (not visible from here) ({size})"
    return f"pid {holder.pid} {holder.name} ({size}, {holder.owner})"


def _fraction(text: str | None, version: str | None) -> float:
    """The default where the flag is absent, or an expansion that isn't known here."""
    try:
        return float(text) if text else default_utilization(version)
    except ValueError:
        return default_utilization(version)


def _number(text: str | None) -> int:
    return int(text) if text and text.isdigit() else 1
