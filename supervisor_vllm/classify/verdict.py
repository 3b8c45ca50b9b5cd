"""Incident → Verdict, a pure function.

What decides, from strong to weak: the operator's own stop; a kernel record of a kill of this tree; the first root
cause in the log; a memory cgroup's counter; a requested shutdown; signals and exit statuses; numbers that can't work.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from dataclasses import replace

from ..evidence.kernel_log import gpu_faults
from ..evidence.log_records import Record, parse_records
from ..evidence.startup_facts import measurements
from ..evidence.vllm_log import pids_in_log
from ..incident import Confidence, Evidence, Incident, LogLine, Numbers, Verdict
from ..lazy import lazy
from . import scan as scanning
from .host_kill import KillProof, kill_proof
from .numbers import device_holders, neighbour_bytes, torch_holders, torch_numbers, unique_holders
from .pattern import Signature, numbers_of
from .place import device_numbers
from .process_end import EndSignal, end_signal, kind_of_signal, looks_like_server
from .scan import Finding, Scan, memory_kind, memory_phase
from .signatures import SIGNATURES
from .summary import summary_of

_EVIDENCE_CHARS = 2000
_DEVICE_WORDS = lazy(r"CUDA|NCCL|NVML|cuda")
#: A worker's process as the executor names it, with its rank.
_WORKER = lazy(r"Worker proc VllmWorker-(\d{1,4}) died")
_XID_PID = lazy(r"\bpid='?(\d{1,10})\b")
#: In these a neighbour's memory is what is missing; later phases are sized by what was free at the start.
_STARTUP_PHASES = frozenset({None, "startup", "weights", "profile"})
#: Of these, the phase is only where it happened; of device memory it decides the kind, and is known or isn't.
_REACHED_PHASE_KINDS = frozenset({"host_oom_kill", "host_alloc", "shm_full", "engine_crash", "killed", "gpu_fault"})
_FILE_ERRORS = frozenset(
    {"KeyError", "ValueError", "AssertionError", "JSONDecodeError", "UnicodeDecodeError", "UnpicklingError", "EOFError"}
)
_SHAPES = lazy(r"size of tensor|[Ss]hape|size mismatch|Expected size|mat1 and mat2|sizes of tensors")
_SPECIAL_PHASES = ("load_fail", "warm_sampler", "warm_sampler_cut")


def classify(incident: Incident, signatures: tuple[Signature, ...] = SIGNATURES) -> Verdict:
    """Which memory ran out, or that it was not memory. Never raises, whatever the log holds."""
    own_pids = pids_in_log(incident.log) | {ref.pid for ref in incident.tree}
    if incident.pid is not None:
        own_pids |= {incident.pid}
    records = tuple(parse_records(incident.log))
    found = scanning.scan(records, signatures)
    measured = measurements(records)
    proof = kill_proof(incident, own_pids)
    end = end_signal(incident)
    steps: tuple[Callable[[], Verdict | None], ...] = (
        lambda: _stop_requested(incident, found),
        lambda: _kernel_kill(proof),
        lambda: _root_cause(incident, found, own_pids, proof),
        lambda: _shut_down(incident, found, end),
        lambda: _killed_child(found),
        lambda: _silent_end(found, end),
        lambda: _engine_exception(incident, found, end),
        lambda: _signal(incident, end),
        lambda: _cut_traceback(found),
        lambda: _hint(incident, found),
        lambda: _end_of_engine(incident, found),
        lambda: _exited(incident, found),
    )
    for step in steps:
        if verdict := step():
            break
    else:
        verdict = _unknown(incident, found)
    verdict = _for_memory(verdict, incident, proof, found, end) or _with_device_fault(verdict, incident, own_pids)
    return _complete(verdict, found, measured)


def _with_device_fault(verdict: Verdict, incident: Incident, own_pids: frozenset[int]) -> Verdict:
    """A crash is the device's fault where the kernel says that the device broke in this life."""
    if verdict.kind not in ("engine_crash", "gpu_unavailable", "killed"):
        return verdict
    about_device = any(_DEVICE_WORDS.search(evidence.text) for evidence in verdict.evidence)
    for fault in gpu_faults(incident.kernel_log):
        named = _XID_PID.search(fault)
        own = named is not None and int(named[1]) in own_pids
        if own or (about_device and named is None):
            evidence = (Evidence("kernel-log", fault), *verdict.evidence)
            return replace(verdict, kind="gpu_fault", confidence="proven" if own else "likely", evidence=evidence)
    return verdict


