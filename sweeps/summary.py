"""What is planned and what came of it, in words."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from harness.config import Model
from sweeps.planner import PackPlan, Plan, pack_bytes, wall_seconds
from sweeps.run import Elsewhere, Failed, Finished
from sweeps.settings import Run


def count(number: int, noun: str) -> str:
    """`1 pack`, `2 packs`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def print_plan(plan: Plan, device: str, workers: int, console: Console) -> None:
    """The trials, the packs by shape, memory and time."""
    say_counts(plan, console)
    shapes: dict[tuple, list[PackPlan]] = {}
    for pack in plan.packs:
        shapes.setdefault(pack.trials[0].structure, []).append(pack)
    for packs in shapes.values():
        trial = packs[0].trials[0]
        model, train = trial.model, trial.train
        sizes = sorted({len(pack.trials) for pack in packs})
        span = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
        changed = [
            f"{k} {v}" for k, v in vars(model).items() if v != getattr(Model(), k) and k not in ("width", "depth")
        ]
        console.print(
            f"  width {model.width}, depth {model.depth}{''.join(f', {words}' for words in changed)}: "
            f"{count(len(packs), 'pack')} of {span} trials, batch {train.batch} x {model.context} tokens, "
            f"{trial.steps} steps, {max(map(pack_bytes, packs)) / 2**20:,.0f} MiB a pack",
            highlight=False,
            soft_wrap=True,
        )
    seconds = wall_seconds(plan, device, workers)
    console.print(f"about {_duration(seconds)} with {count(workers, 'worker')} on {device} (rough)", highlight=False)


def say_counts(plan: Plan, console: Console) -> None:
    """What was asked for, and what of it is to be trained."""
    words = f"{count(plan.asked, 'trial')} asked for, {count(plan.added_twins, 'golden twin')} added, "
    words += f"{plan.complete} complete already: {plan.trials} to train in {count(len(plan.packs), 'pack')}"
    console.print(words, highlight=False, soft_wrap=True)


def summarize(plan: Plan, run: Run, results: Sequence[Finished | Failed | Elsewhere], console: Console) -> None:
    """What came of it; each failed pack with the place of its trace."""
    outcomes: dict[str, int] = {}
    failed = [result for result in results if isinstance(result, Failed)]
    finished = [result for result in results if isinstance(result, Finished)]
    for result in finished:
        for outcome in result.outcome:
            outcomes[outcome] = outcomes.get(outcome, 0) + 1
    words = ", ".join(f"{number} {outcome}" for outcome, number in sorted(outcomes.items())) or "none"
    console.print(f"trained {sum(outcomes.values())} of {count(plan.trials, 'trial')}: {words}", highlight=False)
    if idle := sum(result.idle_faults for result in finished):
        console.print(f"{count(idle, 'fault')} never fired, or wrote the value that was there", highlight=False)
    if others := sum(isinstance(result, Elsewhere) for result in results):
        words = f"{count(others, 'pack')} left to another process, which trains them; the same command looks again"
        console.print(words, highlight=False, soft_wrap=True)
    for failure in failed:
        line = f"pack {failure.pack} failed: {failure.reason}; trace in {failure.trace}"
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    console.print(f"results in {run.out}", highlight=False, soft_wrap=True)


def _duration(seconds: float) -> str:
    return (
        f"{seconds:.0f} s"
        if seconds < 120
        else f"{seconds / 60:.0f} min"
        if seconds < 7200
        else f"{seconds / 3600:.1f} h"
    )
