"""Losses of policy gradients, token by token: clipped ratios, penalties for leaving a reference, entropy.

Names and constants are those of TRL 1.16, whose `GRPOTrainer` and `RLOOTrainer` have the same formulas. Shapes: r rows,
b sequences, T tokens of a completion; what belongs to a whole sequence is [r, b] or [r, b, 1].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from harness.policy.probabilities import exponential, summed

LOSSES = ("ppo", "cispo")
LEVELS = ("token", "sequence", "product")
MEANS = ("tokens", "sequences", "longest")
KINDS = ("k1", "k2", "k3")
CORRECTIONS = ("none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


@dataclass(frozen=True)
class LossKind:
    """Which formulas: fields as `policy.*` has them.

    `loss`: `ppo` (Schulman et al. 2017, arXiv 1707.06347, equation 7) is the clipped surrogate of GRPO, DAPO and RLOO;
    `cispo` (MiniMax-M1, arXiv 2506.13585) weighs log-probabilities with ratios that are cut off and have no gradient.
    `level`: a ratio for each `token`; one for each `sequence`, the geometric mean (GSPO, arXiv 2507.18071); or the
    `product` of all of it (RLOO).
    """

    loss: str = "ppo"
    level: str = "token"
    penalty: str | None = None  # in the loss: k1, k2, k3
    is_penalty_weighted: bool = True
    correction: str = "none"


@dataclass(frozen=True)
class LossStrengths:
    """Numbers of each row, [r, 1, 1]; None: that part is off."""

    clip_low: Tensor
    clip_high: Tensor
    dual_clip: Tensor | None = None
    beta: Tensor | None = None
    entropy: Tensor | None = None
    correction_cap: Tensor | None = None
    off_policy: Tensor | None = None


@dataclass(frozen=True)
class Completions:
    """Tokens of some sequences, with their log-probabilities under several policies, [r, b, T] each.

    `logp` and `entropy` are those of the model that learns, and have gradients. `old`: of the model at the rollout, by
    the trainer; `behaviour`: by the sampler; `reference`: of the start. `mask`: which tokens count, a first one at
    least. `advantages` [r, b], or of each token [r, b, T]. `share` [r, b] is the weight of a sequence's tokens in the
    mean (`mean_shares`). `token_share` is that of a mean over all tokens.
    """

    logp: Tensor
    entropy: Tensor
    old: Tensor
    behaviour: Tensor
    reference: Tensor
    mask: Tensor
    advantages: Tensor
    share: Tensor
    token_share: Tensor


@dataclass(frozen=True)
class LossParts:
    """What is differentiated, [r], and how the step came to it: token by token, or sequence by sequence; detached.

    `ratio` and `is_clipped` are [r, b, T] or [r, b, 1]; of clipped ones no gradient of the surrogate is left.
    """

    loss: Tensor
    ratio: Tensor
    is_clipped: Tensor


def mean_shares(mask_RxBxT: Tensor, mean: str, dtype: torch.dtype) -> Tensor:
    """w [R, B], so that the mean over sequences of w times the sum over their tokens is the mean that is asked for.

    Args:
        mask_RxBxT: Which tokens count, of the whole batch.
        mean: `tokens`: over all tokens of the batch (DAPO, arXiv 2503.14476); `sequences`: over each sequence, then
            over sequences (GRPO); `longest`: over B times T, whatever the lengths (Dr. GRPO, arXiv 2503.20783).
        dtype: Of the result.
    """
    lengths = mask_RxBxT.sum(-1)
    if mean == "sequences":
        of = lengths
    elif mean == "tokens":
        of = lengths.sum(-1, keepdim=True).expand_as(lengths).double() / lengths.shape[-1]
    else:
        of = torch.full_like(lengths, mask_RxBxT.shape[-1])
    return (1 / of.double().clamp(min=1 / lengths.shape[-1])).to(dtype)


def of_sequences(x_rxbxT: Tensor, mask_rxbxT: Tensor) -> Tensor:
    """The sum over the tokens that count, [r, b, 1]."""
    return summed(torch.where(mask_rxbxT, x_rxbxT, 0.0))[..., None]


def mean_of_shares(share_rxb: Tensor, x_rxbxT: Tensor, mask_rxbxT: Tensor) -> Tensor:
    """The mean over sequences of their share times the sum over their tokens, [r]; see `mean_shares`."""
    return summed(share_rxb * of_sequences(x_rxbxT, mask_rxbxT)[..., 0]) / share_rxb.shape[1]


def penalties(kind: str, logp: Tensor, reference: Tensor) -> Tensor:
    """An estimate of KL(policy, reference) from each token, in nat (Schulman 2020, "Approximating KL divergence").

    With d = log p - log p_ref: k1 = d, k2 = d^2 / 2, k3 = e^-d + d - 1. k1 and k3 have the mean KL, and k3 is never
    negative. On policy the gradient of k2 is that of the KL; the gradient of k1 has the mean 0.
    """
    off = logp - reference
    if kind == "k1":
        return off
    return off * off / 2 if kind == "k2" else exponential(-off) + off - 1


def correction_weights(kind: str, completions: Completions, cap: Tensor) -> Tensor:
    """By how much a token counts whose sampler and trainer disagree, [r, b, T] or [r, b, 1].

    p_trainer / p_sampler at the rollout, of tokens or of whole sequences; beyond the cap it is the cap (`truncate`: Yao
    et al. 2025) or 0 (`mask`). Exactly 1 where both agree.
    """
    off = torch.where(completions.mask, completions.old - completions.behaviour, 0.0)
    level, rule = kind.split("_")
    ratio = exponential(off if level == "token" else of_sequences(off, completions.mask))
    return torch.minimum(ratio, cap) if rule == "truncate" else torch.where(ratio > cap, 0.0, ratio)


def surrogate(kind: LossKind, strengths: LossStrengths, completions: Completions) -> LossParts:
    """The loss of these sequences, whose gradient is the policy's, and how it came about."""
    of, mask, advantages = completions, completions.mask, completions.advantages
    advantages = advantages if advantages.dim() == mask.dim() else advantages[..., None]
    log_ratio = torch.where(mask, of.logp - of.old, 0.0)
    if kind.level != "token":
        log_ratio = of_sequences(log_ratio, mask)
        log_ratio = log_ratio / mask.sum(-1, keepdim=True) if kind.level == "sequence" else log_ratio
    ratio = exponential(log_ratio)
    low, high = 1 - strengths.clip_low, 1 + strengths.clip_high
    if kind.loss == "cispo":
        loss = -torch.minimum(ratio, high).detach() * advantages * of.logp
        is_clipped = ratio > high
    else:
        within = torch.clamp(ratio, low, high)
        loss = -torch.minimum(ratio * advantages, within * advantages)
        is_clipped = ((ratio < low) & (advantages < 0)) | ((ratio > high) & (advantages > 0))
        if strengths.dual_clip is not None:  # Ye et al. 2020, arXiv 1912.09729, equation 5
            most = -strengths.dual_clip * advantages
            is_most = (advantages < 0) & (loss > most)
            loss, is_clipped = torch.where(is_most, most, loss), is_clipped | is_most
    loss = loss.expand_as(of.logp)
    if strengths.off_policy is not None:  # DeepSeek-V3.2's off-policy sequence mask
        apart = of_sequences(of.behaviour - of.logp.detach(), mask) / mask.sum(-1, keepdim=True)
        loss = torch.where((advantages >= 0) | (apart <= strengths.off_policy), loss, 0.0)
    if kind.correction != "none" and strengths.correction_cap is not None:
        loss = loss * correction_weights(kind.correction, of, strengths.correction_cap)
    if kind.penalty is not None and strengths.beta is not None:
        penalty = penalties(kind.penalty, of.logp, of.reference)
        loss = loss + strengths.beta * (penalty * ratio if kind.is_penalty_weighted else penalty)
    total = mean_of_shares(of.share, loss, mask)
    if strengths.entropy is not None:
        bonus = mean_of_shares(of.token_share, of.entropy, mask)
        total = total - strengths.entropy.flatten() * bonus
    return LossParts(total, ratio.detach(), is_clipped)
