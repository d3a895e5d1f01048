"""What is asked of all ranks together by what acts after a step."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class OverRanks(Protocol):
    """Those of a pack (harness/training/ranks.py)."""

    def largest(self, values: Tensor) -> Tensor:
        """The largest of all ranks, element by element; NaN wins."""

    def total(self, values: Tensor) -> Tensor:
        """The sum over all ranks, element by element."""
