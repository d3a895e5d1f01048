"""Clipping of each rank's gradient, before the mean over ranks is taken."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from harness.config import SWITCHED, number
from harness.optim.clippers.base import Clipper
from harness.optim.clipping import clipping_factor, scale_trials


@dataclass(frozen=True)
class Options:
    """`rank_clip.*`."""

    limit: float | None = number(SWITCHED, None, "largest gradient norm of each rank; null: any", above=0)


class RankClip(Clipper):
    """`rank_clip.limit`: the gradient of each rank scaled to a global norm of at most that, and then added up.

    torch.nn.utils.clip_grad_norm_ on every worker before the all-reduce: one that met a bad batch weighs no more in the
    mean than the others. The gradient that is reported, and that all other clippers see, is that mean. With one rank it
    is a clip of the whole gradient.
    """

    part = "rank_clip.limit"
    of_ranks = True

    def clip(self, gradients_RxP: Tensor, norm_R: Tensor, active_R: Tensor) -> Tensor:
        factor = torch.where(active_R, clipping_factor(norm_R, self.limit), 1.0)
        scale_trials(gradients_RxP, factor, self.layout)
        return factor != 1