def _complete(verdict: Verdict, found: Scan, measured: Numbers) -> Verdict:
    """With what vLLM measured in this life, the phase that it had reached, and the sentence for a person."""
    reached = found.last_phase if verdict.kind in _REACHED_PHASE_KINDS else None
    numbers = {**measured, **verdict.numbers}
    return Verdict(
        kind=verdict.kind,
        confidence=verdict.confidence,
        summary=summary_of(verdict.kind, numbers, verdict.summary),
        phase=verdict.phase or reached,
        evidence=verdict.evidence,
        numbers=numbers,
    )


def log_evidence(line: LogLine) -> Evidence:
    offset = line.offset if line.number is None else None
    return Evidence(line.source, line.text[:_EVIDENCE_CHARS], line.number, offset, line.file)


def _exit_evidence(incident: Incident, end: EndSignal | None) -> tuple[Evidence, ...]:
    if end:
        return (Evidence("exit-status", end.text),)
    if incident.exit_status is not None:
        return (Evidence("exit-status", f"exit status {incident.exit_status}"),)
    return ()


def _stop_requested(incident: Incident, found: Scan) -> Verdict | None:
    if not incident.stop_requested:
        return None
    lines = tuple(log_evidence(marker.line) for marker in found.stops[:1])
    return Verdict("stopped", "proven", "", evidence=(Evidence("supervisord", "a stop was asked for"), *lines))


def _kernel_kill(proof: KillProof | None) -> Verdict | None:
    if proof is None or proof.strength != "victim":
        return None
    return Verdict("host_oom_kill", "proven", proof.process, evidence=proof.evidence, numbers=proof.numbers)


def _for_memory(
    verdict: Verdict, incident: Incident, proof: KillProof | None, found: Scan, end: EndSignal | None
) -> Verdict | None:
    """A kill in its cgroup, or of its name, beside an end of which nothing else says why: a process that vanished."""
    if proof is None or (end and end.number != signal.SIGKILL) or not _unexplained(verdict, incident, found):
        return None
    confidence: Confidence = "proven" if verdict.kind == "killed" and proof.strength == "cgroup" else "likely"
    evidence = (*proof.evidence, *verdict.evidence)
    return Verdict(
        "host_oom_kill", confidence, proof.process, verdict.phase, evidence, {**verdict.numbers, **proof.numbers}
    )


def _unexplained(verdict: Verdict, incident: Incident, found: Scan) -> bool:
    if verdict.kind == "unknown":
        nobody_saw_it = incident.dead is True and incident.exit_status is None
        return bool(found.fatals) or _ends_badly(incident) or nobody_saw_it
    if verdict.kind == "engine_crash":  # a broken pipe is the other end's death
        exceptions = [finding for finding in found.exceptions if not scanning.survived(found, finding)]
        return bool(exceptions) and all(finding.echo for finding in exceptions)
    return verdict.kind == "killed"


def _root_cause(incident: Incident, found: Scan, own_pids: frozenset[int], proof: KillProof | None) -> Verdict | None:
    finding = _first_cause(incident, found)
    if finding is None or finding.signature is None:
        return None
    stopped_before = found.stops and found.stops[0].index < finding.index
    if stopped_before and not _ends_badly(incident):
        return None
    if finding.signature.kind == "by_phase":
        return _device_memory(incident, found, finding, own_pids)
    return _by_signature(incident, found, finding, own_pids, proof)


def _ends_badly(incident: Incident) -> bool:
    return incident.exit_status not in (None, 0)


def _first_cause(incident: Incident, found: Scan) -> Finding | None:
    """The first root cause in time that the server didn't survive."""
    alive = [
        finding
        for finding in found.findings
        if not scanning.survived(found, finding) and not _of_one_request(incident, found, finding)
    ]
    for accept in _ACCEPT:
        if finding := next((finding for finding in alive if accept(found, finding)), None):
            return finding
    return None


