"""Adafactor: a second moment of which only the means over rows and over columns are kept."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from harness.config import PER_TRIAL, STRUCTURAL, Trial, anything, number
from harness.model import sums
from harness.optim.optimizers.base import Numbers, Optimizer, Piece, each, is_matrix, options, rms


@dataclass(frozen=True)
class Options:
    """`adafactor.*`, with the defaults of the paper."""

    clip: float = number(PER_TRIAL, 1.0, "d: largest root mean square of a tensor's update, before the rate", above=0)
    decay_exponent: float = number(
        PER_TRIAL, 0.8, "c: the second moment's decay at step t is 1 - t^-c", above=0, high=10
    )
    eps: float = number(PER_TRIAL, 1e-30, "epsilon1, added to the squares of gradients", above=0)
    relative_step: bool = anything(PER_TRIAL, False, "the rate is at most 1/sqrt(t) at step t")
    parameter_scale: bool = anything(
        STRUCTURAL, False, "the rate is multiplied by the root mean square of each tensor's weights"
    )
    smallest_scale: float = number(PER_TRIAL, 1e-3, "epsilon2: what it is multiplied by at least", above=0)


class Adafactor(Optimizer):
    """Shazeer & Stern 2018 (arXiv 1804.04235), algorithms 4 and 5, without momentum.

    A matrix's second moment is the product of its row and column means over the mean of all; a vector keeps its own.
    The paper's rate is relative: max(epsilon2, RMS(W)) min(0.01, 1/sqrt(t)). Here both parts are options, and the
    scheduled rate stands for 0.01, as in torch.optim.Adafactor, which always has both. With `parameter_scale` updates
    are relative to the weights of every tensor, vectors too, as in the paper. Weight decay goes by the scheduled rate;
    the paper has none. torch.optim.Adafactor does not add epsilon1, but has floors of that name.
    """

    tensor_slots = {
        "row_moment": lambda scaled: scaled.shape[0] if is_matrix(scaled) else 0,
        "column_moment": lambda scaled: scaled.shape[1] if is_matrix(scaled) else 0,
        "vector_moment": lambda scaled: 0 if is_matrix(scaled) else scaled.size,
    }
    per_tensor = True
    hyperparameters = options("adafactor", "clip", "decay_exponent", "eps", "relative_step", "smallest_scale")

    @classmethod
    def rule_of(cls, trial: Trial) -> str:
        return "relative" if trial.section("adafactor").parameter_scale else cls.rule

    def numbers(self, h: Numbers) -> Numbers:
        rest = each(torch.pow, h["count"], -h["decay_exponent"])
        relative = torch.minimum(h["rate"], 1 / h["count"].sqrt())
        return {"beta": 1 - rest, "rest": rest, "rate": torch.where(h["relative_step"] > 0, relative, h["rate"])}

    def update(self, piece: Piece, h: Numbers) -> Tensor:
        # Epsilon is added to a square, so its multiplier is squared too.
        squares = (piece.gradients * piece.gradients).add_(h["eps"] * piece.segment.epsilon**2)
        if piece.is_matrix:
            direction = self._of_matrix(piece, h, squares.unflatten(1, piece.shape))
        else:
            moment = piece.slots["vector_moment"].mul_(h["beta"]).add_(squares.mul_(h["rest"]))
            direction = piece.gradients / moment.sqrt()
        factor = 1 / (rms(direction) / h["clip"]).clamp_(min=1.0)
        if self.trials[0].section("adafactor").parameter_scale:
            factor = factor * torch.maximum(rms(piece.weights), h["smallest_scale"])
        return direction.mul_(factor)

    def _of_matrix(self, piece: Piece, h: Numbers, squares: Tensor) -> Tensor:
        """From the squares [r, out, in]. Sums over rows and columns are means here, which cancels in their quotient."""
        rows = piece.slots["row_moment"].mul_(h["beta"]).add_(sums.mean(squares, 2).mul_(h["rest"]))
        columns = piece.slots["column_moment"].mul_(h["beta"]).add_(sums.mean(squares, 1).mul_(h["rest"]))
        by_row = (rows / sums.mean(rows)[:, None]).sqrt_().reciprocal_()
        by_column = columns.sqrt().reciprocal_()
        whole = piece.gradients.unflatten(1, piece.shape)
        scaled: Tensor = (whole * by_row[:, :, None]).mul_(by_column[:, None, :]).flatten(1)
        return scaled
