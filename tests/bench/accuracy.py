"""How often the verdict is right, over all cases with a known truth, and the rules of others.

python tests/bench/accuracy.py            prints the table and writes it into docs/accuracy.md
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from supervisor_vllm.classify import classify
from supervisor_vllm.explain import incident_from_log
from supervisor_vllm.kinds import KINDS

ROOT = Path(__file__).resolve().parent.parent
CORPUS = ROOT / "corpus"
DOCUMENT = ROOT.parent / "docs" / "accuracy.md"
_MARK = "<!-- made by tests/bench/accuracy.py -->\n"


@dataclass(frozen=True)
class Case:
    group: str
    name: str
    kinds: tuple[str, ...]
    oom: bool
    text: str
    kernel: str
    exit_status: int | None
    signal: str | None
    command: str
    pids: tuple[int, ...]
    cgroup: str | None
    first: str | None = None


def cases() -> Iterator[Case]:
    for group in ("public", "heldout", "own"):
        for row in json.loads((CORPUS / group / "cases.json").read_text()):
            kinds = tuple(row.get("kinds") or [row["kind"]])
            yield Case(
                group,
                row["id"],
                kinds,
                row.get("oom", KINDS[kinds[0]].oom),
                "".join(f"{line}\n" for line in row["log"]),
                "".join(f"{line}\n" for line in row.get("kernel") or ()),
                row.get("exit_status", 1 if group == "public" else None),
                row.get("signal"),
                row.get("command") or row.get("args") or "vllm serve /m/q",
                tuple(row.get("pids", ())),
                row.get("cgroup"),
                row.get("first_verdict"),
            )
    for group in ("real", "broken"):
        listed = json.loads((CORPUS / group / "cases.json").read_text())
        rows = listed if isinstance(listed, list) else [{"name": name, **row} for name, row in listed.items()]
        for row in rows:
            kinds = tuple(row.get("kinds") or [row["kind"] or "stopped"])
            if row.get("kind", "") is None:
                kinds = ("stopped", "unknown")
            kernel = CORPUS / group / f"{row['name']}.kernel"
            yield Case(
                group,
                row["name"],
                kinds,
                row.get("oom", KINDS[kinds[0]].oom),
                (CORPUS / group / f"{row['name']}.log").read_text(errors="replace"),
                kernel.read_text() if kernel.exists() else "",
                row["exit_status"],
                row.get("signal"),
                row["command"],
                tuple(row.get("pids", ())),
                None,
            )


def ours(case: Case) -> str:
    with tempfile.TemporaryDirectory() as folder:
        log, kernel = Path(folder) / "vllm.log", Path(folder) / "kernel.log"
        log.write_text(case.text)
        kernel.write_text(case.kernel)
        incident = incident_from_log(
            str(log),
            command=case.command,
            exit_status=case.exit_status,
            signal=case.signal,
            pids=case.pids,
            cgroup=case.cgroup,
            kernel_log=str(kernel) if case.kernel else None,
        )
        return classify(incident).kind


def _killed(case: Case) -> bool:
    return case.exit_status in (137, -9) or case.signal in ("SIGKILL", "KILL", "9")


# ml-memguard 0.5.0 (PyPI), memory_guard/watchdog.py, _is_oom_exit: one of these, in any case, and one of those statuses
_MEMGUARD_WORDS = (
    "cuda out of memory",
    "no available memory for cache blocks",
    "outofmemoryerror",
    "cuda error: out of memory",
    "out_of_memory",
    "oom",
    "killed",
)


def _memguard(case: Case) -> bool:
    status = case.exit_status == 1 or _killed(case)
    return status and any(word in case.text.lower() for word in _MEMGUARD_WORDS)


#: What others go by: does it say "memory"?
RULES: dict[str, Callable[[Case], bool]] = {
    'grep -i "out of memory" in the log': lambda case: "out of memory" in case.text.lower(),
    "exit status 137 or SIGKILL": _killed,
    "ml-memguard 0.5.0's words": _memguard,
    '"CUDA out of memory" in the log': lambda case: "CUDA out of memory" in case.text,
}


def main() -> None:
    all_cases = list(cases())
    said = {id(case): ours(case) for case in all_cases}
    lines = [
        "| cases | number | kind right | kind wrong | false alarms | memory deaths missed |",
        "|---|---|---|---|---|---|",
    ]
    for group in ("public", "heldout", "real", "broken", "own"):
        some = [case for case in all_cases if case.group == group]
        if group == "heldout":
            lines.append(_row("heldout, as first seen", some, {id(case): case.first or "unknown" for case in some}))
        lines.append(_row(f"{group}, now" if group == "heldout" else group, some, said))
    lines.append(_row("all", all_cases, said))
    lines += ["", f"The same {len(all_cases)} cases by the rules of others, asked only whether memory ran out:", ""]
    lines += ["| rule | found | missed | false alarms |", "|---|---|---|---|"]
    memory = sum(case.oom for case in all_cases)
    verdicts = [KINDS[said[id(case)]].oom for case in all_cases]
    rules = {"supervisor-vllm": verdicts} | {name: [rule(case) for case in all_cases] for name, rule in RULES.items()}
    for name, answers in rules.items():
        found = sum(answer and case.oom for answer, case in zip(answers, all_cases, strict=True))
        false = sum(answer and not case.oom for answer, case in zip(answers, all_cases, strict=True))
        lines.append(f"| {name} | {found} of {memory} | {memory - found} | {false} of {len(all_cases) - memory} |")
    table = "\n".join(lines) + "\n"
    print(table)
    for case in all_cases:
        if said[id(case)] not in case.kinds:
            print(f"wrong: {case.group}/{case.name}: {said[id(case)]}, not {case.kinds[0]}")
    text = DOCUMENT.read_text()
    DOCUMENT.write_text(text[: text.index(_MARK)] + _MARK + table)


def _row(title: str, some: list[Case], said: dict[int, str]) -> str:
    right = sum(said[id(case)] in case.kinds for case in some)
    false = sum(KINDS[said[id(case)]].oom and not case.oom for case in some)
    missed = sum(case.oom and not KINDS[said[id(case)]].oom for case in some)
    return f"| {title} | {len(some)} | {right} | {len(some) - right} | {false} | {missed} |"


if __name__ == "__main__":
    main()
