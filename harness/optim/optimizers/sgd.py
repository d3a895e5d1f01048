"""SGD with momentum."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from harness.config import STRUCTURAL, anything
from harness.optim.optimizers.base import Numbers, Optimizer, Piece, options


@dataclass(frozen=True)
class Options:
    """`sgd.*`; momentum is `optim.beta1`."""

    nesterov: bool = anything(STRUCTURAL, False, "Nesterov's momentum: the step goes where the velocity will be")


class SGD(Optimizer):
    """Gradient descent with momentum as torch.optim.SGD has it: v = beta1 v + g, and the weights go by rate x v.

    Sutskever et al. 2013 (PMLR 28) have the rate inside, v = beta1 v - rate g, which is the same while the rate stands
    still. Nesterov's form goes by g + beta1 v. Weight decay is decoupled, where torch adds it to the gradient.
    """

    slots = ("moment_1",)
    rule = "sgd"
    hyperparameters = options("optim", "beta1")

    def update(self, piece: Piece, h: Numbers) -> Tensor:
        return velocity(piece, h, piece.gradients, self.trials[0].section("sgd").nesterov)


def velocity(piece: Piece, h: Numbers, gradients: Tensor, nesterov: bool = False) -> Tensor:
    """Take gradients [r, n] into the velocity, and return the direction that it gives; `h` has `beta1`."""
    moment = piece.slots["moment_1"].mul_(h["beta1"]).add_(gradients)
    return (moment * h["beta1"]).add_(gradients) if nesterov else moment
