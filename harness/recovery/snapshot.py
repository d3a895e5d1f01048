"""How snapshots are taken, to which actions go back."""

from __future__ import annotations

from dataclasses import dataclass

from harness.config import STRUCTURAL, number
from harness.config.fields import choice


@dataclass(frozen=True)
class Options:
    """`playbook.snapshot.*`: taken only of trials that are finite, and at whose last step was no alarm."""

    every: int = number(STRUCTURAL, 10, "steps from one snapshot to the next", low=1)
    kept: int = number(STRUCTURAL, 2, "how many of them, the newest", low=1, high=1000)
    on: str = choice(STRUCTURAL, "device", "where they are kept", "device", "host")

    @property
    def history(self) -> int:
        """Steps by which the oldest snapshot lies back, at least."""
        return self.every * (self.kept - 1)
