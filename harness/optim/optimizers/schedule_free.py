"""Schedule-Free AdamW: gradients at a point between a fast iterate and its running mean, by which runs are judged."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from harness.config import Trial
from harness.model.parameters import Layout
from harness.model.state import Rows, State
from harness.optim.optimizers.adamw import Adam
from harness.optim.optimizers.base import Multipliers, Norms, Numbers, Piece, Step


class ScheduleFree(Adam):
    """Defazio et al. 2024 (arXiv 2405.15682), algorithm 1, in the form and with the weights of their code.

    The weights that train are y = (1 - beta1) z + beta1 x. z takes Adam's step without a first moment, from the
    gradient at y and with weight decay at y; x is the mean of all z, weighted by the square of the largest rate so far,
    and it is x that validation sees and that is stored as final weights. It is made for a constant rate after the
    warm-up (`schedule.decay=constant`); one that falls is taken as it is.
    """

    slots = ("moment_2", "base_weights")

    def __init__(self, layout: Layout, weights: Rows, gradients: Rows, state: State):
        super().__init__(layout, weights, gradients, state)
        zeros = weights.used.new_zeros(len(weights.used), dtype=torch.float64)
        self._largest, self._total = state.add("largest_rate", zeros), state.add("mean_weight", zeros.clone())

    @classmethod
    def refused(cls, trial: Trial) -> Iterator[str]:
        yield from super().refused(trial)
        if trial.optim.beta1 == 0:
            why = "gradients would be those of the fast iterate, from which no mean can be told"
            yield f"optim.beta1=0: {why}; allowed: above 0 with optim.name=schedule_free"
        if trial.optim.clip_update is not None:
            why = "a step moves two points, and not by a rate times a direction"
            yield f"optim.clip_update={trial.optim.clip_update}: {why}; allowed: null with optim.name=schedule_free"

    def forget(self, row: int) -> None:
        super().forget(row)
        for values in (self._largest, self._total):
            values.used[row] = 0

    def step(self, learning_rate: Tensor, active: Tensor, measure: bool = True) -> Norms | None:
        largest, total = self._largest.used, self._total.used
        largest.copy_(torch.where(active, torch.maximum(largest, learning_rate.double()), largest))
        total.copy_(torch.where(active, total + largest * largest, total))
        return super().step(learning_rate, active, measure)

    def _step(self, learning_rate: Tensor, active: Tensor) -> Step:
        scheduled, dtype = learning_rate.double()[:, None], self.weights.dtype
        self._moves: dict[Multipliers, tuple[Tensor, Tensor]] = {
            (rate, decay): ((scheduled * rate).to(dtype), (taken * scheduled * rate).to(dtype))
            for (rate, decay), taken in self._decays.items()
        }
        return super()._step(learning_rate, active)

    def numbers(self, h: Numbers) -> Numbers:
        largest, total = self._largest.used[:, None], self._total.used[:, None]
        share = torch.where(total > 0, largest * largest / total, 0.0)
        moves = {"share": share, "ahead": 1 - h["beta1"] * (1 - share), "is_first": h["count"] == 1}
        return {**super().numbers(h), **moves}

    def update(self, piece: Piece, h: Numbers) -> Tensor:
        """The whole way of a step; `pace` is 1."""
        at, y, z = slice(piece.rows.start, piece.rows.stop), piece.weights, piece.slots["base_weights"]
        rate, taken = (column[at] for column in self._moves[piece.multipliers])
        second = piece.slots["moment_2"].mul_(h["beta2"]).add_((piece.gradients * piece.gradients).mul_(h["rest2"]))
        root = second.sqrt().mul_(h["scale2"]).add_(h["eps"] * piece.segment.epsilon)
        z.copy_(torch.where(h["is_first"], y, z))
        off = (piece.gradients / root).mul_(rate).add_(y * taken)
        way = ((y - z) * h["share"]).add_(off * h["ahead"])
        z.sub_(off)
        return way

    def pace(self, piece: Piece, step: Step) -> tuple[Tensor, Tensor]:
        rate, kept = super().pace(piece, step)
        return torch.ones_like(rate), torch.ones_like(kept)

    def judged(self) -> Tensor:
        """x, [R, P]."""
        mean, beyond = self.weights.clone(), (1 - 1 / self.hyperparameter("beta1")).to(self.weights.dtype)
        has_begun = self.updates[:, None] > 0
        for segment in self.layout.segments:
            if segment.learning_rate != 0:
                y = mean[:, segment.start : segment.stop]
                z = self.slot("base_weights")[:, segment.start : segment.stop]
                y.copy_(torch.where(has_begun, y + (z - y) * beyond, y))
        return mean
