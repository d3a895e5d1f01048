"""The batches of a run that are unlike its others, by their tokens alone: where to look when no signal is sure."""

from __future__ import annotations

import contextlib

import numpy as np
from scipy.special import bdtrc

from analysis.again.batches import BatchReader
from harness.config import ConfigError
from harness.config.limits import MOST_AGAIN
from harness.incidents.batches_ahead import EarlierBatches, limits_of

RARE, REPEATED, AGAIN = "rare", "repeated", "again"  # far rarer tokens, far more repeated pairs, or an earlier batch
BY_CHANCE = 0.01  # of batches: where sequences meet more often by chance, the text is not looked through for it
STRETCH = "stretch"  # half of its sequences or more are one stretch of the text, as those of a long document are
BLOCK = 100  # steps whose batches are compared with one another, and with those of as many before and after
MOST_TOKENS = 2**28  # of a run; beyond that its batches are not looked through, which would take minutes


def odd_batches(reading: BatchReader, steps: int) -> dict[int, str]:
    """Step -> what is odd about its batch, of the first `steps`: `STRETCH`, `RARE`, `REPEATED` or `AGAIN`.

    The limits are those by which a playbook tells a step of odd data (`harness.incidents.batches_ahead`). Nothing of a
    run that has read more than `MOST_TOKENS`, or whose batches are no tokens.
    """
    scores, same, stretches = np.full((steps, 2), np.nan), {}, {}
    with contextlib.suppress(ConfigError):
        if steps * reading.batch(0).size > MOST_TOKENS:
            return {}
        earlier = EarlierBatches()
        for step in range(steps):
            batch = reading.batch(step)
            scores[step] = reading.rarity(batch), reading.repetition(batch)
            if earlier.has(batch, step):
                same[step] = AGAIN
            if is_stretch(reading, batch):
                stretches[step] = STRETCH
    if len(same) > MOST_AGAIN * steps:  # a short text, which comes again each epoch
        same = {}
    found: dict[int, str] = stretches if len(stretches) <= MOST_AGAIN * steps else {}  # else it is read in its order
    for begin in range(0, steps, BLOCK):
        near = scores[max(0, begin - BLOCK) : begin + 2 * BLOCK]
        near = near[np.isfinite(near).all(1)]
        if len(near):
            for place, (is_rare, is_repeated) in enumerate(scores[begin : begin + BLOCK] > limits_of(near), begin):
                # What repeats a rare token is both, and few other tokens are more often rare by chance.
                if (is_rare or is_repeated) and not reading.is_like_the_text(reading.batch(place)):
                    found[place] = REPEATED if is_repeated else RARE
    return dict(sorted((found | same).items()))


def is_stretch(reading: BatchReader, batch: np.ndarray) -> bool:
    """Whether half of a batch's sequences or more, [sequences, T + 1], follow each other in the training text.

    The last token of a sequence is then the first of the next. Only where so many meet so seldom by chance is the text
    looked through: so of two sequences, and of half of a batch of four, it says nothing.
    """
    met = np.flatnonzero(batch[1:, 0] == batch[:-1, -1])
    least = max(1, -(-len(batch) // 2) - 1)
    if len(met) < least or not bdtrc(len(met) - 1, len(batch) - 1, reading.agreement) < BY_CHANCE:
        return False
    return sum(reading.goes_on(batch[place], batch[place + 1]) for place in met) >= least
