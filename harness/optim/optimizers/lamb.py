"""LAMB: Adam's steps, each matrix's scaled to the size of its weights."""

from __future__ import annotations

import torch
from torch import Tensor

from harness.optim.optimizers.adamw import Adam
from harness.optim.optimizers.base import Numbers, Piece, norm


class Lamb(Adam):
    """You et al. 2020 (arXiv 1904.00962), algorithm 2, with phi(z) = z as in the paper's own runs.

    A matrix's step is Adam's, times |W| / |step|; that ratio is 1 where one of them is zero, as in the authors' code.
    Vectors take Adam's step as it is: the code leaves norms and biases out. Adam's moments are corrected as the paper
    has it; the code does not. The paper adds weight decay to the step before its norm is taken; here it is decoupled.
    """

    per_tensor = True
    rule = "relative"

    def update(self, piece: Piece, h: Numbers) -> Tensor:
        direction = super().update(piece, h)
        return direction.mul_(trust_ratio(norm(piece.weights), norm(direction))) if piece.is_matrix else direction


def trust_ratio(weights: Tensor, direction: Tensor) -> Tensor:
    """The quotient of two norms [r, 1]; 1 where one of them is zero."""
    return torch.where((weights == 0) | (direction == 0), 1.0, weights / direction)
