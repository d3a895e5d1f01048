"""StableAdamW: AdamW with Adafactor's way to shorten a step."""

from __future__ import annotations

import torch
from torch import Tensor

from harness.optim.optimizers.adamw import ADAM, adam_direction, corrections, moments
from harness.optim.optimizers.base import Numbers, Optimizer, Piece, rms


class StableAdamW(Optimizer):
    """Wortsman et al. 2023 (arXiv 2304.13013), algorithm 2: a tensor's rate is divided by max(1, RMS).

    RMS is the root mean square of g / max(sqrt(v), eps): above one where the second moment v lags behind the gradients.
    The paper corrects its betas where Adam corrects the moments, which is the same, and divides the rate of weight
    decay too; here decay goes by the whole rate.
    """

    slots = ("moment_1", "moment_2")
    per_tensor = True
    hyperparameters = ADAM

    def numbers(self, h: Numbers) -> Numbers:
        return corrections(h, h["count"])

    def update(self, piece: Piece, h: Numbers) -> Tensor:
        first, root = moments(piece, h, piece.gradients)
        lag = rms(piece.gradients / torch.maximum(root, h["eps"] * piece.segment.epsilon))
        return adam_direction(piece, h, first, root).div_(lag.clamp_(min=1.0))
