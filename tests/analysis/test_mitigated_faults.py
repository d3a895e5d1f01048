"""What faults do with and without a mitigation: deviations and recovery on curves whose answer is known."""

from __future__ import annotations

import numpy as np
import pytest

from analysis.measures.statistics import wilson_interval
from harness.config import Trial
from tests.analysis import synthetic
from tests.analysis.mitigated import LOST, RATES, START, STEPS, Ending, Study, numbers, of_faults


def test_the_worst_deviation_is_the_largest_median_over_faults(study: Study) -> None:
    sizes = {
        ("none", "weight_bit"): (1.0, 2.0, 9.0),
        ("none", "rare_tokens"): (3.0, 3.5, 3.25),
        ("qk_norm", "weight_bit"): (0.5, 0.75, 0.25),
        ("qk_norm", "rare_tokens"): (0.25, 0.25, 2.0),
    }
    faults = [study.flip(), study.poison()]
    study.write(of_faults(lambda t: {5: sizes[t.mitigation, t.fault.name][t.seed]}), faults=faults)
    row = study.row()
    assert numbers(row, "deviation") == (0.5, 0.5, 2.0, -2.75, -7.0, -2.5)
    assert study.row("none")["deviation"] == 3.25
    assert (row["deviation.weight_bit"], row["deviation.rare_tokens"]) == (0.5, 0.25)
    assert row["deviation.weight_bit_change"] == -1.5 and row["deviation.rare_tokens_change"] == -3.0


def test_faults_are_compared_at_the_rate_that_is_best_for_the_baseline(study: Study) -> None:
    def ending(trial: Trial) -> Ending:
        best = {"none": RATES[1], "qk_norm": RATES[2]}[trial.mitigation]
        size = {RATES[0]: 7.0, RATES[1]: 1.0, RATES[2]: 5.0}[trial.optim.lr]
        return Ending(
            loss=2 if trial.optim.lr == best else 3, deviation={} if trial.fault.name == "none" else {3: size}
        )

    assert study.write(ending, faults=[study.flip()]).row()["deviation"] == 1.0


def test_a_poisoned_batch_is_no_deviation_of_the_model(study: Study) -> None:
    """The three poisoned steps have a loss of their own; what they do to the model is seen from the fourth on."""
    curve = {range(0, 3): 8.0, range(3, 5): 2.0}
    study.write(of_faults(lambda t: curve), faults=[study.poison(), study.flip()])
    row = study.row()
    assert (row["deviation.rare_tokens"], row["deviation.weight_bit"]) == (2.0, 8.0)
    assert (row["recovery.rare_tokens"], row["recovery.weight_bit"]) == (5, 5)


def test_batches_that_are_poisoned_to_the_end_leave_no_step_to_compare(study: Study) -> None:
    study.write(of_faults(lambda t: {range(STEPS - START): 8.0}), faults=[study.poison(duration=None), study.flip()])
    row = study.row()
    assert np.isnan(row["deviation.rare_tokens"]) and row["deviation"] == row["deviation.weight_bit"] == 8.0
    assert np.isinf(row["recovery.rare_tokens"])


def test_a_fault_that_only_lowers_the_loss_deviates_by_nothing(study: Study) -> None:
    row = study.write(of_faults(lambda t: {4: -1.0}), faults=[study.flip()]).row()
    assert row["deviation"] == 0 and row["recovery"] == 0


def test_a_run_that_a_fault_destroyed_is_infinite(study: Study) -> None:
    def ending(trial: Trial) -> Ending:
        is_hit = trial.fault.name != "none" and trial.mitigation == "none" and trial.seed > 0
        return LOST if is_hit else Ending(deviation={} if trial.fault.name == "none" else {2: 0.5})

    study.write(ending, faults=[study.flip()])
    row, base = study.row(), study.row("none")
    assert np.isinf(base["deviation"]) and np.isinf(base["recovery"])
    assert numbers(row, "deviation")[:4] == (0.5, 0.5, 0.5, -np.inf)
    assert base["recovered.weight_bit"] == pytest.approx(1 / 3) and row["recovered.weight_bit"] == 1
    assert not study.compare().is_told("deviation").any(), "one seed was not hit without it either"


def test_recovery_is_a_median_in_which_what_did_not_recover_counts_as_longest(study: Study) -> None:
    lengths = {"none": (4, 20, 20), "qk_norm": (2, 6, 20)}  # steps; 20 is the end of the run
    study.write(of_faults(lambda t: {range(0, lengths[t.mitigation][t.seed]): 1.5}), faults=[study.flip()])
    row, base = study.row(), study.row("none")
    assert (base["recovery"], row["recovery"], row["watched"]) == (np.inf, 6, STEPS - START)
    assert (row["recovery_low"], row["recovery_high"], row["recovery_change"]) == (2, np.inf, -np.inf)
    low, high = wilson_interval(2, 3)
    assert row["recovered.weight_bit_trials"] == 3
    shares = [row[f"recovered.weight_bit{end}"] for end in ("", "_low", "_high")]
    assert shares == pytest.approx([2 / 3, float(low), float(high)])


def test_several_trials_of_a_seed_count_with_their_median(study: Study) -> None:
    faults = [study.flip(bit=bit) for bit in (0, 1, 2)]
    row = study.write(of_faults(lambda t: {4: [1.0, 4.0, 2.0][t.fault.bit] + t.seed}), faults=faults).row()
    assert (row["deviation"], row["deviation_seeds"], row["recovered.weight_bit_trials"]) == (3.0, 3, 9)


def test_faults_that_did_nothing_and_the_yardstick_do_not_count(study: Study) -> None:
    def ending(trial: Trial) -> Ending:
        if trial.fault.name == "none":
            return Ending()
        return Ending(deviation={1: 9.0 if trial.fault.name == "last_bit" else 0.5}, changed=trial.seed != 1)

    faults = [study.flip(), synthetic.LastBit(start=START)]
    study.write(ending, faults=faults)
    row = study.row()
    assert (row["deviation"], row["deviation_seeds"], row["recovered.weight_bit_trials"]) == (0.5, 2, 2)
    assert [name for name in study.compare().metrics if name.startswith("deviation")] == [
        "deviation",
        "deviation.weight_bit",
    ]


def test_where_the_golden_run_was_lost_there_is_nothing_to_compare_with(study: Study) -> None:
    study.write(lambda t: LOST if t.mitigation == "qk_norm" else Ending(), faults=[study.flip()])
    row = study.row()
    assert np.isnan([row["deviation"], row["recovery"], row["deviation_change"], row["recovered.weight_bit"]]).all()
    assert (row["deviation_seeds"], row["recovered.weight_bit_trials"]) == (0, 0)


def test_a_fault_that_the_baseline_lacks_is_left_out_of_the_change(study: Study) -> None:
    size = of_faults(lambda t: {3: 4.0 if t.fault.name == "rare_tokens" else 1.0})
    study.write(size, mitigations=["none"], faults=[study.flip()])
    study.write(size, mitigations=["qk_norm"], faults=[study.flip(), study.poison()])
    row = study.row()
    assert (row["deviation"], row["deviation_change"]) == (4.0, 0.0)
    assert np.isnan(row["deviation.rare_tokens_change"])


def test_without_faults_there_are_no_metrics_of_them(study: Study) -> None:
    found = study.write().compare()
    assert not [name for name in [*found.metrics, *found.table] if "deviation" in name or "recover" in name]
