"""Sampling by common random numbers: what decides on a token is a function of seed, rollout, sequence and position.

So twins sample the same text until a fault strikes one of them, and share the noise after it, which leaves less noise
in their difference. There is no generator, and so nothing to store.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from harness.basics.devices import on_cpu, sent
from harness.model.dropout import random_words, stream

TEXT, NOISE = "policy.text", "policy.noise"  # places, as dropout has them, of which each has its own numbers
BITS = 53  # of a float64's mantissa


def uniforms(
    seeds: Sequence[int], rollouts: Sequence[int], shape: Sequence[int], place: str, device: torch.device
) -> Tensor:
    """Numbers from 0 to 1, without 1: float64 [R, *shape], of each row's seed and rollout, and of a place."""
    streams = [stream(seed, rollout, place) for seed, rollout in zip(seeds, rollouts, strict=True)]
    words = random_words(sent(torch.tensor(streams), device), range(torch.Size(shape).numel()))
    found: Tensor = ((words >> (64 - BITS)) & (2**BITS - 1)).double() * 2.0**-BITS
    return found.view(len(streams), *shape)


def drawn(logits_rxbxV: Tensor, uniforms_rxb: Tensor) -> Tensor:
    """The first token whose cumulated probability exceeds the uniform number, int64 [r, b], in float64.

    Of logits that are NaN it is token 0.
    """
    shares = torch.softmax(logits_rxbxV.double(), -1)
    is_below = cumulated(shares) <= uniforms_rxb[..., None]
    return is_below.sum(-1).clamp_(max=logits_rxbxV.shape[-1] - 1)


def cumulated(x_Rxxx: Tensor) -> Tensor:
    """The running sum along the last dim, whose order does not depend on the number of rows.

    On an accelerator torch cuts the scan as it likes; there each number is added to the one so many places before it.
    """
    if on_cpu(x_Rxxx):
        return x_Rxxx.cumsum(-1)
    ahead = 1
    while ahead < x_Rxxx.shape[-1]:
        x_Rxxx = torch.cat((x_Rxxx[..., :ahead], x_Rxxx[..., ahead:] + x_Rxxx[..., :-ahead]), -1)
        ahead *= 2
    return x_Rxxx
