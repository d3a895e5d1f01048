"""signSGD: the sign of the gradient, without any memory."""

from __future__ import annotations

from torch import Tensor

from harness.optim.optimizers.base import Numbers, Optimizer, Piece


class SignSGD(Optimizer):
    """Bernstein et al. 2018 (arXiv 1802.04434), algorithm 1: every weight moves by the rate, or not at all."""

    def update(self, piece: Piece, h: Numbers) -> Tensor:
        return piece.gradients.sign()
