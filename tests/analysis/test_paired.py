"""Estimates in pairs: intervals that are known, and how often they are wrong."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import scipy.stats

from analysis.measures.paired import Estimate, largest_median, mean, paired
from analysis.measures.statistics import bootstrap, mean_interval


def frame(*columns: list[float], seeds: range | list[int] | None = None) -> pd.DataFrame:
    """[seed, column]"""
    values = np.array(columns, dtype=float).T
    return pd.DataFrame(values, index=range(len(values)) if seeds is None else seeds, columns=range(len(columns)))


def test_seeds_are_drawn_in_pairs() -> None:
    own, base = frame([1, 2, 3, 4]), frame([2, 3, 4, 5])
    found = paired(own, base, mean)
    assert (found.value, found.change, found.change_low, found.change_high, found.seeds) == (2.5, -1, -1, -1, 4)
    assert (found.low, found.high) == pytest.approx(scipy.stats.t.interval(0.95, 3, 2.5, np.sqrt(5 / 12)))


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
def test_how_often_a_bootstrap_of_no_effect_excludes_no_change(seeds: int, expected: float) -> None:
    """As the report says of two and of three seeds; with many it comes near the 5% that an interval promises."""
    rng = np.random.default_rng(0)
    pairs = 400
    found = [bootstrap(rng.normal(size=seeds), lambda drawn: drawn.mean(axis=-1)) for _ in range(pairs)]
    wrong = np.mean([low > 0 or high < 0 for low, high in found])
    assert wrong == pytest.approx(expected, abs=4 * np.sqrt(expected * (1 - expected) / pairs))


# --- means, over seeds and over the held-out text ----------------------------------------------------------------

TRUTH, COMPARISONS = -0.03, 200


def compared(rng: np.random.Generator, seeds: int, segments: int, of_seeds: float, of_text: float, rest: float):
    """A comparison with known truth: losses of two mitigations that share seeds and text, each part drawn anew.

    The three are standard deviations of what differs between the two by seed, by segment, and by both; beside them
    lies what they have in common, which is larger and must not matter.
    """
    common = 3 + rng.normal(0, 0.3, (seeds, 1)) + rng.normal(0, 0.5, segments)
    change = TRUTH + rng.normal(0, of_seeds, (seeds, 1)) + rng.normal(0, of_text, segments)
    change = change + rng.normal(0, rest, (seeds, segments))
    return paired(*(pd.DataFrame(values) for values in (common + change, common)), mean)


@pytest.mark.parametrize("seeds", [2, 3, 8])
@pytest.mark.parametrize(
    ("segments", "of_seeds", "of_text", "rest"),
    [(64, 0.02, 0.02, 0.03), (64, 0.02, 0.0, 0.0), (64, 0.004, 0.1, 0.02), (16, 0.01, 0.05, 0.1), (1, 0.02, 0.0, 0.0)],
    ids=["both", "seeds alone", "text above all", "few segments", "one loss a run"],
)
def test_the_interval_of_a_change_covers_the_truth(seeds, segments, of_seeds, of_text, rest) -> None:
    """Over 200 simulated comparisons within 92% to 98%, which is what 95% comes to in so many; never below 92%.

    Where little but the text differs, a variance between 2 or 3 seeds is hardly known, and the interval errs wide.
    """
    rng = np.random.default_rng(1)
    found = [compared(rng, seeds, segments, of_seeds, of_text, rest) for _ in range(COMPARISONS)]
    share = np.mean([one.change_low <= TRUTH <= one.change_high for one in found])
    assert 0.92 <= share <= (0.98 if of_seeds >= of_text else 1)


def test_the_parts_of_the_variance_are_those_of_the_two_way_table() -> None:
    """Mean squares of a table without replicates, by hand, and the degrees of freedom of their combination."""
    values = np.array([[1.0, 2.0, 4.0], [2.0, 5.0, 3.0], [4.0, 6.0, 9.0], [1.0, 3.0, 2.0]])
    s, g = values.shape
    rows, columns, mean_of_all = values.mean(1), values.mean(0), values.mean()
    seeds, segments = (
        g * ((rows - mean_of_all) ** 2).sum() / (s - 1),
        s * ((columns - mean_of_all) ** 2).sum() / (g - 1),
    )
    rest = ((values - rows[:, None] - columns + mean_of_all) ** 2).sum() / ((s - 1) * (g - 1))
    total = seeds + segments - rest
    df = total**2 / (seeds**2 / (s - 1) + segments**2 / (g - 1) + rest**2 / ((s - 1) * (g - 1)))
    reach = scipy.stats.t.ppf(0.975, df) * np.sqrt(total / (s * g))
    assert mean_interval(values) == pytest.approx((mean_of_all - reach, mean_of_all + reach), rel=1e-12)


def test_means_that_cannot_vary_or_are_not_known() -> None:
    assert mean_interval(np.full((3, 4), 2.5)) == (2.5, 2.5)
    for values in (np.ones((1, 64)), np.array([[1.0], [np.inf]]), np.array([[1.0], [np.nan]]), np.ones((3, 0))):
        assert np.isnan(mean_interval(values)).all()
