"""Mitigations against the baseline: every metric on results whose answer is known, and what cannot be told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import scipy.stats

from analysis.measures import metrics
from harness.config import Trial
from tests.analysis.mitigated import LOST, RATES, Ending, Study, numbers, of_faults, of_seeds


def students(*samples: Sequence[float]) -> Any:
    """(mean, low, high) of each sample, with Student's 95% interval."""
    each = [(np.mean(x), *scipy.stats.t.interval(0.95, len(x) - 1, np.mean(x), scipy.stats.sem(x))) for x in samples]
    return pytest.approx(tuple(number for numbers in each for number in numbers))


# --- final loss --------------------------------------------------------------------------------------------------


def test_final_losses_at_the_own_best_rate_and_at_the_baselines(study: Study) -> None:
    """With Student's intervals over the three seeds."""
    losses = {"none": (3.0, 2.0, 4.0), "qk_norm": (2.5, 2.25, 1.5)}
    gains = (0.0, 0.125, 0.25)

    def ending(trial: Trial) -> Ending:
        extra = gains[trial.seed] if trial.mitigation == "qk_norm" else 0.0
        return Ending(loss=losses[trial.mitigation][RATES.index(trial.optim.lr)] + trial.seed - extra)

    study.write(ending)
    row, base = study.row(), study.row("none")
    assert (row["best_rate"], row["common_rate"], row["final_loss_seeds"]) == (1e-1, 1e-2, 3)
    # 1.5 + seed - gain against 2 + seed at the baseline's own best; 2.25 + seed - gain at its rate.
    assert numbers(row, "final_loss") == students((1.5, 2.375, 3.25), (-0.5, -0.625, -0.75))
    assert numbers(row, "common_loss") == students((2.25, 3.125, 4.0), (0.25, 0.125, 0.0))
    assert numbers(base, "final_loss")[:3] == students((2, 3, 4)) == numbers(base, "common_loss")[:3]
    assert np.isnan(numbers(base, "final_loss")[3:]).all(), "the baseline is not compared with itself"


def test_losses_are_compared_on_the_same_windows_and_the_text_is_in_the_interval(study: Study) -> None:
    """What segments have in common goes out of a change; in which segments it differs is what is not known of it."""
    changes, common = np.array([-0.1, -0.3, -0.2, -0.4]), np.array([0.0, 3.0, -2.0, 1.0])

    def segments(trial: Trial) -> np.ndarray:
        own = 2 + common + (changes if trial.mitigation == "qk_norm" else 0)
        return np.array([*own, *[np.nan] * 60])

    study.write(rates=[1e-2], ends={"final_segment_loss": segments})
    row = study.row()
    assert numbers(row, "final_loss")[3:] == students(changes)
    assert row["final_loss_high"] - row["final_loss_low"] > 10 * (
        row["final_loss_change_high"] - row["final_loss_change_low"]
    )
    assert study.compare().is_told("final_loss").tolist() == [False, True]


def test_a_run_that_was_lost_counts_as_infinite_in_every_segment(study: Study) -> None:
    def segments(trial: Trial) -> np.ndarray:
        return np.array([*(np.ones(4) * (np.nan if ending(trial).is_lost else 1)), *[np.nan] * 60])

    def ending(trial: Trial) -> Ending:
        return LOST if trial.mitigation == "qk_norm" and trial.seed == 1 else Ending(loss=1.0)

    row = study.write(ending, rates=[1e-2], ends={"final_segment_loss": segments}).row()
    assert (row["final_loss"], row["final_loss_low"], row["final_loss_high"]) == (np.inf, 1, np.inf)
    assert row["final_loss_change"] == np.inf and row["final_loss_change_low"] == 0


def test_of_equally_good_rates_the_smallest_is_best(study: Study) -> None:
    assert study.write().row("none")["best_rate"] == RATES[0]


def test_a_run_that_was_lost_is_infinite_and_its_rate_not_the_best(study: Study) -> None:
    def ending(trial: Trial) -> Ending:
        if trial.mitigation == "qk_norm" and trial.optim.lr == RATES[1] and trial.seed == 2:
            return LOST
        return Ending(loss=1.0 if trial.optim.lr == RATES[1] else 2.0)

    row = study.write(ending).row()
    assert (row["best_rate"], row["final_loss"]) == (RATES[0], 2.0)
    value, low, high, change, change_low, change_high = numbers(row, "common_loss")
    assert np.isinf([value, high, change, change_high]).all() and (low, change_low) == (1.0, 0.0)


