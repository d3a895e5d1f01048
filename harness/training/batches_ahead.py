"""A look at the batches that a row is about to read, without training on them."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy

import numpy as np
from torch import Tensor

from harness.config.limits import MORE_REPEATED, ODD_BATCH, RARER
from harness.data.screening import Scores
from harness.detectors.windows import MAD_TO_STD
from harness.training.pack import Pack
from harness.training.sites import Agenda, Site, Visit

BEFORE, LEAST = 20, 5  # batches that tell what is usual; with fewer nothing is odd


def odd_batches(pack: Pack, agenda: Agenda, row: int, step: int, most: int) -> int:
    """How many batches from that of `step` on are unlike those before, by their tokens alone.

    0: it is an ordinary one, or there are more than `most`, or what is read is no text. The host waits for the device.
    """
    trial = pack.rows[row]
    planned = step + pack.remedies.batches(trial)
    first = max(0, planned - BEFORE)
    batches = [_handed_out(pack, row, position) for position in range(first, planned + most + 1)]
    if batches[0].is_floating_point() or batches[0].dim() != 2:
        return 0
    if agenda.is_of_data(trial) and pack.remedies.strikes(trial, is_of_data=True):
        injector = agenda.armed[trial]
        memory = deepcopy(dict(injector.memory))
        for position, batch in enumerate(batches, first):
            if agenda.is_due(trial, Site.BATCH, position):
                injector.visit(Visit(Site.BATCH, position, {"batch": batch}, is_look=True))
        injector.recall(memory)
    scores = Scores(pack.corpus.counts, pack.planned[trial].model.context, pack.device)
    odd = are_odd(scores, batches, planned - first)
    return odd.index(False) if False in odd else 0


def _handed_out(pack: Pack, row: int, position: int) -> Tensor:
    return pack.objective.batch(position)[row].clone()


def are_odd(scores: Scores, batches: Sequence[Tensor], before: int) -> list[bool]:
    """Of each batch of token ids [B, T + 1] after the first `before`, whether it is far rarer, or repeats more."""
    found = np.zeros(len(batches) - before, bool)
    if before >= LEAST:
        for score, least in ((scores.rarity, RARER), (scores.repetition, MORE_REPEATED)):
            values = np.array([float(score(batch).mean()) for batch in batches])
            usual = np.median(values[:before])
            spread = MAD_TO_STD * np.median(np.abs(values[:before] - usual))
            found |= values[before:] - usual > np.maximum(ODD_BATCH * spread, least)
    return found.tolist()
