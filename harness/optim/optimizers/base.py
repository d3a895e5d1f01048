"""What every optimizer shares: state over flat [R, P] arrays, hyperparameters per trial, and one step of all trials.

An optimizer is its equations: `Optimizer.update`, which sees one piece of the weights at a time and says in which
direction they go. Learning rates, weight decay, trials that stand still and norms are looked after here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import ClassVar

import torch
from torch import Tensor

from harness.basics.devices import on_cpu
from harness.config import Trial
from harness.model import sums
from harness.model.parameters import Layout, Segment
from harness.model.state import Rows, State
from harness.model.tensors import MATRICES, Kind, ScaledTensor
from harness.optim.clipping import SAFE, exact_norm

CPU_PIECE = 65_536  # elements of a piece: half a dozen arrays of that size fit a 2 MiB cache
CPU_COLUMNS = 8_192  # of them in a row, where a piece need not be a tensor; never a function of R, because norms add up
CPU_GRAIN = 32_768  # from so many elements on torch may cut a single row among threads, and then sum it differently

MATRIX_KINDS = (Kind.EMBEDDING, *MATRICES, Kind.HEAD)
CLIP_UPDATE = "optim.clip_update"  # the part of a recipe that is counted under this key

Numbers = Mapping[str, Tensor]  # one a row, [r, 1]
Multipliers = tuple[float, float]  # of the learning rate and of weight decay


@dataclass(frozen=True)
class Norms:
    """Per trial, [R], float64: what stands after one step, and how far the step went.

    `second_moment` is None for an optimizer that has none.
    """

    weights: Tensor
    second_moment: Tensor | None
    update: Tensor


@dataclass(frozen=True)
class Piece:
    """Some columns of some rows, [r, n]: a tensor, or as many neighbouring elements as fit the cache.

    `slots` are the optimizer's arrays there: [r, n], or for `tensor_slots` as many columns as the tensor has of them.
    """

    rows: range
    shape: tuple[int, ...]  # for one trial
    kind: Kind | None  # of the tensor, where it is a whole one
    is_head: bool  # the head, or the embedding that takes its place
    segment: Segment
    weights: Tensor
    gradients: Tensor
    slots: Mapping[str, Tensor]

    @property
    def is_matrix(self) -> bool:
        """A whole one, [out, in]."""
        return len(self.shape) == 2 and self.kind in MATRIX_KINDS

    @property
    def is_hidden(self) -> bool:
        """And inside a block."""
        return self.kind in MATRICES

    @property
    def multipliers(self) -> Multipliers:
        return self.segment.learning_rate, self.segment.decay


@dataclass(frozen=True)
class Step:
    """What one step needs to know of its rows, [r, 1] each."""

    numbers: Numbers
    paces: Mapping[Multipliers, tuple[Tensor, Tensor]]  # the rate in force, and the share of the weights that stays
    limit: Tensor | None  # of the direction's root mean square
    stands: Tensor | None  # rows that do not move; None: all do

    def of(self, rows: range) -> Step:
        """The same for some of the rows."""
        here = slice(rows.start, rows.stop)
        return Step(
            {name: column[here] for name, column in self.numbers.items()},
            {key: (pace[here], kept[here]) for key, (pace, kept) in self.paces.items()},
            None if self.limit is None else self.limit[here],
            None if self.stands is None else self.stands[here],
        )


class Optimizer:
    """Base of the optimizers. A trial that is not active keeps its weights, its state and its step count.

    A subclass says which arrays it needs (`slots`, each [R, P]; `tensor_slots`: how many columns each tensor has),
    which fields of the configuration it reads (`hyperparameters`: name -> a trial's value), whether it has to see whole
    tensors (`per_tensor`), and how muP is to scale its rates (`rule`, in harness/model/scaling.py).

    Weight decay is decoupled in all of them: rate x decay is taken off the matrices, whatever the step does. A tensor
    whose rate is multiplied by 0 is a buffer of the model, and left alone.
    """

    slots: ClassVar[tuple[str, ...]] = ()
    tensor_slots: ClassVar[Mapping[str, Callable[[ScaledTensor], int]]] = {}
    per_tensor: ClassVar[bool] = False
    columns: ClassVar[int] = CPU_COLUMNS  # of a piece that need not be a tensor, on a CPU
    rule: ClassVar[str] = "adam"
    waits: ClassVar[bool] = False  # whether it makes the host wait for a GPU
    keeps_elementwise: ClassVar[bool] = True  # whether an element of a slot is of the weight in its place
    parts: ClassVar[tuple[str, ...]] = ()  # keys of what acts now and then; `mark` says when
    repairs_infinity: ClassVar[bool] = False  # whether a gradient of infinite elements can leave finite weights
    hyperparameters: ClassVar[Mapping[str, Callable[[Trial], float]]] = {}

    def __init__(self, layout: Layout, weights: Rows, gradients: Rows, state: State):
        """State for `weights.used` [R, P] and their gradients; `bind` says which trials they are."""
        self.layout, self._weights, self._gradients = layout, weights, gradients
        rows, sizes = len(weights.used), dict.fromkeys(self.slots, layout.size)
        self._updates = state.add("updates", weights.used.new_zeros(rows, dtype=torch.float32))
        self._columns: dict[str, list[slice]] = {}  # of each tensor in the arrays of `tensor_slots`
        for name, size in self.tensor_slots.items():
            ends = list(accumulate((size(scaled) for scaled in layout.tensors), initial=0))
            self._columns[name], sizes[name] = [slice(*pair) for pair in pairwise(ends)], ends[-1]
        self._slots = {name: state.add(name, weights.used.new_zeros(rows, size)) for name, size in sizes.items()}

    @classmethod
    def idle(cls, trial: Trial) -> Iterator[tuple[str, str]]:
        """(key, why) of what cannot act in a trial with this optimizer."""
        yield from ()

    @classmethod
    def refused(cls, trial: Trial) -> Iterator[str]:
        """What this optimizer cannot do in a trial, each a line with key, value, and what is allowed."""
        yield from ()

    @classmethod
    def rule_of(cls, trial: Trial) -> str:
        """The `rule`, where a trial's options have a say in it."""
        return cls.rule

    @property
    def updates(self) -> Tensor:
        """Steps that each row has done, [R]."""
        return self._updates.used

    @property
    def gradients(self) -> Tensor:
        """Those of the last step, as clipped, [R, P]."""
        return self._gradients.used

    def forget(self, row: int) -> None:
        """The row is as before its first step, but for its weights."""
        for values in (self._updates, *self._slots.values()):
            values.used[row] = 0

    def judged(self) -> Tensor | None:
        """The weights that validation sees and that are stored at the end, [R, P]; None: those that train."""
        return None

    @contextmanager
    def judging(self) -> Iterator[None]:
        """Inside, the weights are the `judged` ones."""
        judged = self.judged()
        training = None if judged is None else self.weights.clone()
        if judged is not None:
            self.weights.copy_(judged)
        try:
            yield
        finally:
            if training is not None:
                self.weights.copy_(training)

    def slot(self, name: str) -> Tensor:
        """One array of the state by its name, [R, P] for one of `slots`."""
        return self._slots[name].used

    def hyperparameter(self, name: str) -> Tensor:
        """One of `hyperparameters`, [R, 1], float64."""
        return self._exact[name]

    def bind(self, trials: Sequence[Trial]) -> None:
        """Work on the rows in use from now on, which are these trials."""
        self.trials, self.weights, self._on_cpu = list(trials), self._weights.used, on_cpu(self._weights.used)
        self._exact = {name: self._column([read(t) for t in trials]) for name, read in self.hyperparameters.items()}
        self._rounded = {name: column.to(self.weights.dtype) for name, column in self._exact.items()}
        self._decay = self._column([t.optim.weight_decay for t in trials])
        self._peak = self._column([t.optim.lr for t in trials])
        self._decay_follows_rate = self._column([t.optim.decay_follows == "rate" for t in trials]) > 0
        limits = [limit for t in trials if (limit := t.optim.clip_update) is not None]
        self._limit = self._column(limits).to(self.weights.dtype) if limits else None
        self._decays = {(s.learning_rate, s.decay): self.decay_rate(s) for s in self.layout.segments}
        self._last = Kind.EMBEDDING if trials[0].model.tied_head else Kind.HEAD
        self._pieces: list[Piece] = []
        self.acted: dict[str, Tensor] = {}

    def mark(self, part: str, rows: range, acted: Tensor) -> None:
        """The part, one of `parts`, changed something in this step in these rows, [r, 1]."""
        if part not in self.acted:
            self.acted[part] = torch.zeros(len(self.trials), dtype=torch.bool, device=self.weights.device)
        self.acted[part][rows.start : rows.stop] |= acted[:, 0]

    def _column(self, values: Sequence[float]) -> Tensor:
        """[R, 1], float64."""
        return torch.tensor([float(x) for x in values], dtype=torch.float64, device=self.weights.device)[:, None]

    def decay_rate(self, segment: Segment) -> Tensor:
        """Weight decay as a factor on the segment's learning rate, [R, 1], float64.

        Where it follows the schedule, it is undone that the rate has a peak and a multiplier (Loshchilov & Hutter 2019,
        arXiv 1711.05101, algorithm 2); a trial whose peak is 0 does not decay.
        """
        peak = self._peak * segment.learning_rate
        alone = torch.where(peak > 0, self._decay / torch.where(peak > 0, peak, 1.0), 0.0)
        return torch.where(self._decay_follows_rate, self._decay * segment.decay, alone * (segment.decay > 0))

    # --- the weights in pieces ---------------------------------------------------------------------------------------

    def _cut(self) -> Iterator[Piece]:
        if self.per_tensor or self._limit is not None:
            for number, (scaled, span) in enumerate(zip(self.layout.tensors, self.layout.spans, strict=True)):
                here = slice(span.start, span.stop)
                yield from self._stack(span, here, scaled.shape, number)
            return
        for segment in self.layout.segments:
            width = self.columns if self._on_cpu else segment.stop - segment.start
            for left in range(segment.start, segment.stop, width):
                here = slice(left, min(left + width, segment.stop))
                yield from self._stack(segment, here, (here.stop - here.start,))

    def _stack(
        self, segment: Segment, here: slice, shape: tuple[int, ...], number: int | None = None
    ) -> Iterator[Piece]:
        """The columns `here` of all rows, as many rows at a time as fit the cache; `number` is that of the tensor."""
        if segment.learning_rate == 0:
            return
        kind = None if number is None else self.layout.tensors[number].kind
        size, count = here.stop - here.start, len(self.trials)
        columns = dict.fromkeys(self.slots, here)
        if number is not None:
            columns |= {name: columns[number] for name, columns in self._columns.items()}
        height = count if not self._on_cpu else 1 if size >= CPU_GRAIN else CPU_PIECE // size
        for top in range(0, count, height):
            rows = range(top, min(top + height, count))
            at = slice(rows.start, rows.stop)
            slots = {name: self.slot(name)[at, place] for name, place in columns.items()}
            weights, gradients = self.weights[at, here], self.gradients[at, here]
            yield Piece(rows, shape, kind, kind == self._last, segment, weights, gradients, slots)

    # --- one step ----------------------------------------------------------------------------------------------------

    def numbers(self, h: Numbers) -> Numbers:
        """What follows from the hyperparameters and the step alone, for `update`; all are [R, 1], float64.

        `h` has the hyperparameters by name, `count`, the number of this step for the trial from 1 on, and `rate`, the
        scheduled learning rate. A `rate` among what is returned takes its place, but not for weight decay.
        """
        return {}

    def update(self, piece: Piece, h: Numbers) -> Tensor:
        """The direction [r, n] of a step: rate times direction is taken off the weights.

        Changes the piece's `slots` in place and nothing else, not through what it returns either. `h` has what
        `numbers` has and returns, [r, 1], in the precision of the weights.
        """
        raise NotImplementedError

    def pace(self, piece: Piece, step: Step) -> tuple[Tensor, Tensor]:
        """The rate in force in a piece, and the share of its weights that stays, [r, 1] each."""
        return step.paces[piece.multipliers]

    def repairs(self) -> Tensor:
        """Rows whose weights stay finite in the step to come even if its gradient has infinite elements, [R]."""
        return torch.full((len(self.trials),), self.repairs_infinity, device=self.weights.device)

    def step(self, learning_rate: Tensor, active: Tensor, measure: bool = True) -> Norms | None:
        """One update of every active trial, from gradients that are already clipped. Both tensors are [R].

        `acted` says afterwards which parts changed something, and in which rows, [R]; also in rows that stand still.
        """
        self.acted.clear()
        self.updates.add_(active)
        squares = self._advance(learning_rate, active, measure)
        if squares is None:
            return None
        weights, second_moment, change = squares.sqrt_()
        return Norms(weights, second_moment if "moment_2" in self.slots else None, change)

    def _advance(self, learning_rate: Tensor, active: Tensor, measure: bool) -> Tensor | None:
        """Update all pieces. Returns the squared norms of weights, second moment and change, [3, R], if asked to."""
        self._pieces = self._pieces or list(self._cut())
        step = self._step(learning_rate, active)
        parts = {rows: step.of(rows) for rows in {piece.rows for piece in self._pieces}}
        sums = torch.zeros(3, len(self.trials), dtype=torch.float64, device=self.weights.device)
        for piece in self._pieces:
            squares = self._move(piece, parts[piece.rows], measure)
            if squares is not None:
                sums[:, piece.rows.start : piece.rows.stop] += squares
        return sums if measure else None

    def _step(self, learning_rate: Tensor, active: Tensor) -> Step:
        dtype, scheduled = self.weights.dtype, learning_rate.double()[:, None]
        now: Numbers = {"count": self.updates.double()[:, None], "rate": scheduled}
        now = {**now, **self.numbers({**self._exact, **now})}
        rounded = {name: x.to(dtype) if x.is_floating_point() else x for name, x in now.items()}
        paces = {
            (rate, decay): ((now["rate"] * rate).to(dtype), (1.0 - taken * scheduled * rate).to(dtype))
            for (rate, decay), taken in self._decays.items()
        }
        # On a CPU it costs nothing to look, and to put rows back that do not move costs as much as the step.
        stands = None if self._on_cpu and bool(active.all()) else ~active[:, None]
        return Step(self._rounded | rounded, paces, self._limit, stands)

    def _move(self, piece: Piece, step: Step, measure: bool) -> Tensor | None:
        """Update one piece. Returns the squared norms of weights, second moment and change, [3, r], if asked to."""
        before = {} if step.stands is None else {name: values.clone() for name, values in piece.slots.items()}
        direction = self.update(piece, step.numbers)
        pace, kept = self.pace(piece, step)
        if step.limit is not None:
            # Shazeer & Stern 2018 (arXiv 1804.04235), section 6, for any optimizer.
            excess = rms(direction) / step.limit
            self.mark(CLIP_UPDATE, piece.rows, excess > 1)
            pace = pace / excess.clamp_(min=1.0)
        weights = (piece.weights * kept).sub_(direction * pace)
        if step.stands is not None:
            weights = torch.where(step.stands, piece.weights, weights)
            for name, old in before.items():
                piece.slots[name].copy_(torch.where(step.stands, old, piece.slots[name]))
        change = weights - piece.weights if measure else None
        piece.weights.copy_(weights)
        return None if change is None else self._measured(piece, weights, change)

    def _measured(self, piece: Piece, weights: Tensor, change: Tensor) -> Tensor:
        """The squared norms of weights, second moment and change after a step, [3, r], float64.

        Finite where the elements are, though their squares may not be in float32.
        """
        measured = (weights, piece.slots.get("moment_2", change), change)
        if not self._on_cpu:
            return torch.stack([exact_norm(x) for x in measured]).square_()
        norms = torch.stack([torch.linalg.vector_norm(x, dim=1) for x in measured]).double()
        if not float(norms.amax()) <= SAFE[1]:  # or one is NaN
            for number, row in (norms > SAFE[1]).nonzero().tolist():  # by itself: others change no bit of it
                norms[number, row] = exact_norm(measured[number][row : row + 1])[0]
        return norms.square_()


def options(section: str, *names: str) -> Mapping[str, Callable[[Trial], float]]:
    """These fields of a section, for `hyperparameters`."""

    def reader(name: str) -> Callable[[Trial], float]:
        return lambda trial: getattr(trial.section(section), name)

    return {name: reader(name) for name in names}


BETAS: Mapping[str, Callable[[Trial], float]] = {  # and what they leave of what a moving average takes in
    **options("optim", "beta1", "beta2"),
    "rest1": lambda trial: 1 - trial.optim.beta1,
    "rest2": lambda trial: 1 - trial.optim.beta2,
}


def is_matrix(scaled: ScaledTensor) -> bool:
    """Whether optimizers take it for a matrix: not a vector, nor a stack of them such as the gains of all heads."""
    return len(scaled.shape) == 2 and scaled.kind in MATRIX_KINDS


# --- for the equations -------------------------------------------------------------------------------------------


def norm(x: Tensor) -> Tensor:
    """L2 norm of each row, [r, 1]."""
    return sums.norm(x)[:, None]


def rms(x: Tensor) -> Tensor:
    """Root mean square of each row, [r, 1]."""
    rms: Tensor = norm(x) / x.shape[1] ** 0.5
    return rms


def each(function: Callable[..., Tensor], *columns: Tensor) -> Tensor:
    """`function` of numbers [R, 1], a call for each trial on a CPU: what fills vectors there may round differently."""
    if not on_cpu(columns[0]):
        return function(*columns)
    return torch.cat([function(*row) for row in zip(*(column.split(1) for column in columns), strict=True)])