def test_trials_that_are_not_finished_do_not_count(study: Study) -> None:
    losses = of_seeds(none=(2.0, 2.0, 2.0), qk_norm=(1.0, 1.0, 7.0))
    study.write(losses, mitigations=["none"]).write(losses, mitigations=["qk_norm"], seeds=(0, 1))
    study.write(losses, mitigations=["qk_norm"], seeds=(2,), finish=False)
    assert (study.row()["final_loss"], study.row()["final_loss_seeds"]) == (1.0, 2)


def test_a_seed_that_lacks_a_rate_is_left_out(study: Study) -> None:
    losses = of_seeds(none=(2.0, 2.0, 0.0), qk_norm=(1.0, 1.0, 1.0))
    study.write(losses, seeds=(0, 1)).write(losses, seeds=(2,), rates=RATES[:1])
    assert (study.row("none")["final_loss"], study.row()["stable_rate_seeds"]) == (2.0, 2)


# --- largest stable rate -----------------------------------------------------------------------------------------


def of_outcomes(**by_mitigation: tuple[str, ...]):
    """A letter a rate: t trained, d divergent, n non-finite; a word a seed."""

    def ending(trial: Trial) -> Ending:
        letter = by_mitigation[trial.mitigation][trial.seed][RATES.index(trial.optim.lr)]
        return LOST if letter == "n" else Ending(outcome={"t": "trained", "d": "divergent"}[letter])

    return ending


STABLE = {
    "one": (("ttd", "ttn", "ttd"), 1e-2, ""),
    "several": (("ttd", "tdd", "tnt"), 1e-3 * 10 ** (1 / 3), ""),
    "a gap ends it": (("tdt", "ttd", "ttd"), 1e-3 * 10 ** (2 / 3), ""),
    "beyond the largest": (("ttt", "ttd", "ttd"), 1e-2 * 10 ** (1 / 3), ">="),
    "all beyond": (("ttt", "ttt", "ttt"), 1e-1, ">="),
    "none at all": (("dtt", "ntt", "ddd"), 1e-3, "<"),
    "some at none": (("dtt", "ttd", "ttd"), 1e-2 * 10 ** (-2 / 3), "~"),
    "both ends": (("dtt", "ttt", "ttt"), 1e-2, "~"),
}
"""(letters, the largest stable rate, its bound) of a mitigation, by its name."""


@pytest.fixture(scope="module")
def stable(tmp_path_factory: pytest.TempPathFactory) -> Study:
    words = {"none": ("ttd",) * 3} | {name: letters for name, (letters, _, _) in STABLE.items()}
    return Study(tmp_path_factory.mktemp("stable")).write(of_outcomes(**words), mitigations=list(words))


@pytest.mark.parametrize("name", STABLE)
def test_the_largest_stable_rate(stable: Study, name: str) -> None:
    row, (_, value, bound) = stable.row(name), STABLE[name]
    assert row["stable_rate"] == pytest.approx(value) and row["stable_rate_bound"] == bound
    if bound != "<":
        assert row["stable_rate_change"] == pytest.approx(value / 1e-2)


def test_a_stable_rate_that_was_raised_can_be_told(study: Study) -> None:
    own = ("ttd", "ttt", "ttt", "ttt", "ttd")
    row = study.write(of_outcomes(none=("tdd",) * 5, qk_norm=own), seeds=range(5)).row()
    expected = students((-2, -1, -1, -1, -2), (1, 2, 2, 2, 1)).expected
    assert np.log10(numbers(row, "stable_rate")) == pytest.approx(expected)
    assert study.compare().is_told("stable_rate").tolist() == [False, True]


def test_with_no_stable_rate_one_step_below_the_grid_counts(study: Study) -> None:
    row = study.write(of_outcomes(none=("tdd",) * 3, qk_norm=("ddd",) * 3)).row()
    assert numbers(row, "stable_rate")[3:] == pytest.approx((0.1, 0.1, 0.1))
    assert np.isnan(numbers(row, "stable_rate")[1:3]).all(), "a bound has no interval"
    assert study.compare().gain("stable_rate")[1] == pytest.approx(np.log(0.1))


@pytest.mark.parametrize("word", ["ttt", "ddd"])
def test_beyond_the_same_end_of_the_grid_nothing_can_be_told(study: Study, word: str) -> None:
    row = study.write(of_outcomes(none=(word,) * 3, qk_norm=(word,) * 3)).row()
    assert numbers(row, "stable_rate")[3:] == (1, 1, 1) and not study.compare().is_told("stable_rate").any()