def _of_one_request(incident: Incident, found: Scan, finding: Finding) -> bool:
    """While serving, an error beside which the engine doesn't say that it is finished is one request's; it ended the
    server only where the server ended by itself, badly."""
    if found.started_at is None or finding.index < found.started_at or scanning.in_fatal_context(found, finding):
        return False
    if end_signal(incident) or incident.exit_status == 0:
        return True
    return incident.exit_status is None and not _about_memory(finding)


def _is_cause(finding: Finding) -> bool:
    return finding.signature is not None and finding.signature.role == "cause"


def _about_memory(finding: Finding) -> bool:
    kind = finding.signature.kind if finding.signature else ""
    return kind == "by_phase" or kind.startswith(("gpu_kv", "gpu_w", "gpu_o", "gpu_neighbour", "gpu_unstable", "host_"))


#: An error of another rank may stand before "Model loading took" of this one; one of a config probe is past by then.
_ACCEPT: tuple[Callable[[Scan, Finding], bool], ...] = (
    lambda found, finding: (
        _is_cause(finding) and finding.exact and (_about_memory(finding) or not scanning.superseded(found, finding))
    ),
    lambda found, finding: _is_cause(finding) and (_about_memory(finding) or not scanning.superseded(found, finding)),
    lambda found, finding: not scanning.superseded(found, finding),
)


def _device_memory(incident: Incident, found: Scan, finding: Finding, own_pids: frozenset[int]) -> Verdict:
    """An allocation on the device failed: the phase says what it is called, unless vLLM itself or a neighbour does."""
    text = finding.record.body
    special = next(
        (
            other
            for other in found.findings
            if other.index > finding.index and other.signature and other.signature.name in _SPECIAL_PHASES
        ),
        None,
    )
    numbers = torch_numbers(text)
    if finding.match:
        numbers = {**numbers_of(finding.match), **numbers}
    numbers |= device_numbers(finding.record.process, numbers.get("device"), incident)
    evidence = [log_evidence(finding.record.line)]
    phase = memory_phase(found, finding)
    kind = memory_kind(phase)
    confidence: Confidence = "proven" if finding.exact else "likely"
    if special and special.signature:
        kind, phase = special.signature.kind, special.signature.phase
        evidence.append(log_evidence(special.record.line))
        if special.match:
            numbers |= numbers_of(special.match)
    elif finding.pinned_frames and finding.signature and finding.signature.name == "driver_oom":
        kind, confidence = "host_alloc", "likely"
    elif phase and phase != "runtime" and finding.phase in (None, "startup"):
        confidence = "likely"  # from frames alone: the log's start is missing
    if holders := _holders(text, incident, own_pids, numbers):
        numbers["holders"] = holders
        if _neighbour_took_it(kind, phase, numbers):
            kind, confidence = "gpu_neighbour", "likely"
    return Verdict(kind, confidence, "", phase, tuple(evidence), numbers)


def _neighbour_took_it(kind: str, phase: str | None, numbers: Numbers) -> bool:
    """At the start, others hold more of the device than this server does."""
    if kind == "host_alloc" or phase not in _STARTUP_PHASES:
        return False
    others = neighbour_bytes(numbers["holders"])
    own = numbers.get("process_bytes") or numbers.get("pytorch_bytes")
    return own is not None and others > max(own, numbers.get("tried_bytes", 0))


def _holders(text: str, incident: Incident, own_pids: frozenset[int], numbers: Numbers) -> list[dict[str, object]]:
    by_torch = torch_holders(text, incident, own_pids)
    return unique_holders(by_torch, device_holders(incident, own_pids, numbers.get("device")))


