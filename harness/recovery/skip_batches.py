"""The next batches are left out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from harness.config import PER_TRIAL, Trial, number
from harness.recovery.base import Action, Detail, Row


@dataclass(frozen=True)
class Options:
    """`playbook.skip_batches.*`."""

    count: int = number(PER_TRIAL, 200, "batches that are left out", low=1)


class SkipBatches(Action):
    """The batches from the one at hand on are read over: with roll_back before it, those that led to the alarm too."""

    changes_course = True
    source = (
        "PaLM, Chowdhery et al. 2022, arXiv 2204.02311, section 5.1: some 100 steps back, 200 to 500 batches skipped"
    )

    @classmethod
    def refused(cls, trial: Trial) -> Iterator[str]:
        count = trial.section("playbook.skip_batches").count
        if count >= trial.steps:
            why = f"the run has {trial.steps} steps"
            yield f"playbook.skip_batches.count={count}: {why}; allowed: 1 to {max(1, trial.steps - 1)}"

    def do(self, row: Row, options: Any) -> Detail:
        row.read_on(options.count)
        return {"batches": options.count}