def test_with_one_rate_there_is_no_stable_rate(study: Study) -> None:
    study.write(rates=[1e-2])
    assert "stable_rate" not in study.compare().metrics and "stable_rate" not in study.compare().table
    assert study.row()["final_loss"] == 2


def test_a_mitigation_with_rates_of_its_own_is_not_compared_at_the_common_one(study: Study) -> None:
    study.write(mitigations=["none"]).write(mitigations=["qk_norm"], rates=[0.5])
    row = study.row()
    assert np.isnan([row["stable_rate"], row["sensitivity"], row["common_loss"]]).all() and row["final_loss"] == 2


def test_sensitivity_is_that_of_the_report(study: Study) -> None:
    def ending(trial: Trial) -> Ending:
        size = {"none": 1.0, "qk_norm": 0.25}[trial.mitigation] * (1 + trial.seed)
        return Ending(loss=2 + size * RATES.index(trial.optim.lr))

    study.write(ending)
    table = metrics.lr_sensitivity(study.sweep).set_index("mitigation")
    for name in ("none", "qk_norm"):
        known = table.loc[name, ["sensitivity", "low", "high"]].tolist()
        assert numbers(study.row(name), "sensitivity")[:3] == pytest.approx(known, abs=1e-6)
    assert study.row()["sensitivity_change"] == pytest.approx(
        table["sensitivity"]["qk_norm"] - table["sensitivity"]["none"]
    )


# --- what is compared with what ----------------------------------------------------------------------------------


def test_one_seed_has_values_but_no_intervals(study: Study) -> None:
    study.write(of_faults(lambda t: {2: 1.0}), faults=[study.flip()], seeds=[5])
    found, row = study.compare(), study.row()
    for metric in found.metrics:
        value, *interval = numbers(row, metric)
        assert np.isfinite(value) and np.isnan(interval[:2] + interval[3:]).all() and interval[2] in (0, 1), metric
        assert not found.is_told(metric).any()


def test_every_width_and_depth_has_its_own_baseline(study: Study) -> None:
    def ending(trial: Trial) -> Ending:
        place = trial.model.width + trial.model.depth
        return Ending(loss=place - (trial.model.depth if trial.mitigation == "qk_norm" else 0))

    study.write(ending, widths=(32, 64), depths=(1, 3))
    assert study.compare().axes == ["mitigation", "width", "depth"] and len(study.compare().table) == 8
    assert study.row(width=64, depth=3)["final_loss_change"] == -3
    assert study.row(width=32, depth=1)["final_loss"] == 32


def test_where_the_baseline_is_missing_there_are_values_and_no_changes(study: Study) -> None:
    study.write(faults=[study.flip()]).write(mitigations=["qk_norm"], widths=(64,), faults=[study.flip()])
    row = study.row(width=64)
    assert row["final_loss"] == 2 and np.isnan([row["final_loss_change"], row["common_rate"], row["deviation"]]).all()
    assert np.isfinite(study.row(width=32)["final_loss_change"])


@pytest.mark.parametrize(
    ("mitigations", "reason"),
    [
        (["none"], "No comparison: the finished trials have one mitigation, none."),
        (["a", "a+b"], "No comparison: the baseline, mitigation=none, is not among the finished trials."),
    ],
)
def test_without_two_to_compare_the_reason_is_said(study: Study, mitigations: list[str], reason: str) -> None:
    found = study.write(mitigations=mitigations).compare()
    assert found.reason == reason and found.table.empty and found.metrics == {}


def test_a_sweep_that_is_not_begun_or_not_finished_has_no_comparison(study: Study) -> None:
    study.write(finish=False, faults=[study.flip()])
    assert study.compare().reason == "No comparison: no trial without a fault is finished."


def test_the_baseline_comes_first_and_then_the_stablest(study: Study) -> None:
    words = {"none": "tdd", "b": "tdd", "a": "tdd", "a+b": "ttt", "worse": "ddd", "z": "ttd", "lost": "nnn"}

    def ending(trial: Trial) -> Ending:
        found = of_outcomes(**{name: (word,) * 3 for name, word in words.items()})(trial)
        return Ending(loss=1.5, outcome=found.outcome) if trial.mitigation == "b" else found

    study.write(ending, mitigations=list(words), widths=(64, 32))
    table = study.compare().table
    assert table["mitigation"].drop_duplicates().tolist() == ["none", "a+b", "z", "b", "a", "worse", "lost"]
    assert table["width"].tolist() == [32, 64] * len(words)
