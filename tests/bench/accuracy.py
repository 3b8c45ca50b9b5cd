"""How often the verdict is right, over all cases with a known truth, and the rules of others.

python tests/bench/accuracy.py            prints the table and writes it into docs/accuracy.md
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "bench")]

from cases import Case, load, verdict_of  # noqa: E402
from document import write_made  # noqa: E402

from supervisor_vllm.kinds import KINDS  # noqa: E402

DOCUMENT = ROOT / "docs" / "accuracy.md"
GROUPS = ("public", "heldout", "real", "broken", "deaths", "own")
_MARK = "<!-- made by tests/bench/accuracy.py -->\n"


def ours(case: Case) -> str:
    with tempfile.TemporaryDirectory() as folder:
        return verdict_of(case, Path(folder)).kind


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
    return status and any(word in case.log.lower() for word in _MEMGUARD_WORDS)


#: What others go by: does it say "memory"?
RULES: dict[str, Callable[[Case], bool]] = {
    'grep -i "out of memory" in the log': lambda case: "out of memory" in case.log.lower(),
    "exit status 137 or SIGKILL": _killed,
    "ml-memguard 0.5.0's words": _memguard,
    '"CUDA out of memory" in the log': lambda case: "CUDA out of memory" in case.log,
}


def main() -> None:
    groups = {group: load(group) for group in GROUPS}
    all_cases = [case for some in groups.values() for case in some]
    said = {id(case): ours(case) for case in all_cases}
    lines = [
        "| cases | number | kind right | kind wrong | false alarms | memory deaths missed |",
        "|---|---|---|---|---|---|",
    ]
    for group, some in groups.items():
        if group == "heldout":
            lines.append(
                _row("heldout, as first seen", some, {id(case): case.first_verdict or "unknown" for case in some})
            )
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
            print(f"wrong: {case.name}: {said[id(case)]}, not {case.kinds[0]}")
    write_made(DOCUMENT, _MARK, table)


def _row(title: str, some: list[Case], said: dict[int, str]) -> str:
    right = sum(said[id(case)] in case.kinds for case in some)
    false = sum(KINDS[said[id(case)]].oom and not case.oom for case in some)
    missed = sum(case.oom and not KINDS[said[id(case)]].oom for case in some)
    return f"| {title} | {len(some)} | {right} | {len(some) - right} | {false} | {missed} |"


if __name__ == "__main__":
    main()
