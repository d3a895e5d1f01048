"""Smaller gradients of the embedding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from harness.config import PER_TRIAL, number
from harness.recovery.base import Action, Detail, Row


@dataclass(frozen=True)
class Options:
    """`playbook.shrink_embedding.*`."""

    factor: float = number(PER_TRIAL, 0.1, "what the embedding's gradient is multiplied by", above=0, high=1)


class ShrinkEmbedding(Action):
    """The embedding's gradient is multiplied by a factor from there on, before its norm is taken."""

    takes = True
    changes_course = True
    source = "GLM-130B, Zeng et al. 2022, arXiv 2210.02414, section 3.3"

    def do(self, row: Row, options: Any) -> Detail:
        row.scale_embedding(options.factor)
        return {"factor": options.factor}
