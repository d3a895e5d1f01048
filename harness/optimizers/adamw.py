"""AdamW, each trial with its own hyperparameters, over flat [R, P] state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.config import Trial
from harness.optimizers.base import Hyperparameters, Norms, Optimizer, Piece
from harness.parameters import Segment

CPU_PIECE = 65_536  # elements: five arrays of that size fit a 2 MiB L2 cache


@dataclass(frozen=True)
class _Block:
    """A block of the flat arrays that is updated while it is in the cache."""

    segment: Segment
    rows: range
    arrays: tuple[Tensor, Tensor, Tensor, Tensor]  # weights, gradients and both moments, [rows, columns]
    before: Tensor


class AdamW(Optimizer):
    """Loshchilov & Hutter 2019 (arXiv 1711.05101), algorithm 2.

    torch's own fused kernel, a call for each trial, so that a trial's bits cannot depend on its neighbours; where the
    update is clipped, the same equations one by one.
    """

    slots = ("moment_1", "moment_2")
    hyperparameters = {
        "beta1": lambda trial: trial.optim.beta1,
        "beta2": lambda trial: trial.optim.beta2,
        "eps": lambda trial: trial.optim.eps,
    }

    def update(self, piece: Piece, h: Hyperparameters) -> Tensor:
        return adam_direction(piece, h, piece.gradients)

    def bind(self, trials: Sequence[Trial]) -> None:
        super().bind(trials)
        if self._limit is None:
            self._pieces = []
            self._blocks = list(self._cut_blocks())
            decays = (self.decay_rate(segment)[:, 0].tolist() for segment in self.layout.segments)
            self._decays = dict(zip(self.layout.segments, decays, strict=True))

    def _cut_blocks(self) -> Iterator[_Block]:
        trials, on_cpu = len(self.trials), self.weights.device.type == "cpu"
        flat = (self.weights, self._gradients.used, self.slot("moment_1"), self.slot("moment_2"))
        for segment in self.layout.segments:
            length = segment.stop - segment.start
            height = max(1, CPU_PIECE // length) if on_cpu else trials
            width = CPU_PIECE if on_cpu else length
            before = torch.empty(min(height, trials), min(width, length), dtype=flat[0].dtype, device=flat[0].device)
            for top in range(0, trials, height):
                rows = range(top, min(top + height, trials))
                for left in range(segment.start, segment.stop, width):
                    right = min(left + width, segment.stop)
                    w, g, m, v = (array[rows.start : rows.stop, left:right] for array in flat)
                    yield _Block(segment, rows, (w, g, m, v), before[: len(rows), : right - left])

    def step(self, learning_rate: Tensor, active: Tensor, measure: bool = True) -> Norms | None:
        if self._limit is not None:
            return super().step(learning_rate, active, measure)
        self.updates.add_(active)
        rates = {s.learning_rate: (learning_rate * s.learning_rate).unbind() for s in self.layout.segments}
        counts, skip = self.updates.unbind(), (~active).float().unbind()
        sums = torch.zeros(3, len(self.trials), dtype=torch.float64, device=self.weights.device)
        for block in self._blocks:
            if measure:
                block.before.copy_(block.arrays[0])
            for row, w, g, m, v in zip(block.rows, *block.arrays, strict=True):
                optim = self.trials[row].optim
                torch._fused_adamw_(
                    [w],
                    [g],
                    [m],
                    [v],
                    [],
                    [counts[row]],
                    lr=rates[block.segment.learning_rate][row],
                    beta1=optim.beta1,
                    beta2=optim.beta2,
                    weight_decay=self._decays[block.segment][row],
                    eps=optim.eps * block.segment.epsilon,
                    amsgrad=False,
                    maximize=False,
                    grad_scale=None,
                    found_inf=skip[row],
                )
            if measure:
                weights, _, _, second_moment = block.arrays
                change = torch.sub(weights, block.before, out=block.before)
                norms = torch.stack([torch.linalg.vector_norm(x, dim=1) for x in (weights, second_moment, change)])
                sums[:, block.rows.start : block.rows.stop] += norms.double().square_()
        return Norms(*sums.sqrt_()) if measure else None


def adam_direction(piece: Piece, h: Hyperparameters, gradients: Tensor) -> Tensor:
    """Adam's step from these gradients [R, n], both moments corrected for their start at zero (Kingma & Ba 2015)."""
    first = piece.slots["moment_1"] * h["beta1"] + gradients * (1 - h["beta1"])
    second = piece.slots["moment_2"] * h["beta2"] + gradients * gradients * (1 - h["beta2"])
    piece.new |= {"moment_1": first, "moment_2": second}
    root = (second / corrected(h["beta2"], h.count)).sqrt_() + h["eps"] * piece.segment.epsilon
    return first / corrected(h["beta1"], h.count) / root


def corrected(beta: Tensor, count: Tensor) -> Tensor:
    """1 - beta^count, [R, 1]: what a moving average over `count` values from zero falls short of."""
    return (1 - beta.double() ** count).to(beta.dtype)
