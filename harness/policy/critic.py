"""A critic: what each token's state is worth by a value head, advantages from that, and the loss that it learns by.

Proximal policy optimization as it is done with language models: Schulman et al. 2017, arXiv 1707.06347; Ziegler et al.
2019, arXiv 1909.08593, whose penalty is part of the reward of each token; generalized advantage estimation, Schulman et
al. 2015, arXiv 1506.02438. Shapes: R rows, B completions of T tokens. A token's state is that from which it is drawn.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from harness.model import sums
from harness.model.gradients import WithBackward, differentiable
from harness.model.layers import Leaf
from harness.policy.losses import mean_of_shares


@differentiable
def state_values(states_RxNxD: Tensor, leaf: Leaf) -> WithBackward[Tensor]:
    """Each state times the value head [R, 1, D], [R, N], in the precision of its weights."""

    def backward(dy: Tensor, states: Tensor, weight: Tensor) -> Tensor:
        sums.total_into(leaf.gradient[:, 0], dy[..., None] * states, 1)
        return dy[..., None] * weight

    states = states_RxNxD.to(leaf.weight.dtype)
    return sums.total(states * leaf.weight), backward, (states, leaf.weight)


def token_rewards(rewards_RxB: Tensor, penalties_RxBxT: Tensor | None, mask_RxBxT: Tensor) -> Tensor:
    """The reward of a completion at its last token, and what each token pays for leaving the reference, [R, B, T].

    Args:
        rewards_RxB: Of whole completions.
        penalties_RxBxT: What is taken off at each token; None: nothing (Ziegler et al. 2019, equation 2).
        mask_RxBxT: Which tokens count, the first ones.
    """
    goes_on = torch.cat((mask_RxBxT[..., 1:], torch.zeros_like(mask_RxBxT[..., :1])), -1)
    is_last = mask_RxBxT & ~goes_on
    found = torch.where(is_last, rewards_RxB[..., None], 0.0)
    return found if penalties_RxBxT is None else found - torch.where(mask_RxBxT, penalties_RxBxT, 0.0)


def estimated_advantages(
    rewards_RxBxT: Tensor, values_RxBxT: Tensor, mask_RxBxT: Tensor, gamma_R: Tensor, gae_R: Tensor
) -> Tensor:
    """Generalized advantage estimates of tokens, [R, B, T], in the type of the rewards; 0 behind the last token.

    With delta_t = r_t + gamma V_(t+1) - V_t, A_t = delta_t + gamma lambda A_(t+1); behind the last token V and A are 0.
    """
    values = torch.where(mask_RxBxT, values_RxBxT, 0.0).to(rewards_RxBxT)
    gamma, decay = gamma_R[:, None], (gamma_R * gae_R)[:, None]
    value, advantage = torch.zeros_like(values[..., 0]), torch.zeros_like(values[..., 0])
    found = []
    for place in reversed(range(values.shape[-1])):
        advantage = rewards_RxBxT[..., place] + gamma * value - values[..., place] + decay * advantage
        advantage = torch.where(mask_RxBxT[..., place], advantage, 0.0)
        value = values[..., place]
        found.append(advantage)
    return torch.stack(found[::-1], -1)


def whitened(x_RxBxT: Tensor, mask_RxBxT: Tensor) -> Tensor:
    """Less their mean over all tokens of the batch, over their sample standard deviation; 0 where all are equal."""
    count = mask_RxBxT.flatten(1).sum(1)[:, None, None]
    first = x_RxBxT[:, :1, :1]  # of a first token, which counts
    off = torch.where(mask_RxBxT, x_RxBxT - first, 0.0)
    off = torch.where(mask_RxBxT, off - sums.total(off.flatten(1))[:, None, None] / count, 0.0)
    width = (sums.total((off * off).flatten(1))[:, None, None] / (count - 1).clamp(min=1)).sqrt()
    is_flat = (~mask_RxBxT | (x_RxBxT == first)).flatten(1).all(1)[:, None, None]
    return torch.where(mask_RxBxT & ~is_flat, off / width, 0.0)


@dataclass(frozen=True)
class Values:
    """Values of the tokens' states, [r, b, T] each: `now`, with a gradient, those at the rollout, and what came of it.

    `returns` are the advantages, before whitening and faults, plus the values at the rollout. `weight` and `clip`
    [r, 1, 1] are `policy.value_loss` and `policy.value_clip`.
    """

    now: Tensor
    old: Tensor
    returns: Tensor
    weight: Tensor
    clip: Tensor


@dataclass(frozen=True)
class ValueParts:
    """The loss of the critic, [r]; which tokens' values are clipped, and squared errors, [r, b, T], detached."""

    loss: Tensor
    is_clipped: Tensor
    errors: Tensor


def value_loss(values: Values, token_share_rxb: Tensor, mask_rxbxT: Tensor) -> ValueParts:
    """c / 2 times the mean over tokens of the larger squared error: that of the value, or of one near the old value.

    As in openai/baselines' ppo2 and TRL's PPO trainer: values that have moved from those at the rollout by more than
    the clip are taken at the clip.
    """
    now, clip = values.now, values.clip
    near = values.old + torch.clamp(now - values.old, -clip, clip)
    plain, clipped = (now - values.returns) ** 2, (near - values.returns) ** 2
    loss = mean_of_shares(token_share_rxb, torch.maximum(plain, clipped), mask_rxbxT)
    return ValueParts(values.weight.flatten() / 2 * loss, (clipped > plain).detach(), plain.detach())


def explained(errors_rxbxT: Tensor, returns_rxbxT: Tensor, mask_rxbxT: Tensor) -> Tensor:
    """1 - mean squared error of values / variance of returns, [r], float64; NaN where returns do not vary."""
    count = mask_rxbxT.flatten(1).sum(1)
    errors = sums.total(torch.where(mask_rxbxT, errors_rxbxT.double(), 0.0).flatten(1)) / count
    returns = torch.where(mask_rxbxT, returns_rxbxT.double(), 0.0)
    mean = sums.total(returns.flatten(1)) / count
    off = torch.where(mask_rxbxT, returns - mean[:, None, None], 0.0).flatten(1)
    variance = sums.total(off * off) / count
    found: Tensor = torch.where(variance == 0, torch.nan, 1 - errors / variance)
    return found
