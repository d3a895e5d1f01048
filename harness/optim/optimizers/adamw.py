"""Adam's equations for its relatives; and AdamW, each trial with its own hyperparameters, over flat [R, P] state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from harness.config import Trial
from harness.model.parameters import Segment
from harness.optim.optimizers.base import CPU_PIECE, Norms, Numbers, Optimizer, Piece, each, options


class Adam(Optimizer):
    """What the relatives of Adam share (Kingma & Ba 2015, arXiv 1412.6980, algorithm 1)."""

    slots = ("moment_1", "moment_2")
    hyperparameters: ClassVar[Mapping[str, Callable[[Trial], float]]] = {
        **options("optim", "beta1", "beta2", "eps"),
        "rest1": lambda trial: 1 - trial.optim.beta1,
        "rest2": lambda trial: 1 - trial.optim.beta2,
    }

    def numbers(self, h: Numbers) -> Numbers:
        return corrections(h, h["count"])

    def update(self, piece: Piece, h: Numbers) -> Tensor:
        return self.direction(piece, h, *self.moments(piece, h, piece.gradients))

    def moments(self, piece: Piece, h: Numbers, gradients: Tensor) -> tuple[Tensor, Tensor]:
        """Take gradients [r, n] into both moments. Returns the first as it is, and the corrected root of the second."""
        first = piece.slots["moment_1"].mul_(h["beta1"]).add_(gradients * h["rest1"])
        second = piece.slots["moment_2"].mul_(h["beta2"]).add_((gradients * gradients).mul_(h["rest2"]))
        return first, second.sqrt().mul_(h["scale2"])

    def direction(self, piece: Piece, h: Numbers, first: Tensor, root: Tensor) -> Tensor:
        """Adam's step from what `moments` returned, of which `root` is used up."""
        return (first / root.add_(h["eps"] * piece.segment.epsilon)).mul_(h["scale1"])


def corrections(h: Numbers, count: Tensor) -> Numbers:
    """What the first moment (`scale1`) and the root of the second (`scale2`) are multiplied by, [R, 1].

    They make up for moments that started at zero `count` steps ago.
    """
    return {
        "scale1": 1 / falls_short(h["beta1"], count),
        "scale2": 1 / falls_short(h["beta2"], count).sqrt(),
    }


def falls_short(beta: Tensor, count: Tensor) -> Tensor:
    """1 - beta^count, [R, 1]: what share of the mean a moving average has that took in `count` values from zero on."""
    return 1 - each(torch.pow, beta, count)


@dataclass(frozen=True)
class _Block:
    """A block of the flat arrays that is updated while it is in the cache."""

    segment: Segment
    rows: range
    arrays: tuple[Tensor, Tensor, Tensor, Tensor]  # weights, gradients and both moments, [rows, columns]
    before: Tensor


class AdamW(Adam):
    """Loshchilov & Hutter 2019 (arXiv 1711.05101), algorithm 2.

    torch's own fused kernel, a call for each trial, so that a trial's bits cannot depend on its neighbours; where the
    update is clipped, the same equations one by one.
    """

    def bind(self, trials: Sequence[Trial]) -> None:
        super().bind(trials)
        if self._limit is None:
            self._blocks = list(self._cut_blocks())
            self._taken = {key: rates[:, 0].tolist() for key, rates in self._decays.items()}

    def _cut_blocks(self) -> Iterator[_Block]:
        trials = len(self.trials)
        flat = (self.weights, self._gradients.used, self.slot("moment_1"), self.slot("moment_2"))
        for segment in self.layout.segments:
            if segment.learning_rate == 0:
                continue
            length = segment.stop - segment.start
            height = max(1, CPU_PIECE // length) if self._on_cpu else trials
            width = CPU_PIECE if self._on_cpu else length
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
            segment = block.segment
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
                    lr=rates[segment.learning_rate][row],
                    beta1=optim.beta1,
                    beta2=optim.beta2,
                    weight_decay=self._taken[segment.learning_rate, segment.decay][row],
                    eps=optim.eps * segment.epsilon,
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
        return self._norms(sums) if measure else None
