"""Estimates in pairs: intervals that are known, and how often they are wrong."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from analysis.paired import Estimate, largest_median, mean, paired
from analysis.statistics import bootstrap


def frame(*columns: list[float], seeds: range | list[int] | None = None) -> pd.DataFrame:
    """[seed, column]"""
    values = np.array(columns, dtype=float).T
    return pd.DataFrame(values, index=range(len(values)) if seeds is None else seeds, columns=range(len(columns)))


def test_seeds_are_drawn_in_pairs() -> None:
    own, base = frame([1, 2, 3, 4]), frame([2, 3, 4, 5])
    found = paired(own, base, mean)
    assert (found.value, found.change, found.change_low, found.change_high, found.seeds) == (2.5, -1, -1, -1, 4)
    assert 1 < found.low < 2.5 < found.high < 4


def test_only_common_seeds_and_columns_are_compared() -> None:
    own, base = frame([1, 2, 3], [9, 9, 9], seeds=[1, 2, 3]), frame([0, 0, 7], seeds=[2, 3, 4])
    found = paired(own, base, largest_median)
    assert (found.value, found.change, found.seeds) == (9, 2.5, 3)


def test_gaps_take_out_seeds_and_empty_columns_themselves() -> None:
    own = frame([1, np.nan, 3], [np.nan] * 3)
    assert paired(own, None, largest_median).value == 2
    nothing = paired(frame([np.nan, np.nan]), frame([1, 2]), mean)
    assert nothing.seeds == 0 and np.isnan([nothing.value, nothing.change]).all()
    alone = paired(frame([1, 2]), frame([np.nan, np.nan]), mean)
    assert alone.value == 1.5 and np.isnan(alone.change)
    assert paired(frame([1, 2, 3]), frame([0, np.nan, 1]), mean).change == 1.5


def test_infinities() -> None:
    lost, fine = frame([np.inf, np.inf]), frame([1, 2])
    assert paired(lost, fine, mean).change == np.inf and paired(fine, lost, mean).change == -np.inf
    same = paired(lost, lost, mean)
    assert (same.change, same.change_low, same.change_high) == (0, 0, 0)
    # One of three: whether it is drawn decides.
    found = paired(frame([1, 2, np.inf]), frame([1, 1, 1]), mean)
    assert (found.value, found.low, found.high, found.change_low) == (np.inf, 1, np.inf, 0)


def test_intervals_end_at_whole_draws_at_or_beyond_the_quantiles() -> None:
    numbers = np.random.default_rng(0).permutation(np.arange(2000.0))
    found = bootstrap(np.arange(3.0), lambda drawn: numbers)
    assert found == (np.floor(0.025 * 1999), np.ceil(0.975 * 1999)) == (49, 1950)


def test_a_statistic_that_is_not_known_for_some_draw_has_no_interval() -> None:
    values = np.arange(3.0)
    assert np.isnan(bootstrap(values, lambda drawn: np.where(drawn.sum(axis=-1) > 5, np.nan, 1.0))).all()
    assert bootstrap(values, lambda drawn: np.where(drawn.sum(axis=-1) > 6, np.nan, 1.0)) == (1, 1)


def test_the_mean_of_logarithms_becomes_a_ratio() -> None:
    found = paired(np.log(frame([1, 4])), np.log(frame([1, 1])), mean).exponential()
    assert (found.value, found.change, found.seeds) == (pytest.approx(2), pytest.approx(2), 2)
    assert np.isnan(Estimate().exponential().value)


@pytest.mark.parametrize(("seeds", "expected"), [(2, 0.5), (3, 0.25), (8, 0.1), (30, 0.06)])
def test_how_often_an_interval_of_no_effect_excludes_no_change(seeds: int, expected: float) -> None:
    """As the report says of two and of three seeds; with many it comes near the 5% that an interval promises."""
    rng = np.random.default_rng(0)
    pairs = 400
    estimates = [paired(*(frame(rng.normal(size=seeds)) for _ in range(2)), mean) for _ in range(pairs)]
    wrong = np.mean([found.change_low > 0 or found.change_high < 0 for found in estimates])
    assert wrong == pytest.approx(expected, abs=4 * np.sqrt(expected * (1 - expected) / pairs))
