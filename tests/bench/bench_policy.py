"""How many launches until it serves again, and how much of the capacity is kept: ours and what others do.

make bench-policy            500 random worlds; WORLDS=60 for fewer
"""

from __future__ import annotations

import os
import statistics
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(Path(__file__).parent)]

import policy_worlds as worlds  # noqa: E402
from document import write_made  # noqa: E402
from policy_worlds import Outcome, World, asked, outcome, random_world  # noqa: E402

from supervisor_vllm.classify import classify  # noqa: E402
from supervisor_vllm.incident import GpuHolder, GpuMemory, Incident, LogLine, Verdict  # noqa: E402
from supervisor_vllm.policy.flags import LENGTH, UTILIZATION  # noqa: E402
from supervisor_vllm.policy.launch_command import parse_launch, with_flag  # noqa: E402
from supervisor_vllm.policy.model_shape import ModelShape  # noqa: E402
from supervisor_vllm.policy.plan import Attempt, plan_next  # noqa: E402
from supervisor_vllm.settings import Settings  # noqa: E402

MAX_LAUNCHES = 12
_MARK = "<!-- made by tests/bench/bench_policy.py -->\n"
_SECTION = """\
## How many launches, and how much is kept

Random machines (8 to 192 GB, 1 to 8 GPUs) and models (0.5B to 671B, by published shapes) on which the user's own
command dies (`make bench-policy`). The truth is another equation than the one that decides, with hidden errors, and all
that is known is the log. Healable: some command serves at least 256 tokens, found by trying all. Capacity: KV tokens ×
length, of the best such command within what the operator wished.
"""
SETTINGS = Settings(prefer=os.environ.get("PREFER", "concurrency"))
#: How a policy answers a death: the next command, None: it gives up. It may keep what it needs in `memory`.
Policy = Callable[[World, str, Outcome, "Run"], "str | None"]


@dataclass
class Run:
    """`launches` after the first death; `outcome` of the last."""

    launches: int = 0
    outcome: Outcome | None = None
    gave_up: bool = False
    kinds: list[str] = field(default_factory=list)
    attempts: list[Attempt] = field(default_factory=list)
    waited: bool = False


def deaths(count: int) -> list[World]:
    """Worlds in which the user's own command dies."""
    found: list[World] = []
    seed = 0
    while len(found) < count:
        world = random_world(seed)
        seed += 1
        if outcome(world, asked(world, parse_launch(world.command))).failed not in (None, "arguments"):
            found.append(world)
    return found


def run(world: World, policy: Policy) -> Run:
    command, done = world.command, Run()
    result = outcome(world, asked(world, parse_launch(command)))
    while result.failed is not None and done.launches < MAX_LAUNCHES:
        done.kinds.append(result.failed)
        following = policy(world, command, result, done)
        if following is None:
            done.gave_up = True
            break
        command = following
        done.launches += 1
        result = outcome(world, asked(world, parse_launch(command)))
    done.outcome = result
    return done


# -- the policies ------------------------------------------------------------------------------------------------------


def ours(world: World, command: str, result: Outcome, done: Run) -> str | None:
    verdict = judged(world, command, result)
    known = {"attempts": tuple(done.attempts), "vllm_version": world.version, "shape": config_shape(world)}
    plan = plan_next(verdict, command, SETTINGS, **known)  # type: ignore[arg-type]
    if plan.action == "wait":  # a neighbour that stays
        plan = plan_next(verdict, command, SETTINGS, waited=True, **known)  # type: ignore[arg-type]
    done.attempts.append(Attempt(verdict.kind, plan.changes))
    return plan.command if plan.action in ("adjust", "retry", "wait") else None


