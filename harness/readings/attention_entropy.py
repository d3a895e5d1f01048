"""How sharp attention is: the entropy of its shares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from harness.model import sums
from harness.readings.base import ReadingSignal, TapReading, each_log, mean_of_ranks, score_taps

LOWEST = -1e4  # below the largest score; such a share is 0


class AttentionEntropy(TapReading):
    """-sum p log p of the softmax of each query, the mean over heads and queries.

    The mean, and not the sharpest head, because that is what collapses in Zhai et al. 2023 (arXiv 2303.06296), and one
    head that looks at a single token is no illness. Of the first sequence of each rank's batch or micro-batch: all of
    them would cost eight times as much. Where attention is fused, all are there, and all are taken.
    """

    cadence = 10
    help = "attention entropy of each layer"
    signals = {"attention_entropy": ReadingSignal(("layer",), "nat", "attention entropy, mean over heads and queries")}

    @classmethod
    def taps(cls, depth: int) -> Sequence[str]:
        return score_taps(depth)

    def measure(self, x: Tensor) -> Tensor:
        scores = x[:, 0].to(torch.promote_types(x.dtype, torch.float32))  # [r, H, T, T]
        shares = torch.softmax(scores, -1)
        below = (scores - scores.amax(-1, keepdim=True)).clamp_(min=LOWEST)
        mean = sums.total(below.mul_(shares))
        surprise = each_log(shares.amax(-1).contiguous()).add_(mean).neg_()  # of each query, [r, H, T]
        return sums.mean(surprise.flatten(1).double())

    def joined(self, values: Sequence[Tensor]) -> Mapping[str, Tensor]:
        return {"attention_entropy": torch.stack([mean_of_ranks(of_layer) for of_layer in values], 1)}
