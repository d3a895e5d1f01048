"""Another reference for a policy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from harness.config import Trial
from harness.recovery.base import Action, Detail, Row, not_a_policy


class ResetReference(Action):
    """The model as it is becomes the reference from which a penalty holds the policy: it may leave the old one.

    From the next rollout on. After `roll_back` in the same rung it is the model of the snapshot.
    """

    takes = True
    changes_course = True
    source = "ProRL, Liu et al. 2025, arXiv 2505.24864, where moments begin anew, too"

    @classmethod
    def refused(cls, trial: Trial) -> Iterator[str]:
        yield from not_a_policy(trial, "reset_reference")

    def do(self, row: Row, options: Any) -> Detail:
        row.reset_reference()
        return {}
