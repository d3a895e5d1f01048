"""A data-parallel rank whose layers compute otherwise than those of its peers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from harness.config.fields import PER_TRIAL, number
from harness.detectors.base import Values, Windowed
from harness.detectors.options import length
from harness.detectors.windows import MAD_TO_STD, standardised
from harness.model import sums

LARGEST = 1e9  # deviations: more count no more, so that the mean over layers is a number where a spread is 0


@dataclass(frozen=True)
class Options:
    """`detect.gain_peers.*`."""

    alpha: float = number(PER_TRIAL, 2.5, "score of the top rank that is an alarm", above=0)
    lead: float = number(PER_TRIAL, 1.5, "multiple of the second rank's score that it has to be at least", low=1)
    window: int = length(64, "readings of which a rank's usual distance is taken")


class GainPeers(Windowed):
    """The log gain of each layer on a rank against the median of the other ranks', in its deviations from the usual.

    A distance is g - median of the others' g; its deviation abs(distance - median) / (1.4826 MAD), over the last 64. A
    rank's score is the mean over layers, and that of the step the top one, or 0 where it has no lead over the second.
    Silent until half of the window is filled. Needs three ranks.
    """

    watches = ("loss", "residual_gain")
    windowed = ("residual_gain",)
    least_ranks = 3
    blind = "what all ranks see alike is no rank's fault"
    source = "TrainSDC; that layers are joined by their mean, and how long it is silent, are ours"

    def score(self, values: Values) -> tuple[Tensor, Tensor]:
        self._distance = _distances(values["residual_gain"])
        median, mad = self.windows["residual_gain"].median_mad()
        off = standardised(self._distance, median, MAD_TO_STD * mad).abs().clamp(max=LARGEST)
        scores = sums.mean(off.mT.contiguous())  # [R, ranks]
        top, second = scores.topk(2, dim=1).values.unbind(1)
        score = torch.where(top >= self.numbers["lead"] * second, top, 0.0)
        return self.heard(self.options.window // 2, score), self.numbers["alpha"]

    def learn(self, values: Values, where_R: Tensor) -> None:
        self.windows["residual_gain"].add(self._distance, where_R)


def _distances(gains_RxLxK: Tensor) -> Tensor:
    """Of each rank's gain from the median of the others', [R, layers, ranks]."""
    ranks = gains_RxLxK.shape[-1]
    medians = []
    for rank in range(ranks):
        others = torch.cat([gains_RxLxK[..., :rank], gains_RxLxK[..., rank + 1 :]], -1).sort(-1).values
        medians.append((others[..., (ranks - 2) // 2] + others[..., (ranks - 1) // 2]) / 2)
    return gains_RxLxK - torch.stack(medians, -1)
