"""Value faults in packs whose rows pass through the model in parts: each row is struck as in a pack of one part."""

from __future__ import annotations

from functools import cache

import pytest

from harness.testing import engine
from harness.training.sites import Site
from injectors.value import Value
from tests.injectors.spies import START, differing, trial, watch

LARGE = {
    Site.WEIGHT: "blocks.1.feedforward.down",
    Site.GRADIENT: "blocks.1.feedforward.down",
    Site.ACTIVATION: "blocks.0.attention.scores",
    Site.ACTIVATION_GRADIENT: "blocks.1.feedforward.up",
    Site.UPDATE: "head",
}


STRUCK = (1, 8, 9, 15, 17, 23)


def one_of(site, seed):
    """A faulty trial of that seed, with an element of its own."""
    fault = Value(
        start=START, site=site, tensor=LARGE[site], element=100 + seed, model="set", value=0.25, rank=seed % 2
    )
    return trial(fault, seed=seed)


@cache
def large(forks):
    """Trials of 24 seeds in many parts, those STRUCK at every site; behind them the twins of those; run and spy."""
    order = {r: [one_of(site, r) for site in LARGE] if r in STRUCK else [trial(seed=r)] for r in range(24)}
    trials = [each for own in order.values() for each in own]
    return watch([*trials, *(trial(seed=r) for r in STRUCK)], list(LARGE), forks=forks)


@cache
def small(seed):
    """The struck trials of one seed, and behind them their twin, in one part."""
    return engine.run([*(one_of(site, seed) for site in LARGE), trial(seed=seed)])


@pytest.mark.parametrize("forks", [False, True])
@pytest.mark.parametrize("site", LARGE)
def test_every_row_of_a_large_pack_is_struck_as_in_a_small_one(site, forks):
    """Faulty rows of each site in several parts."""
    run, spy = large(forks)
    parts, planned = spy.pack.parts, list(spy.pack.planned)
    assert len(parts) > 2 and len(small(STRUCK[0]).pack.parts) == 1
    own_parts = set()
    for i, r in enumerate(STRUCK):
        number, twin_number = planned.index(one_of(site, r)), 18 + 5 * len(STRUCK) + i
        alone, place = small(r), list(LARGE).index(site)
        assert (
            engine.same_bits(run[number], alone[place]) == [] == engine.same_bits(run[twin_number], alone[len(LARGE)])
        )
        assert run.result.events[number] == alone.result.events[place] and len(run.result.events[number]) == 1
        own, twin = (spy.pack.rows.index(each) for each in (number, twin_number))
        own_parts |= {n for n, part in enumerate(parts) if part.start <= own < part.stop}
        if site in (Site.ACTIVATION, Site.ACTIVATION_GRADIENT):
            seen = spy.at_taps(site, START)[LARGE[site]][r % 2]
            assert differing({"": seen[twin]}, {"": seen[own]}) == {"": [100 + r]}
    assert len(own_parts) > 2
