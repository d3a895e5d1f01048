"""Intervals against scipy's, rates against counts made by hand."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy.stats import binomtest

from analysis import open_sweep, outcomes, rates
from analysis.measures.outcomes import OUTCOMES
from analysis.measures.statistics import draws, median_interval, wilson_interval
from tests.analysis import synthetic

PAIRS = [(0, 1), (1, 1), (0, 17), (3, 17), (17, 17), (1, 10_000), (5_000, 10_000), (9_999, 10_000)]


def test_wilson_interval_is_that_of_scipy() -> None:
    counts, totals = np.array(PAIRS).T
    low, high = wilson_interval(counts, totals)
    for i, (count, total) in enumerate(PAIRS):
        expected = binomtest(count, total).proportion_ci(method="wilson")
        np.testing.assert_allclose([low[i], high[i]], [expected.low, expected.high], rtol=1e-12, atol=1e-15)
        assert low[i] <= count / total <= high[i]


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory):
    """Faults by bit: of 0 none, of 1 one, of 2 two ... of four trials end far out, one of bit 3 is not finished."""
    out = tmp_path_factory.mktemp("rates")
    trials = [
        synthetic.make_trial(seed=seed, fault=synthetic.WeightBit(start=20, bit=bit))
        for bit in range(4)
        for seed in range(4)
    ]
    twins = [dataclasses.replace(trials[0].golden, fault=synthetic.LastBit(start=20, seed=n)) for n in range(8)]

    def loss(trial):
        is_bad = trial.fault.name == "weight_bit" and trial.seed < trial.fault.bit
        return np.where(np.arange(40) < 20, 2.0, 3.0 if is_bad else 2.0)

    events = lambda trial: [event | {"bit": None} for event in synthetic.strike_events(trial)]  # noqa: E731
    synthetic.write_pack(out, synthetic.with_golden([*trials[:-1], *twins]), loss, faults=events)
    synthetic.write_pack(out, trials[-1:], finish=False, steps_done=10)
    return outcomes(open_sweep(out))


def test_rates_by_group(judged) -> None:
    table = rates(judged, by=["fault_bit"])
    columns = ["fault_bit", "outcome", "count", "trials", "idle", "left_out", "share", "low", "high"]
    assert list(table.columns) == columns
    assert table["outcome"].tolist() == list(OUTCOMES) * 4, "outcomes that did not happen too"
    lingering = table[table["outcome"] == "lingering"]
    assert lingering["fault_bit"].tolist() == [0, 1, 2, 3]
    assert lingering["count"].tolist() == [0, 1, 2, 3]
    assert lingering["trials"].tolist() == [4, 4, 4, 3] and lingering["left_out"].tolist() == [0, 0, 0, 1]
    np.testing.assert_allclose(lingering["share"], [0, 1 / 4, 2 / 4, 1])
    np.testing.assert_allclose(table["count"] + 0.0, table["share"] * table["trials"])
    low, high = wilson_interval(lingering["count"], lingering["trials"])
    assert (lingering["low"] == low).all() and (lingering["high"] == high).all()


def test_rates_of_all_and_by_several(judged) -> None:
    table = rates(judged).set_index("outcome")
    assert table["count"].to_dict() == dict.fromkeys(OUTCOMES, 0) | {"masked": 9, "lingering": 6}
    assert set(table["trials"]) == {15} and set(table["left_out"]) == {1}, "twins with a last bit do not count"
    assert len(rates(judged, by=["fault_bit", "seed"])) == 16 * len(OUTCOMES)
    unjudged = rates(judged, by=["fault_bit", "seed"]).query("fault_bit == 3 and seed == 3")
    assert unjudged["trials"].tolist() == [0] * 5 and unjudged["share"].isna().all() and unjudged["low"].isna().all()


def test_rates_judge_a_sweep_that_was_not_and_group_missing_values(judged) -> None:
    sweep = judged.drop_vars("fault_outcome")
    pd.testing.assert_frame_equal(rates(sweep, by=["fault_bit"]), rates(judged, by=["fault_bit"]))
    assert rates(sweep, by=["struck_bit"])["struck_bit"].isna().all(), "none of them has a single bit"
    with pytest.raises(KeyError, match="nonsense"):
        rates(sweep, by=["nonsense"])


def test_rates_without_faults(tmp_path: Path) -> None:
    synthetic.write_pack(tmp_path, [synthetic.make_trial()])
    sweep = open_sweep(tmp_path)
    assert rates(sweep)["trials"].tolist() == [0] * 5 and rates(sweep, by=["width"]).empty


def test_median_counts_what_was_not_seen_to_end_as_longer_than_all() -> None:
    inf = np.inf
    assert median_interval(np.array([3.0, 1, 2]))[0] == 2
    assert median_interval(np.array([3.0, inf, 2]))[0] == 3
    assert median_interval(np.array([3.0, inf, 2, inf]))[0] == inf
    assert median_interval(np.array([5.0]))[0] == 5 and np.isnan(median_interval(np.array([5.0]))[1:]).all()
    assert np.isnan(median_interval(np.array([]))).all()
    median, low, high = median_interval(np.array([1.0, 2, 3, 4, inf, inf]))
    assert low < median == 3.5 and high == inf


def test_median_interval_agrees_with_the_order_statistics() -> None:
    """The classic distribution-free interval: the values of ranks n/2 -+ 1.96 sqrt(n)/2."""
    values = np.sort(np.random.default_rng(0).exponential(10, 400))
    _, low, high = median_interval(values)
    draws.cache_clear()
    assert (low, high) == median_interval(values)[1:]
    reach = 1.96 * np.sqrt(400) / 2
    assert low == pytest.approx(values[round(200 - reach)], abs=0.5) and high == pytest.approx(
        values[round(200 + reach)], abs=0.5
    )
