"""Stable-SPAM: Adam on gradients whose spikes and norms are held to what they have been."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from harness.config import PER_TRIAL, number
from harness.optim.optimizers.adamw import falls_short
from harness.optim.optimizers.base import Numbers, Piece, norm, options
from harness.optim.optimizers.spam import Resetting, interval, interval_share, reset_count


@dataclass(frozen=True)
class Options:
    """`stable_spam.*`, with the defaults of the authors' code, but for the interval, which there is 1000 steps."""

    gamma1: float = number(PER_TRIAL, 0.7, "decay of the mean of a tensor's gradient norms", low=0, below=1)
    gamma2: float = number(PER_TRIAL, 0.9, "decay of the mean of their squares", low=0, below=1)
    gamma3: float = number(PER_TRIAL, 0.999, "decay of the mean of a gradient's largest element", low=0, below=1)
    interval: int | None = interval(1000)
    interval_share: float = interval_share(0.4)
    reset_count: bool = reset_count(True)


class StableSpam(Resetting):
    """Huang et al. 2025 (arXiv 2502.17055), algorithm 1, as in the authors' code (StableSPAM).

    For each tensor: elements above the moving average T of the largest, max|g|, are multiplied by T / max|g| (AdaClip);
    the gradient is then scaled to the norm m / (sqrt(v) + eps), m and v being moving averages of its norm and of the
    square (AdaGN); Adam follows. At every `interval`-th step its two moments start at zero. All averages are corrected
    for having started at zero. The code corrects those of AdaClip and AdaGN by the count that a reset starts anew,
    though they remember more, which lets everything through after it; here, as in pytorch-optimizer, by all steps. At a
    reset the code also takes the step that is under way with the old moments, corrected as if they were of the first
    step, and what starts at zero is used from the next step on, as if it were the second; here the step of the reset is
    the first one of the new moments. Its cosine on beta1, off by default, is left out.
    """

    section = "stable_spam"
    tensor_slots = dict.fromkeys(("largest_gradient", "gradient_norm", "squared_gradient_norm"), lambda scaled: 1)
    per_tensor = True
    parts = ("stable_spam.interval",)
    hyperparameters = options("stable_spam", "gamma1", "gamma2", "gamma3")

    def numbers(self, h: Numbers) -> Numbers:
        averages = {f"share{i}": falls_short(h[f"gamma{i}"], h["count"]) for i in (1, 2, 3)}
        rests = {f"rest_gamma{i}": 1 - h[f"gamma{i}"] for i in (1, 2, 3)}
        return {**super().numbers(h), **averages, **rests}

    def held(self, piece: Piece, h: Numbers) -> Tensor:
        """The gradient [r, n] after AdaClip and AdaGN."""
        sizes = piece.gradients.abs()
        largest = sizes.amax(1, keepdim=True)
        limit = _average(piece.slots["largest_gradient"], largest, h, 3)
        # Not torch.where, which on a CPU takes several times as long.
        spikes = sizes.gt_(limit).mul_(piece.gradients)
        gradients = (piece.gradients - spikes).add_(spikes.mul_(_quotient(limit, largest)))
        size = norm(gradients)
        mean = _average(piece.slots["gradient_norm"], size, h, 1)
        root = _average(piece.slots["squared_gradient_norm"], size * size, h, 2).sqrt()
        wanted = mean / (root + h["eps"] * piece.segment.epsilon)
        return gradients.mul_(_quotient(wanted, size))


def _quotient(x: Tensor, y: Tensor) -> Tensor:
    """x / y, and 1 where y is zero: then there is nothing to scale."""
    return torch.where(y == 0, 1.0, x / y)


def _average(slot: Tensor, values: Tensor, h: Numbers, number: int) -> Tensor:
    """Take values [r, 1] into the moving average of gamma `number`, and return it corrected for its start at zero."""
    return slot.mul_(h[f"gamma{number}"]).add_(values * h[f"rest_gamma{number}"]) / h[f"share{number}"]
