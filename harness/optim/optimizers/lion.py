"""Lion: the sign of a momentum."""

from __future__ import annotations

import torch
from torch import Tensor

from harness.optim.optimizers.base import BETAS, Numbers, Optimizer, Piece


class Lion(Optimizer):
    """Chen et al. 2023 (arXiv 2302.06675), algorithm 2; its defaults are beta1 0.9 and beta2 0.99.

    Every element moves by the rate, so rates are 3 to 10 times smaller than AdamW's (section 5). An infinite gradient
    leaves finite weights, but stays in the momentum: its element moves by the rate in that direction for good.
    """

    slots = ("moment_1",)
    repairs_infinity = True
    hyperparameters = BETAS

    def update(self, piece: Piece, h: Numbers) -> Tensor:
        momentum, gradients = piece.slots["moment_1"], piece.gradients
        between = (momentum * h["beta1"]).add_(gradients * h["rest1"])
        momentum.mul_(h["beta2"]).add_(gradients * h["rest2"])
        sign = torch.sign(between)
        return torch.clamp(between, sign, sign)  # torch's sign of NaN is 0, and this is NaN
