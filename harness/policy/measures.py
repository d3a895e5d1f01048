"""What is measured of a rollout: rewards, distances between policies, and how varied the text is."""

from __future__ import annotations

import torch
from torch import Tensor

from harness.data.batches import GOLDEN, mix, signed
from harness.model import sums
from harness.policy.advantages import spread, zero_spread
from harness.rewards.base import occurred, repeated

MEASURES = (
    *(
        "quality",
        "reward_spread",
        "zero_spread",
        "reference_kl",
        "reference_kl_k3",
        "token_entropy",
        "mismatch",
        "mismatch_max",
    ),
    *("completion_length", "distinct", "repeated"),
)
"""Names, in the order of the columns of `measured`."""


def measured(
    quality_RxB: Tensor, rewards_RxB: Tensor, group: int, tokens_RxBxT: Tensor, mask: Tensor, scored: ScoredTokens
) -> Tensor:
    """All of them, float64 [R, n], of the completions of a rollout.

    A token to which the sampler gave NaN, which only a sampler apart can do in a run that goes on, had no probability
    there: both mismatches are infinite, since NaN stands for what was not measured.
    """
    lengths = mask.sum(-1).double()
    k1 = torch.where(mask, scored.old - scored.reference, 0.0).double()
    mismatch = torch.where(mask, scored.behaviour - scored.old, 0.0).double()
    mismatch = torch.where(mismatch.isnan(), torch.inf, mismatch)
    found = {
        "quality": sums.mean(quality_RxB.double()),
        "reward_spread": spread(rewards_RxB.double()),
        "zero_spread": zero_spread(rewards_RxB, group),
        "reference_kl": sums.mean(sums.total(k1)),
        "reference_kl_k3": sums.mean(sums.total(torch.where(mask, scored.k3, 0.0).double())),
        "token_entropy": _of_tokens(scored.entropy, mask),
        "mismatch": _of_tokens(mismatch, mask),
        "mismatch_max": mismatch.abs().flatten(1).amax(1),
        "completion_length": sums.mean(lengths),
        "distinct": distinct(tokens_RxBxT, group),
        "repeated": sums.mean(repeated(tokens_RxBxT, mask)),
    }
    return torch.stack([found[name] for name in MEASURES], 1)


def _of_tokens(x_RxBxT: Tensor, mask_RxBxT: Tensor) -> Tensor:
    """The mean over the tokens that count, float64 [R]."""
    total = sums.total(torch.where(mask_RxBxT, x_RxBxT.double(), 0.0).flatten(1))
    return total / mask_RxBxT.flatten(1).sum(1)


def distinct(tokens_RxBxT: Tensor, group: int) -> Tensor:
    """The share of completions that none before them of their group equals, float64 [R]."""
    places = torch.arange(1, tokens_RxBxT.shape[-1] + 1, device=tokens_RxBxT.device) * signed(GOLDEN)
    names = mix(tokens_RxBxT + places).sum(-1).unflatten(1, (-1, group))
    return (~occurred(names)).flatten(1).sum(1).double() / tokens_RxBxT.shape[1]


def correlation(one_RxB: Tensor, other_RxB: Tensor) -> Tensor:
    """Pearson's, of each row, float64 [R]; 0 where one of them has no spread."""
    first, second = (x - sums.mean(x)[:, None] for x in (one_RxB, other_RxB))
    size = (sums.total(first * first) * sums.total(second * second)).sqrt()
    has_spread = (spread(one_RxB) > 0) & (spread(other_RxB) > 0)
    return torch.where(has_spread, sums.total(first * second) / torch.where(has_spread, size, 1.0), 0.0)


class ScoredTokens:
    """Log-probabilities of a rollout's tokens under its policies, entropies, k3, a critic's values, [R, B, T] each."""

    def __init__(self, like: Tensor, has_critic: bool = False):
        zeros = (torch.zeros_like(like) for _ in range(5))
        self.old, self.behaviour, self.reference, self.entropy, self.k3 = zeros
        self.values = torch.zeros_like(like) if has_critic else None
