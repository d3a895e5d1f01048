"""A look at the batches that a row is about to read, without training on them."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from hashlib import blake2b

import numpy as np
from numpy.typing import ArrayLike

from harness.config.limits import MORE_REPEATED, MOST_AGAIN, ODD_BATCH, RARER, RECENT_BATCHES
from harness.data.corpus import Corpus
from harness.data.likeness import likeness_of
from harness.data.screening import Scores
from harness.detectors.windows import MAD_TO_STD
from harness.training.pack import Pack
from harness.training.sites import FaultSchedule, Site, SiteCall

BEFORE, LEAST = 100, 5  # batches that tell what is usual; with fewer nothing is odd
ALIKE = 1 / 30_000  # of the batches that are drawn from the text
HIGH, BEYOND = 0.9, 4.0  # a quantile, and times its distance from the median: small batches have long tails


def odd_batches(pack: Pack, fault_schedule: FaultSchedule, row: int, step: int, most: int) -> int:
    """How many batches from that of `step` on are unlike those before, or one of them again, by their tokens alone.

    0: it is an ordinary one, or there are more than `most`, or what is read is no text. The host waits for the device.
    """
    trial = pack.rows[row]
    planned = step + pack.interventions.batches(trial)
    first = max(0, planned - BEFORE)
    if not most or planned - first < LEAST:
        return 0
    scores = Scores(pack.corpus.counts, pack.planned[trial].model.context, pack.device)
    injector = fault_schedule.armed[trial] if fault_schedule.is_of_data(trial) else None
    memory = deepcopy(dict(injector.memory)) if injector else {}
    usual: list[tuple[float, float]] = []
    earlier, again = EarlierBatches(), 0
    try:
        for position in range(max(0, first - RECENT_BATCHES), planned + most + 1):
            batch = pack.objective.batch(position)[row].clone()
            if batch.is_floating_point() or batch.dim() != 2:
                break
            strikes = pack.interventions.strikes(trial, is_of_data=True) and fault_schedule.is_due(
                trial, Site.BATCH, position
            )
            if injector and strikes:
                injector.visit(SiteCall(Site.BATCH, position, {"batch": batch}, is_look=True))
            tokens = batch.cpu().numpy()
            is_again = earlier.has(tokens, position)
            if position < first:
                continue
            values = float(scores.rarity(batch).mean()), float(scores.repetition(batch).mean())
            if position < planned:
                usual.append(values)
                again += is_again
                continue
            is_rare = is_odd(values, usual) and not is_like_the_text(tokens, pack.corpus)
            if not (is_rare or (is_again and again <= MOST_AGAIN * len(usual))):
                return position - planned
    finally:
        if injector:
            injector.recall(memory)
    return 0


class EarlierBatches:
    """Which batches of a run were read before, token for token, and when last."""

    def __init__(self) -> None:
        self._steps: dict[bytes, int] = {}

    def has(self, batch: np.ndarray, step: int) -> bool:
        """Whether this batch was that of one of the `RECENT_BATCHES` steps before; it is known from now on."""
        digest = blake2b(batch.tobytes(), digest_size=16).digest()
        before, self._steps[digest] = self._steps.get(digest), step
        return batch.size > 0 and before is not None and step - before <= RECENT_BATCHES


def is_odd(values: tuple[float, float], usual: Sequence[tuple[float, float]]) -> bool:
    """Whether a batch is far rarer, or repeats itself more, than others: mean surprise and share of repeated pairs."""
    return bool((np.asarray(values) > limits_of(usual)).any())


def is_like_the_text(batch: np.ndarray, corpus: Corpus) -> bool:
    """Whether one in thirty thousand batches of the training text is at most as likely as this one, [sequences, T + 1].

    Tables and lists of a text are both rarer and more repetitive than the rest, and small batches of nothing else come
    by. Where fewer are drawn, of long sequences, it is one of them.
    """
    return likeness_of(corpus, batch.shape[1]).share_as_unlikely(batch) >= ALIKE


def limits_of(usual: ArrayLike) -> np.ndarray:
    """Beyond which a batch is odd: its mean surprise, nat/token, and its share of repeated pairs, [2].

    `usual` are those of other batches, [batches, 2].
    """
    others = np.asarray(usual)
    middle = np.median(others, axis=0)
    spread = MAD_TO_STD * np.median(np.abs(others - middle), axis=0)
    tail = np.quantile(others, HIGH, axis=0) - middle
    return np.asarray(middle + np.max([ODD_BATCH * spread, [RARER, MORE_REPEATED], BEYOND * tail], axis=0))
