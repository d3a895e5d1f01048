"""What a measure costs: steps to equal loss, time by turns, failures with and without it, and when that pays."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from analysis import open_sweep
from analysis.arithmetic.costs import checkpoint_interval, checkpoint_share
from analysis.measures.paired import Estimate
from analysis.measures.tax import LossCurve, TaxedArm, break_even, steps_factor, taxed_arms
from harness.config import ConfigError, Trial
from tests.analysis import synthetic

STEPS, SEEDS = 40, range(4)
RATES = (1e-2, 3e-2)


# --- by hand ---------------------------------------------------------------------------------------------------------


def curve(*losses: float, every: int = 10) -> LossCurve:
    return LossCurve(np.arange(len(losses)) * float(every), np.array(losses))


def test_a_loss_is_reached_between_two_validations() -> None:
    falls = curve(5, 4, 3, 2, 1)
    assert falls.reached(3) == 20 and falls.reached(2.5) == 25 and falls.reached(5) == 0
    assert falls.reached(0.5) == np.inf


def test_a_loss_that_was_seen_once_was_reached_whatever_came_after() -> None:
    assert curve(5, 2, 4, 3).reached(2) == 10
    assert curve(5, np.inf, 3).reached(3) == 20


@pytest.mark.parametrize(
    ("own", "other", "factor"),
    [
        (curve(5, 3, 2, 1.5, 1), curve(5, 4, 3, 2.5, 2), 0.5),  # there after 20 of 40 steps
        (curve(5, 4, 3, 2.5, 2), curve(5, 3, 2, 1.5, 1), 2.0),
        (curve(5, 4, 3), curve(5, 4, 3), 1.0),
        (curve(5, 4, np.inf), curve(5, 4, 3), np.inf),
        (curve(5, 6, 7), curve(5, 4, 3), np.inf),
        (curve(9, 8, 7), curve(5, 4, 3), np.inf),  # worse than the other one was before its first step
    ],
)
def test_the_factor_of_steps(own: LossCurve, other: LossCurve, factor: float) -> None:
    assert steps_factor(own, other) == pytest.approx(factor)


def test_against_a_run_that_learned_nothing_there_is_none() -> None:
    for other in (curve(5, 6), curve(5, np.inf), curve(5, np.nan)):
        assert np.isnan(steps_factor(curve(5, 4, 3), other))


def arm(steps: Estimate, failed: float = 0.0, without: float = 0.0) -> TaxedArm:
    shares = (Estimate(share, share - 0.1, share + 0.1, seeds=10) for share in (failed, without))
    return TaxedArm({}, "qk_norm", 0.1, 0.1, steps, *shares, "a", "b")


def test_the_total_is_the_product_and_its_interval_that_of_both() -> None:
    taxed = arm(Estimate(1.1, 1.1 / 1.2, 1.1 * 1.2))
    total = taxed.total(np.array([2.0]))
    assert total.value == pytest.approx(2.2) and np.isnan(total.low)  # of one round nothing is known
    alone = taxed.total(np.array([]))
    assert (alone.value, alone.low, alone.high) == pytest.approx((1.1, 1.1 / 1.2, 1.1 * 1.2))
    both = arm(Estimate(1.0, 1 / 1.2, 1.2)).total(np.array([1.0, 1.1, 1.2, 1.3, 1.4]))
    assert both.value == pytest.approx(1.2)
    assert np.log(both.high / 1.2) > max(np.log(1.2), np.log(1.3 / 1.2))


def test_a_measure_pays_where_it_saves_more_runs_than_it_costs() -> None:
    """With a fifth more and no failure against a third of all lost: 1.2 x (2 / 3) / 1."""
    taxed = arm(Estimate(1.2, 1.2, 1.2), failed=0.1, without=0.4)
    expected = taxed.expected(Estimate(1.2, 1.2, 1.2))
    assert expected.value == pytest.approx(1.2 * 0.6 / 0.9)
    assert (expected.low, expected.high) == pytest.approx((1.2 * 0.5 / 1.0, 1.2 * 0.7 / 0.8))
    assert break_even(1.25) == pytest.approx(0.2) and break_even(0.9) == 0
    at_even = arm(Estimate(1.25, 1.25, 1.25), failed=0.0, without=break_even(1.25))
    assert at_even.expected(Estimate(1.25, 1.25, 1.25)).value == pytest.approx(1)


def test_a_measure_under_which_all_runs_fail_never_ends() -> None:
    assert arm(Estimate(1, 1, 1), failed=1.0).expected(Estimate(1, 1, 1)).value == np.inf


def test_young_s_interval_loses_least() -> None:
    every = checkpoint_interval(30, 12 * 3600)
    assert every == pytest.approx((2 * 30 * 12 * 3600) ** 0.5)
    shares = [checkpoint_share(30, 12 * 3600, every * factor) for factor in (0.8, 1, 1.25)]
    assert min(shares) == shares[1] == pytest.approx((2 * 30 / (12 * 3600)) ** 0.5)


# --- from stored runs ------------------------------------------------------------------------------------------------


def falling(trial: Trial) -> np.ndarray:
    """From 5 towards 1, twice as fast with QK-norm; the second rate is better, and a seed's own text is easier."""
    speed = (2 if trial.mitigation == "qk_norm" else 1) * (1 if trial.optim.lr > 2e-2 else 0.5)
    return 1 + 4 * 0.95 ** (speed * np.arange(STEPS)) * (1 + 0.01 * trial.seed)


