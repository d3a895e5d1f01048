"""What is measured of a step on a rollout: how far the policy has moved since, and how much of it is clipped."""

from __future__ import annotations

import torch
from torch import Tensor

from harness.model import sums
from harness.model.layers import for_each_trial
from harness.policy.critic import ValueParts, Values, explained
from harness.policy.losses import Completions, LossParts

STEP_TAP, ROLLOUT_TAP, PROXY_TAP = "policy.step", "policy.rollout", "policy.proxy"
VALUE_TAP, ENTROPY_TAP, TEXT_TAP = "policy.values", "policy.entropy", "policy.text"
ROUTES_TAP = "policy.routes"
VALUE_MEASURES = ("value_loss", "value_clip_share", "value_explained")
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


def value_measures(parts: ValueParts, values: Values, mask: Tensor) -> Tensor:
    """Of a critic and the sequences of one pass, float64 [r, n], in the order of `VALUE_MEASURES`."""
    count = mask.flatten(1).sum(1)
    clipped = sums.total((parts.is_clipped & mask).flatten(1).double()) / count
    shown = explained(parts.errors, values.returns, mask)
    return torch.stack((parts.loss.detach().double(), clipped, shown), 1)
