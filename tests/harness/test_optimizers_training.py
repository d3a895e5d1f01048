"""Every optimizer trains, whatever is done to its updates."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from harness.optim.optimizers import OPTIMIZERS
from harness.testing import engine
from tests.harness.features import OPTIONS

every = pytest.mark.parametrize("name", OPTIMIZERS)
RATES = {"sgd": 0.1, "lars": 0.1, "lion": 5e-3, "lamb": 3e-2, "adafactor": 3e-2}


def trials_of(name, count, **fields):
    """Trials that differ; intervals are short, so that resets happen."""
    fields = {"name": name, "steps": 20, "vocabulary": 32, "depth": 1} | OPTIONS.get(name, {}) | fields
    rate = RATES.get(name, 1e-2)
    return [engine.trial(seed=r, lr=rate * (1 + 0.3 * r), weight_decay=1e-3 * r, **fields) for r in range(count)]


FIELDS = [{}, {"clip_update": 0.5}, {"decay_follows": "schedule"}, {"parametrization": "mup"}]
PACKS = [[FIELDS[0], FIELDS[2]], [FIELDS[1]], [FIELDS[3]]]  # those of one structure together


@cache
def trained(name, pack):
    """Three trials of each of the fields of a pack."""
    trials = [t for fields in PACKS[pack] for t in trials_of(name, 3, batch=8, base_width=8, **fields)]
    return engine.run(trials, block=5)


@every
@pytest.mark.parametrize("fields", FIELDS)
def test_it_trains(name, fields):
    (pack,) = [number for number, own in enumerate(PACKS) if fields in own]
    run, first = trained(name, pack), 3 * PACKS[pack].index(fields)
    own = slice(first, first + 3)
    loss = run.signals["loss"][own]
    assert run.result.nonfinite_step[own] == [None] * 3
    assert (loss[:, -5:].mean(1) < loss[:, 0] - 0.1).all(), loss[:, ::5]
    assert np.isfinite(run.signals["second_moment_norm"][own]).all() == ("moment_2" in OPTIMIZERS[name].slots)


def test_adafactor_that_is_relative_to_the_weights_has_the_rates_for_that():
    """muP's rates follow from what the size of an update follows (harness/model/scaling.py)."""
    rates = []
    for is_relative in (False, True):
        options = {"relative_step": True, "parameter_scale": is_relative}
        pack = engine.pack_of(trials_of("adafactor", 2, parametrization="mup", base_width=4, adafactor=options))
        rates.append(pack.layout.by_name["blocks.0.attention.query"].learning_rate)
    assert rates == [0.25, 0.5]
