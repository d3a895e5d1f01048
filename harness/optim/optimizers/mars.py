"""MARS: AdamW on gradients to which a part of their change since the last step is added."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from harness.config import PER_TRIAL, Trial, number
from harness.optim.optimizers.adamw import Adam
from harness.optim.optimizers.base import Numbers, Piece, norm, options


@dataclass(frozen=True)
class Options:
    """`mars.*`."""

    gamma: float = number(PER_TRIAL, 0.025, "how much of the change of gradients is added to them", low=0)


class Mars(Adam):
    """Yuan et al. 2024 (arXiv 2411.10438), algorithm 2 with AdamW's step, in the form that reads each batch once.

    A matrix's gradient is g + gamma beta1 / (1 - beta1) (g - the last one), cut to a norm of 1; vectors take Adam's
    step. Their defaults are beta1 0.95 and beta2 0.99. Before the first step the last gradient is zero, as in their
    code.
    """

    slots = ("moment_1", "moment_2", "last_gradient")
    per_tensor = True
    hyperparameters: ClassVar[Mapping[str, Callable[[Trial], float]]] = {
        **Adam.hyperparameters,
        **options("mars", "gamma"),
    }

    def numbers(self, h: Numbers) -> Numbers:
        return {**super().numbers(h), "change": h["gamma"] * h["beta1"] / h["rest1"]}

    def update(self, piece: Piece, h: Numbers) -> Tensor:
        gradients, last = piece.gradients, piece.slots["last_gradient"]
        change = gradients - last
        last.copy_(gradients)
        if piece.is_matrix:
            corrected = change.mul_(h["change"]).add_(gradients)
            gradients = corrected.div_(norm(corrected).to(corrected.dtype).clamp_(min=1.0))
        return self.direction(piece, h, *self.moments(piece, h, gradients))
