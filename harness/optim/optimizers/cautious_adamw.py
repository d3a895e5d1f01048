"""Cautious AdamW: no element moves against its gradient."""

from __future__ import annotations

from torch import Tensor

from harness.optim.optimizers.adamw import Adam
from harness.optim.optimizers.base import Numbers, Piece


class CautiousAdamW(Adam):
    """Liang et al. 2024 (arXiv 2411.16085), algorithm 2: where momentum and gradient differ in sign, nothing moves.

    The other elements of a tensor move further, by n / (those that move + 1) for n elements in all.
    """

    per_tensor = True

    def update(self, piece: Piece, h: Numbers) -> Tensor:
        first, root = self.moments(piece, h, piece.gradients)
        moves = first * piece.gradients > 0
        share = piece.weights.shape[1] / (moves.sum(1, keepdim=True) + 1).to(first.dtype)
        # A product, so that what is not finite stays so.
        return self.direction(piece, h, first, root).mul_(moves).mul_(share)
