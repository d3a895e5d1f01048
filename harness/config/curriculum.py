"""How large the batches of a run are, step by step, where sequences or batches grow over its first steps.

Sequences grow as in Li, Zhang & He 2021 (arXiv 2108.06084): length_t = start + (context - start) min(t / steps, 1),
rounded down, and to a multiple of 8 where start and context are such multiples. Batches grow likewise (Brown et al.
2020, arXiv 2005.14165), in whole sequences a rank and micro-batch. A run is as long in tokens as it would be without
growth, so it may take more steps. Both may grow at once; Li et al. advise against it, because either makes a step
smaller already.

What a data loader hands out is always whole, and so is validation: only what trains is cut.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

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


@lru_cache(maxsize=64)
def curriculum(
    steps: int, of_batch: tuple[int, int | None, int, int], of_sequence: tuple[int, int | None, int, bool]
) -> Curriculum:
    """The sizes of `steps` whole steps: (batch, its start, growing steps, parts), (context, start, steps, reshapes)."""
    batch, batch_start, batch_steps, parts = of_batch
    context, sequence_start, sequence_steps, reshapes = of_sequence
    growing = np.arange(max(batch_steps if batch_start else 0, sequence_steps if sequence_start else 0))
    sequences = _line(growing, batch_start or batch, batch, batch_steps)
    sequences = np.maximum(sequences - sequences % parts, parts)  # equally many for each rank and micro-batch
    lengths = _lengths(growing, sequence_start or context, context, sequence_steps, reshapes)
    pieces = context // lengths if reshapes else np.ones_like(lengths)

    # As few steps as it takes to train on the tokens of so many whole batches.
    wanted, tokens = steps * batch * context, np.cumsum(sequences * lengths * pieces)
    missing = wanted - (int(tokens[-1]) if len(growing) else 0)
    small = len(growing) if missing > 0 else int(np.searchsorted(tokens, wanted)) + 1
    whole = max(0, -(-missing // (batch * context)))

    sequences, lengths, pieces = (
        np.concatenate([values[:small], np.full(whole, then)])
        for values, then in ((sequences, batch), (lengths, context), (pieces, 1))
    )
    is_small = np.flatnonzero((sequences < batch) | (lengths < context))
    grown = int(is_small[-1]) + 1 if len(is_small) else 0
    return Curriculum(context, sequences, lengths, pieces, np.cumsum(sequences * lengths * pieces), grown)


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
    grown: npt.NDArray[np.int64] = np.minimum(start + (end - start) * np.minimum(step, steps) // steps, end)
    return grown