def config_shape(world: World) -> ModelShape:
    """What config.json says: without the hidden errors."""
    shape = world.shape
    full = -(-shape.layers // shape.full_every)
    return ModelShape(
        full_layers=full,
        window_layers=shape.layers - full,
        window=shape.window,
        kv_heads=shape.kv_heads,
        head_size=shape.head_size,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        vocabulary=shape.vocabulary,
        max_position=shape.max_position,
        parameters=int(shape.parameters),
        weights_bytes=int(shape.parameters * shape.weight_bytes),
        value_bytes=2.0,
    )


def judged(world: World, command: str, result: Outcome) -> Verdict:
    wanted = asked(world, parse_launch(command))
    lines = worlds.log_of(world, wanted, result)
    holders = (GpuHolder(9999, world.neighbours, "python"),) if world.neighbours else ()
    device = GpuMemory(0, "GPU-0", "GPU", world.total, world.free_at_start, holders)
    incident = Incident(
        "vllm",
        "2026-05-01T12:00:00+00:00",
        command=command,
        exit_status=1,
        log=tuple(LogLine(number, text) for number, text in enumerate(lines, 1)),
        gpus=(device,),
        gpus_before=(device,),
        vllm_version=world.version,
    )
    verdict = classify(incident)
    numbers = {"total_bytes": world.total, "free_bytes": world.free_at_start, **verdict.numbers}
    return replace(verdict, numbers=numbers)


def plain_restart(world: World, command: str, result: Outcome, done: Run) -> str | None:
    return command


def ladder(world: World, command: str, result: Outcome, done: Run) -> str | None:
    """×0.85 of utilisation, whatever happened (vllm watchdogs, ml-memguard's backoff)."""
    now = asked(world, parse_launch(command)).utilization * 0.85
    return with_flag(command, UTILIZATION, f"{now:.2f}") if now >= 0.1 else None


def common_advice(world: World, command: str, result: Outcome, done: Run) -> str | None:
    """Utilisation 0.7, then the length by halves."""
    if done.launches == 0:
        return with_flag(command, UTILIZATION, "0.7")
    length = asked(world, parse_launch(command)).length // 2
    return with_flag(command, LENGTH, str(length)) if length >= 64 else None


POLICIES: dict[str, Policy] = {
    "supervisor-vllm": ours,
    "restart unchanged": plain_restart,
    "utilisation × 0.85 each time": ladder,
    "utilisation 0.7, then half the length each time": common_advice,
}


# -- the account -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Account:
    healable: int
    healed: int
    mean_launches: float
    p95_launches: int
    max_launches: int
    capacity: float
    impossible: int
    recognised: int
    wasted_launches: int


def account(some: list[World], bests: dict[int, Outcome | None], policy: Policy) -> tuple[Account, dict[int, Run]]:
    runs = {world.seed: run(world, policy) for world in some}
    healable = [world for world in some if bests[world.seed]]
    impossible = [world for world in some if not bests[world.seed]]
    healed = [world for world in healable if _served(runs[world.seed])]
    launches = sorted(runs[world.seed].launches for world in healed) or [0]
    kept = sum(min(1.0, _capacity(runs[world.seed]) / max(1, bests[world.seed].capacity)) for world in healable)  # type: ignore[union-attr]
    return Account(
        healable=len(healable),
        healed=len(healed),
        mean_launches=statistics.mean(launches),
        p95_launches=launches[min(len(launches) - 1, int(len(launches) * 0.95))],
        max_launches=launches[-1],
        capacity=kept / max(1, len(healable)),
        impossible=len(impossible),
        recognised=sum(runs[world.seed].gave_up for world in impossible),
        wasted_launches=sum(runs[world.seed].launches for world in impossible),
    ), runs


def _served(done: Run) -> bool:
    return done.outcome is not None and done.outcome.failed is None


def _capacity(done: Run) -> int:
    return done.outcome.capacity if done.outcome and done.outcome.failed is None else 0


def main() -> None:
    some = deaths(int(os.environ.get("WORLDS", "500")))
    bests = {world.seed: worlds.best(world, context_first=SETTINGS.prefer == "context") for world in some}
    lines = [
        "| policy | healed | launches: mean, p95, max | capacity kept | impossible seen as such | launches on them |"
    ]
    lines.append("|---|---|---|---|---|---|")
    all_runs = {}
    for name, policy in POLICIES.items():
        counted, all_runs[name] = account(some, bests, policy)
        lines.append(
            f"| {name} | {counted.healed} of {counted.healable} | {counted.mean_launches:.2f}, {counted.p95_launches}, "
            f"{counted.max_launches} | {counted.capacity:.1%} | {counted.recognised} of {counted.impossible} | "
            f"{counted.wasted_launches} |"
        )
    runs = all_runs["supervisor-vllm"]
    lines += [
        "",
        "Ours by the first death:",
        "",
        "| first death | worlds | healable | healed | launches | capacity kept |",
    ]
    lines.append("|---|---|---|---|---|---|")
    for kind, number in sorted(Counter(runs[world.seed].kinds[0] for world in some).items()):
        of_kind = [world for world in some if runs[world.seed].kinds[0] == kind]
        counted, _ = account(of_kind, bests, ours)
        if counted.healable:
            lines.append(
                f"| {kind} | {number} | {counted.healable} | {counted.healed} | {counted.mean_launches:.2f} | "
                f"{counted.capacity:.1%} |"
            )
        else:
            lines.append(f"| {kind} | {number} | 0 | | | |")
    print("\n".join(lines))
    if "--write" in sys.argv:
        write_made(ROOT / "docs" / "accuracy.md", _MARK, "\n".join(lines), section=_SECTION)
    if {"-v", "-vv"} & set(sys.argv):
        for world in some:
            mine, top = runs[world.seed], bests[world.seed]
            share = _capacity(mine) / top.capacity if top and top.capacity else 0.0
            if top and (mine.launches > 1 or share < 0.95) and (share < 0.01 or "-vv" in sys.argv):
                print(world.seed, mine.kinds, mine.launches, f"{share:.0%}", world.version, world.command, top.length)
                print(
                    "      ",
                    {k: round(v / 2**30, 2) for k, v in (mine.outcome.numbers or {}).items()},
                    round(world.total / 2**30, 1),
                    round(world.free_at_start / 2**30, 1),
                ) if mine.outcome else None
                for attempt in mine.attempts:
                    print(
                        "      ", attempt.kind, [(change.flag, change.from_, change.to) for change in attempt.changes]
                    )


if __name__ == "__main__":
    main()
