"""Weights and moments that were written to while nothing may write to them."""

from __future__ import annotations

import torch
from torch import Tensor

from harness.detectors.base import Detector, Values


class Checksum(Detector):
    """An alarm where weights or moments changed between the beginning of a step and its update; of the step before.

    It sees any single bit of theirs that flips in memory, however low (harness/readings/at_rest.py), and beside a loss
    that is not finite nothing else: no wrong batch, activation, gradient or update. It remembers nothing.
    """

    watches = ("loss", "weights_changed", "moment_1_changed", "moment_2_changed")
    source = "ours; sums as in Huang and Abraham 1984, doi 10.1109/TC.1984.1676475"
    blind = "memory that keeps what it was given has no jump"
    of_zero = "it counts what has changed, of which there is none"

    def score(self, values: Values) -> tuple[Tensor, Tensor]:
        changed = torch.stack([values[name] for name in self.watches if name != "loss"]).amax(0)
        return changed, torch.zeros_like(changed)
