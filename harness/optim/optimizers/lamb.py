"""LAMB: Adam's steps, each matrix's scaled to the size of its weights."""

from __future__ import annotations

import torch
from torch import Tensor

from harness.optim.optimizers.adamw import ADAM, adam_direction, corrections, moments
from harness.optim.optimizers.base import Numbers, Optimizer, Piece, norm


class Lamb(Optimizer):
    """You et al. 2020 (arXiv 1904.00962), algorithm 2, with phi(z) = z as in the paper's own runs.

    A matrix's step is Adam's, times |W| / |step|; that ratio is 1 where one of them is zero, as in the authors' code.
    Vectors take Adam's step as it is: the code leaves norms and biases out. Adam's moments are corrected as the paper
    has it; the code does not. The paper adds weight decay to the step before its norm is taken; here it is decoupled.
    """

    slots = ("moment_1", "moment_2")
    per_tensor = True
    rule = "relative"
    hyperparameters = ADAM

    def numbers(self, h: Numbers) -> Numbers:
        return corrections(h, h["count"])

    def update(self, piece: Piece, h: Numbers) -> Tensor:
        first, root = moments(piece, h, piece.gradients)
        direction = adam_direction(piece, h, first, root)
        return direction.mul_(trust_ratio(norm(piece.weights), norm(direction))) if piece.is_matrix else direction


def trust_ratio(weights: Tensor, direction: Tensor) -> Tensor:
    """The quotient of two norms [r, 1]; 1 where one of them is zero."""
    return torch.where((weights == 0) | (direction == 0), 1.0, weights / direction)
