"""What is planned and what came of it, in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.console import Console

from harness.basics.printing import count
from sweeps.compose.settings import Run
from sweeps.planning.planner import Plan
from sweeps.running.job import Elsewhere, Failed, Finished


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
    line = _trained(plan, finished)
    if is_idle:
        all_of_it = f"all {plan.complete} trials are" if plan.complete > 1 else "the trial is"
        line = f"nothing to train: {all_of_it} complete already"
    console.print(f"{name}: {line}" if name else line, soft_wrap=True)
    if idle := sum(result.idle_faults for result in finished):
        console.print(f"{count(idle, 'fault')} never fired, or wrote the value that was there", soft_wrap=True)
    if others := sum(isinstance(result, Elsewhere) for result in results):
        line = f"{count(others, 'pack')} left to another process, which trains them; the same command looks again"
        console.print(line, soft_wrap=True)
    for failure in failed:
        console.print(f"pack {failure.pack} failed: {failure.message}", soft_wrap=True)
    if not name:
        console.print(f"results in {run.out}", soft_wrap=True)


def _trained(plan: Plan, finished: Sequence[Finished]) -> str:
    """How many trials, and how they ended."""
    outcomes = Counter(outcome for result in finished for outcome in result.outcome)
    endings = ", ".join(f"{number} {outcome}" for outcome, number in sorted(outcomes.items()))
    return f"trained {outcomes.total()} of {count(plan.trials, 'trial')}" + (f": {endings}" if endings else "")
