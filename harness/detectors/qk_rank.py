"""Steps that change the attention logits in ever fewer directions."""

from __future__ import annotations

from dataclasses import dataclass

from harness.config.fields import PER_TRIAL, number
from harness.detectors.base import Collapse
from harness.detectors.options import fall, length


@dataclass(frozen=True)
class Options:
    """`detect.qk_rank.*`."""

    fall: float = fall()
    floor: float = number(PER_TRIAL, 0.0, "rank below which it is an alarm, whatever was before", low=0)
    window: int = length(20, "readings of which the median is taken", low=2)


class QkRankDetector(Collapse):
    """The median of a layer's last 20 effective ranks over twice the rank now; that of the step before.

    The rank is that of dWq Wk^T + Wq dWk^T (harness/readings/qk_rank.py). The score is that of the worst layer, with
    its limit at 1. Silent until half of the window is filled. What was an alarm is learned.
    """

    watches = ("loss", "qk_rank")
    windowed = ("qk_rank",)
    blind = "a rank that rises is no collapse"
    source = "arXiv 2606.28116 takes this rank for an early warning; the rule and its constants are ours"
