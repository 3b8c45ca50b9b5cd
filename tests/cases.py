"""The cases of tests/corpus with their known truth, and what `explain` says of one."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from supervisor_vllm.classify import classify
from supervisor_vllm.explain import incident_from_log
from supervisor_vllm.incident import Verdict
from supervisor_vllm.kinds import KINDS

CORPUS = Path(__file__).parent / "corpus"


@dataclass(frozen=True)
class Case:
    """`kinds`: any of them is right. `untold`: what may be said, too, because no line tells the truth. `phase`: None,
    not known. `row`: all that the corpus has of it."""

    name: str
    kinds: tuple[str, ...]
    oom: bool
    log: str
    kernel: str = ""
    command: str = "vllm serve /m/q"
    exit_status: int | None = None
    signal: str | None = None
    pids: tuple[int, ...] = ()
    cgroup: str | None = None
    phase: str | None = None
    untold: tuple[str, ...] = ()
    first_verdict: str | None = None
    row: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)


def load(group: str) -> list[Case]:
    """own, public and heldout have their lines in cases.json; real, broken and deaths have files beside it."""
    found = json.loads((CORPUS / group / "cases.json").read_text())
    rows = found if isinstance(found, list) else [{"name": name, **row} for name, row in found.items()]
    return [_case(group, row) for row in rows]


def _case(group: str, row: dict[str, Any]) -> Case:
    kinds = row["kinds"] if "kinds" in row else row["kind"]
    if kinds is None:  # a server that was well
        kinds = ("stopped", "unknown")
    kinds = (kinds,) if isinstance(kinds, str) else tuple(kinds)
    name = row.get("id") or row["name"]
    return Case(
        name=name,
        kinds=kinds,
        oom=row.get("oom", KINDS[kinds[0]].oom),
        log=_lines(row["log"]) if "log" in row else _file(group, f"{name}.log"),
        kernel=_lines(row.get("kernel") or ()) if "log" in row else _file(group, f"{name}.kernel"),
        command=row.get("command") or row.get("args") or "vllm serve /m/q",
        exit_status=row.get("exit_status", 1 if group == "public" else None),
        signal=row.get("signal"),
        pids=tuple(row.get("pids", ())),
        cgroup=row.get("cgroup"),
        phase=row.get("phase"),
        untold=tuple(row.get("untold", ())),
        first_verdict=row.get("first_verdict"),
        row=row,
    )


def _lines(lines: list[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def _file(group: str, name: str) -> str:
    path = CORPUS / group / name
    return path.read_bytes().decode(errors="replace") if path.exists() else ""  # line ends as they are


def verdict_of(case: Case, folder: Path, *, log: Path | None = None) -> Verdict:
    """What `explain` says, with files written into the folder. `log`: the log as somebody else carried it."""
    if log is None:
        log = folder / "vllm.log"
        log.write_text(case.log, newline="")
    kernel = folder / "kernel.log"
    kernel.write_text(case.kernel)
    return classify(
        incident_from_log(
            str(log),
            command=case.command,
            exit_status=case.exit_status,
            signal=case.signal,
            pids=case.pids,
            cgroup=case.cgroup,
            kernel_log=str(kernel) if case.kernel else None,
        )
    )
