"""AdamW, each trial with its own hyperparameters, over flat [R, P] state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.config import Trial
from harness.parameters import Layout, Rows, Segment

CPU_PIECE = 65_536  # elements: five arrays of that size fit a 2 MiB L2 cache


@dataclass(frozen=True)
class Norms:
    """Per trial, [R], float64: what stands after one step, and how far the step went."""

    weights: Tensor
    second_moment: Tensor
    update: Tensor


@dataclass(frozen=True)
class _Piece:
    """A block of the flat arrays that is updated while it is in the cache."""

    segment: Segment
    rows: range
    arrays: tuple[Tensor, Tensor, Tensor, Tensor]  # weights, gradients and both moments, [rows, columns]
    before: Tensor


class AdamW:
    """torch's own fused kernel, a call for each trial, so that a trial's bits cannot depend on its neighbours.

    Weight decay is decoupled and multiplied by the learning rate (Loshchilov & Hutter 2019, algorithm 2).
    A trial that is not active keeps its weights, its moments and its step count.
    """

    def __init__(self, layout: Layout, weights: Rows, gradients: Rows, capacity: int):
        """State for `weights.used` [R, P] and their gradients; `bind` says which trials they are."""
        self.layout, self._weights, self._gradients = layout, weights, gradients
        self._moment_1, self._moment_2 = (Rows(torch.zeros_like(weights.used), capacity) for _ in range(2))
        self.updates = torch.zeros(len(weights.used), dtype=torch.float32, device=weights.used.device)

    @property
    def moment_1(self) -> Tensor:
        """[R, P]."""
        return self._moment_1.used

    @property
    def moment_2(self) -> Tensor:
        """[R, P]."""
        return self._moment_2.used

    def arrange(self, sources: Sequence[int]) -> None:
        """Row i goes on with the state of what row `sources[i]` is now; weights are arranged by their owner."""
        self._moment_1.arrange(sources)
        self._moment_2.arrange(sources)
        self.updates = self.updates[list(sources)]

    def bind(self, trials: Sequence[Trial]) -> None:
        """Work on the rows in use from now on, which are these trials."""
        self.trials, self.weights = list(trials), self._weights.used
        self._cut()

    def _cut(self) -> None:
        self._pieces = []
        trials = len(self.trials)
        flat = (self.weights, self._gradients.used, self.moment_1, self.moment_2)
        for segment in self.layout.segments:
            length = segment.stop - segment.start
            on_cpu = self.weights.device.type == "cpu"
            height = max(1, CPU_PIECE // length) if on_cpu else trials
            width = CPU_PIECE if on_cpu else length
            before = torch.empty(min(height, trials), min(width, length), dtype=flat[0].dtype, device=flat[0].device)
            for top in range(0, trials, height):
                rows = range(top, min(top + height, trials))
                for left in range(segment.start, segment.stop, width):
                    right = min(left + width, segment.stop)
                    w, g, m, v = (array[rows.start : rows.stop, left:right] for array in flat)
                    self._pieces.append(_Piece(segment, rows, (w, g, m, v), before[: len(rows), : right - left]))

    def step(self, learning_rate: Tensor, active: Tensor, measure: bool = True) -> Norms | None:
        """One update of every active trial, from gradients that are already clipped. Both tensors are [R]."""
        self.updates += active
        rates = {s.learning_rate: (learning_rate * s.learning_rate).unbind() for s in self.layout.segments}
        counts, skip = self.updates.unbind(), (~active).float().unbind()
        sums = torch.zeros(3, len(self.trials), dtype=torch.float64, device=self.weights.device)
        for piece in self._pieces:
            if measure:
                piece.before.copy_(piece.arrays[0])
            for row, w, g, m, v in zip(piece.rows, *piece.arrays, strict=True):
                optim = self.trials[row].optim
                torch._fused_adamw_(
                    [w],
                    [g],
                    [m],
                    [v],
                    [],
                    [counts[row]],
                    lr=rates[piece.segment.learning_rate][row],
                    beta1=optim.beta1,
                    beta2=optim.beta2,
                    weight_decay=optim.weight_decay if piece.segment.decay else 0.0,
                    eps=optim.eps,
                    amsgrad=False,
                    maximize=False,
                    grad_scale=None,
                    found_inf=skip[row],
                )
            if measure:
                weights, _, _, second_moment = piece.arrays
                change = torch.sub(weights, piece.before, out=piece.before)
                norms = torch.stack([torch.linalg.vector_norm(x, dim=1) for x in (weights, second_moment, change)])
                sums[:, piece.rows.start : piece.rows.stop] += norms.double().square_()
        return Norms(*sums.sqrt_()) if measure else None