def written(out: Path, loss: Callable[[Trial], np.ndarray] = falling, every: int = 1, **options) -> Path:
    def seen(trial: Trial) -> np.ndarray:
        values = loss(trial)
        return np.where((np.arange(STEPS) + 1) % every == 0, values, np.nan)

    for mitigation in ("none", "qk_norm"):
        trials = [
            synthetic.make_trial(width, rate, seed, mitigation, steps=STEPS)
            for width in (32, 64)
            for rate in RATES
            for seed in SEEDS
        ]
        for width in (32, 64):
            of_width = [trial for trial in trials if trial.model.width == width]
            synthetic.write_pack(
                out, of_width, loss, signals={"validation_loss": seen}, measured=synthetic.READ, **options
            )
    return out


def test_each_arm_is_taken_at_its_best_rate_and_paired_by_seed(tmp_path: Path) -> None:
    arms = taxed_arms(open_sweep(written(tmp_path / "out", every=4)))
    assert [(arm.place, arm.level) for arm in arms] == [({"width": 32}, "qk_norm"), ({"width": 64}, "qk_norm")]
    for found in arms:
        assert found.rate == found.rate_without == pytest.approx(3e-2)
        assert found.steps.value == pytest.approx(0.5, abs=0.03) and found.steps.seeds == len(SEEDS)
        assert found.steps.low <= found.steps.value <= found.steps.high
        assert found.failed.value == 0 and found.failed.seeds == len(SEEDS) and 0.4 < found.failed.high < 0.6


def test_failures_are_counted_at_the_best_rate(tmp_path: Path) -> None:
    def outcome(trial: Trial) -> str:
        return "divergent" if trial.mitigation == "none" and trial.seed in (1, 2) else "trained"

    arms = taxed_arms(open_sweep(written(tmp_path / "out", outcome=outcome)))
    assert all((found.failed.value, found.failed_without.value) == (0, 0.5) for found in arms)
    assert all(found.expected(found.total(np.array([]))).value < found.steps.value for found in arms)


def test_a_run_that_was_lost_is_no_early_end(tmp_path: Path) -> None:
    """Its last validation before the NaN is lower than that of the other's whole run."""

    def lost(trial: Trial) -> np.ndarray:
        values = falling(trial)
        if trial.mitigation == "qk_norm":
            values[-4:] = np.nan
        return values

    arms = taxed_arms(open_sweep(written(tmp_path / "out", lost)))
    assert all(found.steps.value == np.inf and found.failed.value == 1 for found in arms)


@pytest.mark.parametrize(
    ("axis", "against", "said"),
    [
        ("mitigtion", "none", r"--axis mitigtion: unknown; did you mean mitigation\? allowed: "),
        ("mitigation", "qk", "--axis mitigation --against qk: nothing to compare; allowed: none, qk_norm"),
        ("depth", "2", "--axis depth --against 2: nothing to compare; allowed: an axis with several levels"),
    ],
)
def test_what_cannot_be_compared(axis: str, against: str, said: str, tmp_path: Path) -> None:
    sweep = open_sweep(written(tmp_path / "out"))
    with pytest.raises(ConfigError, match=said):
        taxed_arms(sweep, axis, against)


def test_a_width_may_be_the_axis(tmp_path: Path) -> None:
    found = taxed_arms(open_sweep(written(tmp_path / "out")), "width", "32")
    assert [(arm.place, arm.level) for arm in found] == [
        ({"mitigation": "none"}, "64"),
        ({"mitigation": "qk_norm"}, "64"),
    ]
    assert all(arm.steps.value == pytest.approx(1) for arm in found)


def test_too_few_validations_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has 2 validations, .* train\.validate_every"):
        taxed_arms(open_sweep(written(tmp_path / "out", every=20)))


def test_an_interrupted_arm_is_left_out(tmp_path: Path) -> None:
    out = written(tmp_path / "out")
    trials = [synthetic.make_trial(32, RATES[1], seed, "post_ln", steps=STEPS) for seed in SEEDS]
    synthetic.write_pack(out, trials, falling, steps_done=20, finish=False, measured=synthetic.READ)
    assert {arm.level for arm in taxed_arms(open_sweep(out))} == {"qk_norm"}
