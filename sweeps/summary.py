"""What is planned and what came of it, in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.console import Console

from sweeps.job import Elsewhere, Failed, Finished
from sweeps.planner import Plan
from sweeps.settings import Run


def count(number: int, noun: str) -> str:
    """`1 pack`, `2 packs`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def say_counts(plan: Plan, console: Console) -> None:
    """What was asked for, and what of it is to be trained."""
    words = f"{count(plan.asked, 'trial')} asked for, {count(plan.added_twins, 'golden twin')} added, "
    words += f"{plan.complete} complete already: {plan.trials} to train in {count(len(plan.packs), 'pack')}"
    console.print(words, soft_wrap=True)


def summarize(
    plan: Plan,
    run: Run,
    results: Sequence[Finished | Failed | Elsewhere],
    console: Console,
    is_idle: bool,
    name: str = "",
) -> None:
    """What came of it; each failed pack with the place of its trace.

    `is_idle`: there was nothing to train or to wait for. `name` is that of one round of many: the folder is left out.
    """
    failed = [result for result in results if isinstance(result, Failed)]
    finished = [result for result in results if isinstance(result, Finished)]
    words = f"nothing to train: {_all_complete(plan)}" if is_idle else _trained(plan, finished)
    console.print(f"{name}: {words}" if name else words, soft_wrap=True)
    if idle := sum(result.idle_faults for result in finished):
        console.print(f"{count(idle, 'fault')} never fired, or wrote the value that was there", soft_wrap=True)
    if others := sum(isinstance(result, Elsewhere) for result in results):
        words = f"{count(others, 'pack')} left to another process, which trains them; the same command looks again"
        console.print(words, soft_wrap=True)
    for failure in failed:
        console.print(f"pack {failure.pack} failed: {failure.words}", soft_wrap=True)
    if not name:
        console.print(f"results in {run.out}", soft_wrap=True)


def _all_complete(plan: Plan) -> str:
    return f"all {plan.complete} trials are complete already" if plan.complete > 1 else "the trial is complete already"


def _trained(plan: Plan, finished: Sequence[Finished]) -> str:
    """How many trials, and how they ended."""
    outcomes = Counter(outcome for result in finished for outcome in result.outcome)
    words = ", ".join(f"{number} {outcome}" for outcome, number in sorted(outcomes.items()))
    return f"trained {outcomes.total()} of {count(plan.trials, 'trial')}" + (f": {words}" if words else "")


def duration(seconds: float) -> str:
    """`90 s`, `12 min`, `3.5 h`."""
    return (
        f"{seconds:.0f} s"
        if seconds < 120
        else f"{seconds / 60:.0f} min"
        if seconds < 7200
        else f"{seconds / 3600:.1f} h"
    )
