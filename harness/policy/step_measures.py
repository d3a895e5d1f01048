"""What is measured of a step on a rollout: how far the policy has moved since, and how much of it is clipped."""

from __future__ import annotations

import torch
from torch import Tensor

from harness.model import sums
from harness.model.layers import for_each_trial
from harness.policy.losses import Completions, LossParts

STEP_TAP, ROLLOUT_TAP, PROXY_TAP = "policy.step", "policy.rollout", "policy.proxy"
STEP_MEASURES = ("surrogate_loss", "clip_share", "ratio_max", "ratio_squares", "ratio_sum", "step_kl")


def step_measures(parts: LossParts, completions: Completions) -> Tensor:
    """Of the sequences of one pass, float64 [r, n], in the order of `STEP_MEASURES`: means over them, and a maximum."""
    mask = completions.mask
    where = mask if parts.ratio.shape == mask.shape else mask[..., :1]
    ratio = torch.where(where, parts.ratio, 0.0).double().flatten(1)
    clipped = (parts.is_clipped & where).flatten(1).double()
    count = where.flatten(1).sum(1)
    moved = torch.where(mask, completions.logp.detach() - completions.old, 0.0).double()
    step_kl = for_each_trial(torch.exp, moved.clone()) - 1 - moved
    numbers = (
        *(parts.loss.detach().double(), sums.total(clipped) / count, ratio.amax(1)),
        *(sums.total(ratio * ratio) / count, sums.total(ratio) / count),
        sums.total(step_kl.flatten(1)) / mask.flatten(1).sum(1),
    )
    return torch.stack(numbers, 1)
