"""A stronger penalty on leaving the reference."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from harness.config import PER_TRIAL, Trial, number
from harness.recovery.base import Action, Detail, Row, not_a_policy


@dataclass(frozen=True)
class Options:
    """`playbook.raise_penalty.*`."""

    factor: float = number(PER_TRIAL, 2.0, "what policy.beta is multiplied by, each time", low=1)
    least: float = number(PER_TRIAL, 0.01, "what policy.beta is at least from then on", above=0)


class RaisePenalty(Action):
    """The constant of the KL penalty is multiplied by a factor, and at least so much, for good.

    A schedule of it goes on: an adaptive constant may fall again.
    """

    takes = True
    changes_course = True
    source = "ours; a constant that rises with the KL is of Ziegler et al. 2019, arXiv 1909.08593, section 2.2"

    @classmethod
    def refused(cls, trial: Trial) -> Iterator[str]:
        yield from not_a_policy(trial, "raise_penalty")
        if trial.objective.name == "policy" and trial.section("policy").beta is None:
            yield "playbook: raise_penalty: policy.beta=null: there is no penalty; allowed: a number, 0 too"

    def do(self, row: Row, options: Any) -> Detail:
        return {"beta": row.raise_penalty(options.factor, options.least)}
