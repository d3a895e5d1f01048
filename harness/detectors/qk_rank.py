"""Steps that change the attention logits in ever fewer directions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from harness.config.fields import PER_TRIAL, STRUCTURAL, number
from harness.detectors.base import Values, Windowed

LOW = 2.0  # score of what is below the floor


@dataclass(frozen=True)
class Options:
    """`detect.qk_rank.*`."""

    fall: float = number(
        PER_TRIAL, 2.0, "multiple of a reading at which the median of those before is an alarm", above=1
    )
    floor: float = number(PER_TRIAL, 0.0, "rank below which it is an alarm, whatever was before", low=0)
    window: int = number(STRUCTURAL, 20, "readings of which the median is taken", low=2, high=10_000)


class QkRank(Windowed):
    """The median of a layer's last 20 effective ranks over twice the rank now; that of the step before.

    The rank is that of dWq Wk^T + Wq dWk^T (harness/readings/qk_rank.py). The score is that of the worst layer, with
    its limit at 1. Silent until half of the window is filled. What was an alarm is learned.
    """

    watches = ("loss", "qk_rank")
    learns_alarms = True
    blind = "a rank that rises is no collapse"
    source = "arXiv 2606.28116 takes this rank for an early warning; the rule and its constants are ours"

    def remember(self) -> None:
        self.windows = {"qk_rank": self.window("qk_rank", self.options.window)}

    def score(self, values: Values) -> tuple[Tensor, Tensor]:
        now = values["qk_rank"]
        median, _ = self.windows["qk_rank"].median_mad()
        fall = self.heard(self.options.window // 2, (median / now).amax(1) / self.numbers["fall"])
        is_low = now.amin(1) < self.numbers["floor"]
        return torch.where(is_low, torch.fmax(fall, torch.full_like(fall, LOW)), fall), torch.ones_like(fall)
