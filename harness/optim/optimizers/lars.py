"""LARS: momentum SGD, each matrix's gradient scaled to the size of its weights."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from harness.config import PER_TRIAL, number
from harness.optim.optimizers.base import Numbers, Optimizer, Piece, norm, options
from harness.optim.optimizers.lamb import trust_ratio
from harness.optim.optimizers.sgd import velocity


@dataclass(frozen=True)
class Options:
    """`lars.*`; momentum is `optim.beta1`."""

    trust: float = number(
        PER_TRIAL, 0.001, "trust coefficient: a gradient's norm as a share of its matrix's, before the rate", above=0
    )


class Lars(Optimizer):
    """You et al. 2017 (arXiv 1708.03888), algorithm 1.

    A matrix's gradient is multiplied by trust x |W| / |g| before momentum takes it in; by 1 where one of the norms is
    zero, as in Google's code. Vectors take the gradient as it is: implementations leave norms and biases out. Momentum
    is that of harness/optim/optimizers/sgd.py; the paper has the rate inside. Weight decay is decoupled; the paper
    adds it to the gradient, and its norm to |g|.
    """

    slots = ("moment_1",)
    per_tensor = True
    rule = "relative_sgd"
    hyperparameters = {**options("optim", "beta1"), **options("lars", "trust")}

    def update(self, piece: Piece, h: Numbers) -> Tensor:
        gradients = piece.gradients
        if piece.is_matrix:
            gradients = gradients * trust_ratio(norm(piece.weights) * h["trust"], norm(gradients))
        return velocity(piece, h, gradients)
