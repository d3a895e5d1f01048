"""What every optimizer shares: state over flat [R, P] arrays, hyperparameters per trial, and one step of all trials.

An optimizer is its equations: `Optimizer.update`, which sees one piece of the weights of all rows at a time and says
in which direction they go. Learning rates, weight decay, trials that stand still and norms are looked after here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from harness.config import Trial
from harness.parameters import Layout, Segment
from harness.state import Rows, State

CPU_COLUMNS = 8_192  # so many, of eight rows, fit the cache; never a function of R, because norms add up pieces


@dataclass(frozen=True)
class Norms:
    """Per trial, [R], float64: what stands after one step, and how far the step went.

    `second_moment` is None for an optimizer that has none.
    """

    weights: Tensor
    second_moment: Tensor | None
    update: Tensor


@dataclass
class Piece:
    """Some columns of all rows: a tensor, or as many neighbouring elements as fit the cache.

    `slots` are the optimizer's arrays at these columns, [R, n]; those of `columns` have a number for each tensor. What
    `update` puts into `new` under a slot's name takes its place in the trials that step.
    """

    name: str | None  # of the tensor, where an optimizer sees one tensor at a time
    shape: tuple[int, ...]  # of the tensor, for one trial
    segment: Segment
    weights: Tensor
    gradients: Tensor
    slots: dict[str, Tensor]
    new: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Hyperparameters:
    """One number a row, [R, 1]; `count` is the number of this step for the row, from 1 on, in float64."""

    rate: Tensor
    count: Tensor
    columns: Mapping[str, Tensor]

    def __getitem__(self, name: str) -> Tensor:
        return self.columns[name]


class Optimizer:
    """Base of the optimizers. A trial that is not active keeps its weights, its state and its step count.

    A subclass says which arrays it needs (`slots`, each [R, P]; `tensor_slots`, each [R, tensors]), which fields of the
    configuration it reads (`hyperparameters`: name -> a trial's value), whether it has to see whole tensors
    (`per_tensor`), and how muP is to scale its rates (`rule`: what an update's size follows - "adam": nothing, because
    it is normalised element by element; "sgd": the gradient; "relative": the norm of the weights).
    """

    slots: ClassVar[tuple[str, ...]] = ()
    tensor_slots: ClassVar[tuple[str, ...]] = ()
    per_tensor: ClassVar[bool] = False
    rule: ClassVar[str] = "adam"
    repairs_infinity: ClassVar[bool] = False  # whether a gradient of infinite elements leaves finite weights
    hyperparameters: ClassVar[Mapping[str, Callable[[Trial], float]]] = {}

    def __init__(self, layout: Layout, weights: Rows, gradients: Rows, state: State):
        """State for `weights.used` [R, P] and their gradients; `bind` says which trials they are."""
        self.layout, self._weights, self._gradients, self._state = layout, weights, gradients, state
        rows = len(weights.used)
        self._updates = state.add("updates", weights.used.new_zeros(rows, dtype=torch.float32))
        sizes = dict.fromkeys(self.slots, layout.size) | {name: len(layout.rows) for name in self.tensor_slots}
        sizes |= self.extra_slots(layout)
        self._slots = {name: state.add(name, weights.used.new_zeros(rows, size)) for name, size in sizes.items()}

    def extra_slots(self, layout: Layout) -> dict[str, int]:
        """Columns of arrays of other sizes; `piece_slots` says which of them belong to a piece."""
        return {}

    @property
    def updates(self) -> Tensor:
        """Steps that each row has done, [R]."""
        return self._updates.used

    def slot(self, name: str) -> Tensor:
        """One array of the state by its name, [R, P] for one of `slots`."""
        return self._slots[name].used

    def bind(self, trials: Sequence[Trial]) -> None:
        """Work on the rows in use from now on, which are these trials."""
        self.trials, self.weights = list(trials), self._weights.used
        values = {name: [float(read(t)) for t in trials] for name, read in self.hyperparameters.items()}
        self._columns = {name: self._column(column) for name, column in values.items()}
        self._decay = self._exactly([t.optim.weight_decay for t in trials])
        follows_rate = [t.optim.decay_follows == "rate" for t in trials]
        self._decay_follows_rate = torch.tensor(follows_rate, device=self.weights.device)[:, None]
        self._peak = self._exactly([t.optim.lr for t in trials])
        limits = [t.optim.clip_update for t in trials]
        self._limit = None if None in limits else self._column([limit for limit in limits if limit is not None])
        self._pieces = list(self._cut())

    def _exactly(self, values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=self.weights.device)[:, None]

    def _column(self, values: Sequence[float]) -> Tensor:
        return self._exactly(values).to(self.weights.dtype)

    def _cut(self) -> Iterator[Piece]:
        gradients = self._gradients.used
        if self.per_tensor or self._limit is not None:
            for number, (row, span) in enumerate(zip(self.layout.rows, self.layout.spans, strict=True)):
                here = slice(span.start, span.stop)
                yield Piece(
                    row.name,
                    row.shape,
                    span,
                    self.weights[:, here],
                    gradients[:, here],
                    self.piece_slots(number, here),
                )
            return
        for segment in self.layout.segments:
            width = CPU_COLUMNS if self.weights.device.type == "cpu" else segment.stop - segment.start
            for left in range(segment.start, segment.stop, width):
                here = slice(left, min(left + width, segment.stop))
                slots = {name: self.slot(name)[:, here] for name in self.slots}
                shape = (here.stop - here.start,)
                yield Piece(None, shape, segment, self.weights[:, here], gradients[:, here], slots)

    def piece_slots(self, number: int, here: slice) -> dict[str, Tensor]:
        """The state of one tensor, by its `number` and its columns: [R, n] of `slots`, [R, 1] of `tensor_slots`."""
        found = {name: self.slot(name)[:, here] for name in self.slots}
        return found | {name: self.slot(name)[:, number : number + 1] for name in self.tensor_slots}

    def update(self, piece: Piece, h: Hyperparameters) -> Tensor:
        """The direction [R, n] of a step: rate times direction is taken off the weights. Changes nothing in place."""
        raise NotImplementedError

    def step(self, learning_rate: Tensor, active: Tensor, measure: bool = True) -> Norms | None:
        """One update of every active trial, from gradients that are already clipped. Both tensors are [R]."""
        self.updates.add_(active)
        rate, stands = learning_rate.to(self.weights.dtype)[:, None], ~active[:, None]
        h = Hyperparameters(rate, self.updates.double()[:, None], self._columns)
        sums = torch.zeros(3, len(self.trials), dtype=torch.float64, device=self.weights.device)
        for piece in self._pieces:
            piece.new.clear()
            direction = self.update(piece, h)
            if self._limit is not None:
                # Shazeer & Stern 2018 (arXiv 1804.04235), section 6, for any optimizer.
                size = torch.linalg.vector_norm(direction, dim=1, keepdim=True) / direction.shape[1] ** 0.5
                direction = direction / (size / self._limit).clamp_(min=1.0)
            kept = piece.weights * (1.0 - self._decay_factor(rate, piece.segment))
            weights = kept - direction * (rate * piece.segment.learning_rate)
            weights = torch.where(stands, piece.weights, weights)
            if measure:
                sums[0] += _squares(weights)
                sums[2] += _squares(weights - piece.weights)
            piece.weights.copy_(weights)
            for name, values in piece.new.items():
                piece.slots[name].copy_(torch.where(stands, piece.slots[name], values))
            if measure and "moment_2" in self.slots:
                sums[1] += _squares(piece.slots["moment_2"])
        if not measure:
            return None
        weights_norm, second, change = sums.sqrt_()
        return Norms(weights_norm, second if "moment_2" in self.slots else None, change)

    def _decay_factor(self, rate: Tensor, segment: Segment) -> Tensor:
        """What share of the weights a step takes away, [R, 1]."""
        return self.decay_rate(segment).to(rate.dtype) * rate * segment.learning_rate

    def decay_rate(self, segment: Segment) -> Tensor:
        """Weight decay as a factor on the segment's learning rate, [R, 1], float64.

        Where it follows the schedule, it is undone that the rate has a peak and a multiplier (Loshchilov & Hutter 2019,
        arXiv 1711.05101, algorithm 2); a trial whose peak is 0 does not decay.
        """
        peak = self._peak * segment.learning_rate
        alone = torch.where(peak > 0, self._decay / torch.where(peak > 0, peak, 1.0), 0.0)
        return torch.where(self._decay_follows_rate, self._decay * segment.decay, alone * (segment.decay > 0))


def _squares(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=1).double().square_()