def _by_signature(
    incident: Incident, found: Scan, finding: Finding, own_pids: frozenset[int], proof: KillProof | None
) -> Verdict:
    signature = finding.signature
    assert signature is not None and finding.match is not None
    kind, confidence = signature.kind, signature.confidence if finding.exact else "likely"
    numbers = numbers_of(finding.match)
    evidence = [log_evidence(finding.record.line)]
    if signature.name == "load_fail":
        numbers |= torch_numbers(finding.record.body)
    if signature.name == "disk_full" and finding.shm_frames:
        kind, confidence = "shm_full", "likely"
    if signature.name == "jit" and (killed := _killed_compiler(found, proof)):
        kind, confidence = "host_oom_kill", "likely"
        evidence.append(killed)
    if kind in ("gpu_neighbour", "gpu_unstable") or signature.name == "load_fail":
        numbers |= device_numbers(finding.record.process, numbers.get("device"), incident)
        if holders := _holders(finding.record.body, incident, own_pids, numbers):
            numbers["holders"] = holders
    return Verdict(kind, confidence, _short(finding.record), signature.phase or finding.phase, tuple(evidence), numbers)


def _killed_compiler(found: Scan, proof: KillProof | None) -> Evidence | None:
    """A failed build of kernels, in which something was killed: the compilers took the host's memory."""
    if proof and proof.evidence:
        return proof.evidence[0]
    return log_evidence(found.bare_killed) if found.bare_killed else None


def _short(record: Record) -> str:
    return record.body.strip()[:300]


def _shut_down(incident: Incident, found: Scan, end: EndSignal | None) -> Verdict | None:
    """A clean shutdown that nobody told supervisord of: before it the engine was well."""
    first_bad = min((marker.index for marker in (*found.deaths, *found.fatals)), default=None)
    marker = next((stop for stop in found.stops if first_bad is None or stop.index < first_bad), None)
    if marker and _has_exception(found, before=marker.index):
        return None
    if marker is None and not found.any_error and not _ends_badly(incident):
        marker = next((stop for stop in found.soft_stops if first_bad is None or stop.index < first_bad), None)
    if marker and not (end and end.number not in (2, 15)):
        return Verdict("stopped", "proven", "", evidence=(log_evidence(marker.line), *_exit_evidence(incident, end)))
    if end and end.number in (1, 2, 15) and not found.deaths and not found.fatals:
        return Verdict("stopped", "likely", "", evidence=_exit_evidence(incident, end))
    return None


def _killed_child(found: Scan) -> Verdict | None:
    """A process of the tree is gone without a word: its signal where vLLM prints one, else a kill."""
    if not found.deaths and found.bare_killed and not found.exceptions:
        return Verdict("killed", "likely", "its shell says so", evidence=(log_evidence(found.bare_killed),))
    if not found.deaths or _has_exception(found, before=found.deaths[0].index):
        return None
    marker = next((death for death in found.deaths if death.signal), found.deaths[0])
    evidence = (log_evidence(marker.line),)
    if marker.signal is None and marker.exit_status:  # no signal: nobody killed it
        words = f"a process of it ended by itself with exit status {marker.exit_status}"
        return Verdict("engine_crash", "likely", words, evidence=evidence)
    kind = kind_of_signal(marker.signal) if marker.signal else "killed"
    detail, numbers = "a process of it died", {}
    if worker := _WORKER.search(marker.line.text):
        detail, numbers = f"its worker of rank {worker[1]} died", {"rank": int(worker[1])}
    return Verdict(kind, "likely", detail, evidence=evidence, numbers=numbers)


def _silent_end(found: Scan, end: EndSignal | None) -> Verdict | None:
    """The start failed, and of the whole log nobody says why: a process is gone without a word (measured, 0.32: SIGKILL
    to EngineCore or a worker while it loads leaves only "initialization failed" and broken pipes)."""
    whole = found.server and any(phase == "startup" for _, phase in found.phase_starts)
    if end or not whole or not found.fatals or found.last_phase in (None, "startup") or found.started_at is not None:
        return None
    if any(not finding.echo for finding in found.exceptions):
        return None
    return Verdict(
        "killed", "likely", "a process of it ended without a word", None, (log_evidence(found.fatals[0].line),)
    )


def _has_exception(found: Scan, *, before: int) -> bool:
    return any(
        not finding.echo
        and finding.index < before
        and not scanning.superseded(found, finding)
        and not scanning.survived(found, finding)
        and (found.started_at is None or finding.index < found.started_at or scanning.in_fatal_context(found, finding))
        for finding in found.exceptions
    )


