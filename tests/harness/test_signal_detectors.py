"""Detectors of what readings show: each on what it is for, and between two readings."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from harness.detectors.base import AFTER_THE_STEP
from harness.detectors.replay import replay
from harness.detectors.table import DETECTORS
from harness.readings.table import READ_BY
from harness.testing import engine
from harness.testing.detectors import along_of
from injectors.value import Value
from tests.harness.test_detectors import options_of, promises

ROWS, STEPS, LAYERS, RANKS, STRUCK = 4, 300, 2, 4, 200
OF_READINGS = [name for name, cls in DETECTORS.items() if set(cls.watches) & set(READ_BY)]


def said(name: str, given: np.ndarray, **constants: float) -> tuple[np.ndarray, np.ndarray]:
    """Alarms and scores of a detector whose loss is usual, and whose own signals have these values."""
    signals = dict.fromkeys(DETECTORS[name].watches, given) | {"loss": np.full((ROWS, STEPS), 3.0)}
    return replay(DETECTORS[name], options_of(name, **constants), signals, np.ones((ROWS, STEPS), bool))


def usual(level: float, spread: float, *shape: int) -> np.ndarray:
    return level + spread * np.random.default_rng(3).standard_normal((ROWS, STEPS, *shape))


@pytest.mark.parametrize("rank", [0, 3])
def test_the_rank_whose_gain_differs_is_seen_at_once_and_no_other_step(rank: int) -> None:
    gains = usual(0.1, 0.01, LAYERS, RANKS) + usual(0, 0.1)[..., None, None]  # what all ranks share says nothing
    gains[1, STRUCK, :, rank] += 1.0
    alarms, scores = said("gain_peers", gains)
    assert alarms[1, STRUCK] and scores[1, STRUCK] > 20 and not alarms[:, :32].any()
    assert alarms.sum() - 1 < 0.06 * alarms.size, "of clean steps"
    together = gains.copy()
    together[1, STRUCK] = gains[1, STRUCK - 1] + 1.0
    assert said("gain_peers", together)[1][1, STRUCK] < 2.5


def test_a_rank_needs_a_lead_over_the_second() -> None:
    gains = usual(0.1, 0.01, LAYERS, RANKS)
    gains[:, STRUCK, :, 0] += 1.0
    gains[:, STRUCK, :, 1] -= 1.0
    assert not said("gain_peers", gains, lead=3.0)[0][:, STRUCK].any()
    assert said("gain_peers", gains, lead=1.0)[0][:, STRUCK].all()


@pytest.mark.parametrize(("name", "level"), [("entropy_collapse", 2.0), ("qk_rank", 12.0)])
def test_a_collapse_of_one_layer_is_seen(name: str, level: float) -> None:
    values = usual(level, 0.02 * level, LAYERS)
    assert not said(name, values)[0].any()
    values[2, STRUCK:, 1] *= 0.3
    alarms, _ = said(name, values)
    assert alarms[2, STRUCK + (name == "qk_rank")] and not alarms[[0, 1, 3]].any()  # known when the step is over
    slow = values * 0 + np.linspace(level, 0.2 * level, STEPS)[:, None]
    assert not said(name, slow)[0].any(), "a fall over the whole run is none"


def test_attention_that_looks_at_one_token_has_collapsed_whatever_was_before() -> None:
    values = usual(2.0, 0.02, LAYERS)
    values[:, 0, 0] = 0.001
    assert (
        said("entropy_collapse", values)[0][:, 0].all()
        and not said("entropy_collapse", values, floor=0.0)[0][:, 0].any()
    )


@pytest.mark.parametrize("baseline", ["first", "last"])
def test_kurtosis_that_stays_high_is_seen_at_its_third_reading(baseline: str) -> None:
    values = usual(1.0, 0.1, LAYERS)
    values[0, STRUCK : STRUCK + 2, 1] += 5  # for two readings
    values[1, STRUCK : STRUCK + 3, 1] += 5
    alarms, _ = said("kurtosis", values, baseline=baseline)
    assert np.flatnonzero(alarms[1]).tolist() == [STRUCK + 2] and not alarms[0].any()
    drifting = values * 0 + usual(1.0, 0.1, LAYERS) + np.linspace(0, 10, STEPS)[:, None]
    assert said("kurtosis", drifting)[0][:, -1].all(), "as published, a drift is an alarm for good"


@pytest.mark.parametrize(("name", "growth"), [("router_logits", 2.0), ("expert_output", 5.0)])
def test_numbers_of_experts_that_grow_are_seen_and_learned(name: str, growth: float) -> None:
    values = usual(4.0, 0.1, LAYERS)
    values[0, STRUCK, 1] *= 0.9 * growth
    values[1, STRUCK, 1] *= 1.1 * growth
    values[2, 3, 0] = 2e4  # too early for a median, and beyond the limit
    values[3, STRUCK:, 1] *= 1.5 * growth
    alarms, scores = said(name, values)
    assert np.argwhere(alarms[:3]).tolist() == [[1, STRUCK], [2, 3]]
    assert alarms[3, STRUCK] and not alarms[3, -1], "a new level is learned"
    assert np.isnan(scores[0, 5])


def test_one_expert_that_takes_nearly_all_is_seen_at_the_third_step() -> None:
    shares = np.full((ROWS, STEPS), 0.4)
    shares[0, STRUCK : STRUCK + 2] = 0.9
    shares[1, STRUCK : STRUCK + 4] = 0.85
    shares[2, 5:12] = 0.99  # too early
    alarms, _ = said("expert_share", shares)
    assert np.argwhere(alarms).tolist() == [[1, STRUCK + 2]]


def test_a_gradient_that_the_second_moment_has_not_expected_is_seen_at_2_3() -> None:
    lags = np.full((ROWS, STEPS), 1.0)
    lags[0, 10] = 4.0  # too early
    lags[1, STRUCK] = 2.31
    lags[2, STRUCK] = 2.29
    alarms, scores = said("moment_lag", lags)
    assert np.argwhere(alarms).tolist() == [[1, STRUCK + 1]]  # known when the step is over
    assert np.isnan(scores[:, :31]).all() and (scores[3, 31:] == 1).all()


def test_a_gradient_a_hundred_times_as_large_lags_in_a_run() -> None:
    """In the rows of the embedding that have one at all; no lag is above 1 / sqrt(1 - beta2)."""
    own = {"steps": 60, "beta2": 0.99, "clip": None, "detect": {"name": "moment_lag"}, "signals": {"moment_lag": 1}}
    own["detect.moment_lag"] = {"limit": 2.0}
    fault = Value(site="gradient", tensor="embedding", elements=None, start=45, model="scale", value=100.0)
    run = engine.run([engine.trial(**own), engine.trial(fault=fault, **own)])
    alarms, lags = run.signals["alarm_moment_lag"], run.signals["embedding_moment_lag"]
    assert alarms[1, 46] == 1 and not alarms[0].any()
    assert 2 < lags[1, 45] <= 10 and lags[0].max() < 2


@pytest.mark.parametrize("bit", [30, 2])
def test_a_flipped_bit_of_a_moment_is_beyond_its_bound(bit: int) -> None:
    fault = Value(site="moment_2", tensor="blocks.0.feedforward.up", element=3, start=4, bit=bit)
    own = {"steps": 9, "detect": {"name": "moment_bound"}, "signals": {"moment_size": 1}}
    run = engine.run([engine.trial(**own), engine.trial(fault=fault, **own), engine.trial(seed=1, **own)])
    alarms = run.signals["alarm_moment_bound"]
    assert (alarms[1, 5] == 1) == (bit == 30), "the moments of a step are judged at the next"
    assert not alarms[[0, 2]].any() and not alarms[1, :5].any()


# --- at a cadence ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OF_READINGS)
def test_between_two_readings_a_detector_is_silent_and_learns_nothing(name: str) -> None:
    """What is read every third step is judged as if there were no others; a loss that is NaN is an alarm at any."""
    sizes = {"layer": LAYERS, "rank": RANKS}
    shapes = {s: tuple(sizes[dim] for dim in along_of(s)) for s in DETECTORS[name].watches}
    dense = {s: np.abs(usual(1.0, 0.3, *shape)) for s, shape in shapes.items()} | {"loss": np.full((ROWS, STEPS), 3.0)}
    gaps = {s: np.full((ROWS, 3 * STEPS, *x.shape[2:]), np.nan) for s, x in dense.items()}
    for signal, values in dense.items():
        gaps[signal][:, ::3] = values
    gaps["loss"][:] = 3.0
    constants = {"sigma": 0.5} if name == "kurtosis" else {}
    every, now_and_then = (
        replay(DETECTORS[name], options_of(name, **constants), values, np.ones(values["loss"].shape, bool))
        for values in (dense, gaps)
    )
    shift = int(bool(AFTER_THE_STEP.intersection(DETECTORS[name].watches)))  # those of the step before
    places = np.arange(shift, 3 * STEPS, 3)
    count = len(places) - shift
    for found, whole in zip(now_and_then, every, strict=True):
        assert np.array_equal(found[:, places][:, :count], whole[:, shift : shift + count], equal_nan=True)
    silent = np.setdiff1d(np.arange(3 * STEPS), places)
    assert not now_and_then[0][:, silent].any() and np.isnan(now_and_then[1][:, silent]).all()
    gaps["loss"][:, 100] = np.nan
    assert replay(DETECTORS[name], options_of(name), gaps, np.ones((ROWS, 3 * STEPS), bool))[0][:, 100].all()


def test_a_reading_that_is_not_a_number_at_all_is_no_alarm_of_its_own() -> None:
    detector = promises("moment_bound").made()
    nan = torch.full((8,), torch.nan)
    is_alarm, score = detector.judge(
        {"loss": torch.ones(8), "moment_1_size": nan, "moment_2_size": nan}, torch.ones(8, dtype=torch.bool)
    )
    assert not is_alarm.any() and score.isnan().all()
