"""StableAdamW: AdamW with Adafactor's way to shorten a step."""

from __future__ import annotations

import torch
from torch import Tensor

from harness.optim.optimizers.adamw import Adam
from harness.optim.optimizers.base import Numbers, Piece, rms


class StableAdamW(Adam):
    """Wortsman et al. 2023 (arXiv 2304.13013), algorithm 2: a tensor's rate is divided by max(1, RMS).

    RMS is the root mean square of g / max(sqrt(v), eps): above one where the second moment v lags behind the gradients.
    The paper corrects its betas where Adam corrects the moments, which is the same, and divides the rate of weight
    decay too; here decay goes by the whole rate.
    """

    per_tensor = True

    def update(self, piece: Piece, h: Numbers) -> Tensor:
        first, root = self.moments(piece, h, piece.gradients)
        lag = rms(piece.gradients / torch.maximum(root, h["eps"] * piece.segment.epsilon))
        return self.direction(piece, h, first, root).div_(lag.clamp_(min=1.0))