def _engine_exception(incident: Incident, found: Scan, end: EndSignal | None) -> Verdict | None:
    """An exception that no signature knows."""
    finding = next(_deciding_exceptions(incident, found, end), None)
    if finding is None:
        return None
    words = (f"{finding.name}: {finding.message}" if finding.message else finding.name)[:300]
    evidence = (log_evidence(finding.record.line),)
    if finding.loading_frames and _about_the_files(finding):
        phase = "weights" if finding.frames_phase == "weights" else "startup"
        return Verdict("bad_model", "likely", words, phase, evidence)
    return Verdict("engine_crash", "likely" if finding.echo else "proven", words, finding.phase, evidence)


def _about_the_files(finding: Finding) -> bool:
    """While weights or configurations are read: names, shapes or bytes that don't fit the code."""
    return finding.name in _FILE_ERRORS or (finding.name == "RuntimeError" and bool(_SHAPES.search(finding.message)))


def _deciding_exceptions(incident: Incident, found: Scan, end: EndSignal | None) -> Iterator[Finding]:
    alive = [finding for finding in found.exceptions if not scanning.survived(found, finding)]
    own = [finding for finding in alive if not finding.echo]
    started = found.started_at
    for finding in own:
        if started is not None and finding.index > started:
            if scanning.in_fatal_context(found, finding):
                yield finding
        elif not scanning.superseded(found, finding):
            yield finding
    if end and end.number != 6:
        return  # a signal ended it; requests that failed before say nothing
    if incident.exit_status not in (None, 0):
        yield from reversed(own[-1:])
        yield from alive[:1]


def _signal(incident: Incident, end: EndSignal | None) -> Verdict | None:
    if end is None:
        return None
    kind = kind_of_signal(end.number)
    confidence: Confidence = "proven" if kind in ("killed", "engine_crash") else "likely"
    return Verdict(kind, confidence, end.name, evidence=_exit_evidence(incident, end))


def _cut_traceback(found: Scan) -> Verdict | None:
    if found.cut_frames is None:
        return None
    line, phase = found.cut_frames
    return Verdict(memory_kind(phase), "likely", "", phase, (log_evidence(line),))


def _hint(incident: Incident, found: Scan) -> Verdict | None:
    """INFO lines with a number that can't work; not of a server that came up or is well."""
    if not found.hints or found.started_at is not None or incident.exit_status == 0:
        return None
    finding = next((hint for hint in found.hints if hint.signature and hint.signature.name == "kv_concurrency"), None)
    finding = finding or found.hints[0]
    assert finding.signature is not None and finding.match is not None
    return Verdict(
        finding.signature.kind,
        finding.signature.confidence,
        "",
        finding.signature.phase,
        (log_evidence(finding.record.line),),
        numbers_of(finding.match),
    )


def _end_of_engine(incident: Incident, found: Scan) -> Verdict | None:
    """The engine is dead and nobody said why. After serving, with exit status 0: killed (vLLM 0.20 to 0.22 print
    nothing but EngineDeadError then)."""
    if not found.fatals:
        return None
    evidence = (log_evidence(found.fatals[0].line), *_exit_evidence(incident, None))
    if found.core_signal:
        evidence = (log_evidence(found.core_signal), *evidence)
        return Verdict("killed", "likely", "EngineCore alone got a signal", evidence=evidence)
    if incident.exit_status == 0:
        return Verdict("killed", "likely", "the engine died", evidence=evidence)
    return Verdict("unknown", "unknown", "the engine died and the log doesn't say why", evidence=evidence)


def _exited(incident: Incident, found: Scan) -> Verdict | None:
    if incident.exit_status != 0 or found.any_error or looks_like_server(incident, found.server):
        return None
    return Verdict("exited", "likely", "", evidence=_exit_evidence(incident, None))


def _unknown(incident: Incident, found: Scan) -> Verdict:
    running = found.started_at is not None and incident.exit_status is None and incident.signal is None
    reason = "the log is of a server that runs: nothing is wrong in it" if running else ""
    return Verdict("unknown", "unknown", reason, evidence=_exit_evidence(incident, None))
