"""A lower learning rate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from harness.config import PER_TRIAL, number
from harness.recovery.base import Action, Detail, Row


@dataclass(frozen=True)
class Options:
    """`playbook.lower_rate.*`."""

    factor: float = number(PER_TRIAL, 0.5, "what the rate is multiplied by, each time", above=0, high=1)
    steps: int | None = number(PER_TRIAL, None, "for so many steps; null: for good", low=1)


class LowerRate(Action):
    """The rate is multiplied by a factor, for a time or for good; it comes on top of the schedule."""

    takes = True
    changes_course = True
    source = "OPT logbook, Zhang et al. 2022, arXiv 2205.01068, section 2.5; the factor is ours"

    def do(self, row: Row, options: Any) -> Detail:
        row.scale_rate(options.factor, options.steps)
        return {"factor": options.factor}
