"""Sampling by common random numbers: what decides on a token is a function of seed, rollout, sequence and position.

So twins sample the same text until a fault strikes one of them, and share the noise after it, which leaves less noise
in their difference. There is no generator, and so nothing to store.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from harness.model.dropout import random_words, stream
from harness.rewards.base import cumulated

TEXT, NOISE = "policy.text", "policy.noise"  # places, as dropout has them, of which each has its own numbers
BITS = 53  # of a float64's mantissa


def streams_of(seeds: Sequence[int], rollouts: Sequence[int], places: Sequence[str]) -> Tensor:
    """Where the numbers of each place and row begin, int64 [places, R], in main memory."""
    rows = list(zip(seeds, rollouts, strict=True))
    return torch.tensor([[stream(seed, rollout, place) for seed, rollout in rows] for place in places])


def uniforms(streams_R: Tensor, shape: Sequence[int]) -> Tensor:
    """Numbers from 0 to 1, without 1: float64 [R, *shape]."""
    words = random_words(streams_R, range(torch.Size(shape).numel()))
    found: Tensor = ((words >> (64 - BITS)) & (2**BITS - 1)).double() * 2.0**-BITS
    return found.view(len(streams_R), *shape)


def drawn(logits_rxbxV: Tensor, uniforms_rxb: Tensor) -> Tensor:
    """The first token whose cumulated probability exceeds the uniform number, int64 [r, b], in float64.

    Of logits that are NaN it is token 0.
    """
    shares = torch.softmax(logits_rxbxV.double(), -1)
    is_below = cumulated(shares) <= uniforms_rxb[..., None]
    return is_below.sum(-1).clamp_(max=logits_rxbxV.shape[-1] - 1)
