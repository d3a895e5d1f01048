"""How large the batches of a run are, step by step, where sequences or batches grow over its first steps.

Sequences grow as in Li, Zhang & He 2022 (arXiv 2108.06084): length_t = start + (context - start) min(t / steps, 1),
rounded down, and to a multiple of 8 where start and context are such multiples. Batches grow likewise (Brown et al.
2020, arXiv 2005.14165), in whole sequences a rank and micro-batch. A run is as long in tokens as it would be without
growth, so it may take more steps. Both may grow at once; Li et al. advise against it, because either makes a step
smaller already.

What a data loader hands out is always whole, and so is validation: only what trains is cut.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from torch import Tensor

from harness.config import Trial

ROUNDED = 8  # tokens; lengths that are multiples of it are fast on tensor cores

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Curriculum:
    """The sizes of every step, [steps] each: so many `sequences` of the loader's batch train, at these `lengths`.

    `pieces` are cut from each sequence: one, its beginning, or all that it has. `tokens` have been trained on up to and
    including each step. From step `grown` on batches are whole.
    """

    context: int
    sequences: Integers
    lengths: Integers
    pieces: Integers
    tokens: Integers
    grown: int

    @property
    def steps(self) -> int:
        """Optimizer steps of the run."""
        return len(self.tokens)

    def loaded(self, batch_RxBxT1: Tensor, step: int) -> Tensor:
        """The sequences of the loader's batch that train at this step, still whole: [R, b, T+1]."""
        return batch_RxBxT1[:, : int(self.sequences[step])]

    def cut(self, batch_RxBxT1: Tensor, step: int) -> Tensor:
        """Sequences [R, b, T+1] as they train at this step: [R, b x pieces, t+1], each t inputs and their targets."""
        length = int(self.lengths[step])
        if length == self.context:
            return batch_RxBxT1
        if self.pieces[step] == 1:
            return batch_RxBxT1[:, :, : length + 1]
        # A piece begins with the token that the one before it ended with, as targets are inputs moved by one.
        return batch_RxBxT1.unfold(2, length + 1, length).flatten(1, 2)

    def share_out(self, values_RxB: Tensor, step: int) -> Tensor:
        """A number for each sequence [R, b], given to each of its pieces: [R, b x pieces]."""
        pieces = int(self.pieces[step])
        return values_RxB if pieces == 1 else values_RxB.repeat_interleave(pieces, dim=1)


def curriculum_of(trial: Trial) -> Curriculum:
    """The sizes of every step of a trial; all trials of one structure share them."""
    growth = trial.schedule
    sequences = (trial.train.batch, growth.batch_start, growth.batch_steps, trial.train.parts)
    lengths = (trial.model.context, growth.sequence_start, growth.sequence_steps, growth.sequence_mode == "reshape")
    return _curriculum(trial.train.steps, sequences, lengths)


def idle(trial: Trial) -> Iterator[tuple[str, str]]:
    """(key, why) of sequences or batches that do not grow, or not to their end."""
    growth, sizes = trial.schedule, curriculum_of(trial)
    for name, start, whole in (
        ("sequence", growth.sequence_start, trial.model.context),
        ("batch", growth.batch_start, trial.train.batch),
    ):
        steps = getattr(growth, f"{name}_steps")
        if start is not None and start >= whole:
            yield f"schedule.{name}_start", f"schedule.{name}_start={start}: is the full size, so that nothing grows"
        elif start is not None and steps >= sizes.steps:
            yield f"schedule.{name}_steps", f"schedule.{name}_steps={steps}: grows through all {sizes.steps} steps"


@lru_cache(maxsize=64)
def _curriculum(
    steps: int, of_batch: tuple[int, int | None, int, int], of_sequence: tuple[int, int | None, int, bool]
) -> Curriculum:
    (batch, batch_start, batch_steps, parts), (context, sequence_start, sequence_steps, reshapes) = (
        of_batch,
        of_sequence,
    )
    growing = np.arange(max(batch_steps if batch_start else 0, sequence_steps if sequence_start else 0))
    sequences = _sequences(growing, batch_start or batch, batch, batch_steps, parts)
    lengths = _lengths(growing, sequence_start or context, context, sequence_steps, reshapes)
    pieces = context // lengths if reshapes else np.ones_like(lengths)

    # As few steps as it takes to train on the tokens of so many whole batches.
    wanted, whole_step = steps * batch * context, batch * context
    tokens = np.cumsum(sequences * lengths * pieces)
    missing = wanted - (int(tokens[-1]) if len(growing) else 0)
    small = len(growing) if missing > 0 else int(np.searchsorted(tokens, wanted)) + 1
    whole = max(0, -(-missing // whole_step))

    sequences, lengths, pieces = (
        np.concatenate([values[:small], np.full(whole, then)])
        for values, then in ((sequences, batch), (lengths, context), (pieces, 1))
    )
    is_small = np.flatnonzero((sequences < batch) | (lengths < context))
    grown = int(is_small[-1]) + 1 if len(is_small) else 0
    return Curriculum(context, sequences, lengths, pieces, np.cumsum(sequences * lengths * pieces), grown)


def _sequences(step: Integers, start: int, batch: int, steps: int, parts: int) -> Integers:
    """Sequences of a batch at each step: equally many for each rank and micro-batch, and at least one."""
    sequences = _line(step, start, batch, steps)
    return np.maximum(sequences - sequences % parts, parts)


def _lengths(step: Integers, start: int, context: int, steps: int, reshapes: bool) -> Integers:
    """Tokens of a sequence at each step: where a whole one is cut into pieces, the largest of its divisors below."""
    lengths = _line(step, start, context, steps)
    if reshapes:
        small = [size for size in range(1, math.isqrt(context) + 1) if context % size == 0]
        divisors = np.array(sorted({*small, *(context // size for size in small)}))
        return divisors[np.searchsorted(divisors, lengths, side="right") - 1]
    unit = ROUNDED if start % ROUNDED == context % ROUNDED == 0 else 1
    return lengths - lengths % unit


def _line(step: Integers, start: int, end: int, steps: int) -> Integers:
    """From `start` at step 0 to `end` at step `steps` and later, rounded down."""
    return np.minimum(start + (end - start) * np.minimum(step, steps) // steps, end)
