"""Step times with a mitigation against those without."""

from __future__ import annotations

import numpy as np
import pandas as pd

from analysis.measures.mitigations import METRICS, Comparison, compare
from analysis.measures.statistics import RESAMPLES
from analysis.measures.step_times import StepTimes
from tests.analysis import synthetic
from tests.analysis.mitigated import STEPS, Ending, Study


def write_packs(study: Study, seconds: dict[str, list[float]]) -> None:
    """A pack of one trial for each time; the first pack of a mitigation has an odd first step."""
    for mitigation, times in seconds.items():
        for seed, time in enumerate(times):
            trial = synthetic.make_trial(seed=seed, mitigation=mitigation, steps=STEPS)
            study.write_pack([trial], lambda t, time=time: Ending(seconds=time))


def test_step_time_is_a_ratio_of_medians_over_packs(study: Study) -> None:
    write_packs(study, {"none": [1.0, 2.0, 3.0], "qk_norm": [3.0, 4.0, 5.0]})
    row, base = study.row(), study.row("none")
    assert (row["step_time"], row["step_seconds"], row["step_time_bound"]) == (2.0, 4.0, "")
    assert (row["step_time_low"], row["step_time_high"]) == (1.0, 5.0) and row["step_time_change"] == 2.0
    assert (base["step_time"], base["step_seconds"]) == (1.0, 2.0) and np.isnan(base["step_time_change"])


def test_one_pack_is_one_measurement_whatever_its_size(study: Study) -> None:
    study.write(lambda t: Ending(seconds=1.5 if t.mitigation == "qk_norm" else 1.0))
    row = study.row()
    assert row["step_time"] == 1.5 and np.isnan([row["step_time_low"], row["step_time_high"]]).all()


def test_mitigations_in_one_pack_share_its_time(study: Study) -> None:
    trials = [synthetic.make_trial(lr, mitigation=name, steps=STEPS) for name in ("none", "clip_1") for lr in [32]]
    study.write_pack(trials)
    study.write(mitigations=["qk_norm"])
    assert {name: study.row(name)["step_time_bound"] for name in ("none", "clip_1", "qk_norm")} == {
        "none": "~",
        "clip_1": "~",
        "qk_norm": "",
    }


def test_results_without_times_have_no_step_time(study: Study) -> None:
    sweep = study.write().sweep
    for older in (sweep.drop_vars("step_seconds"), sweep.assign(step_seconds=sweep["step_seconds"] * np.nan)):
        found = compare(older)
        assert "step_time" not in found.metrics and "step_seconds" not in found.table
        assert found.table["final_loss"].notna().all()


def test_steps_that_were_not_timed_do_not_count(study: Study) -> None:
    sweep = study.write(lambda t: Ending(seconds=3.0 if t.mitigation == "qk_norm" else 1.0)).sweep
    times = sweep["step_seconds"].where(sweep["step"] > 30)
    assert compare(sweep.assign(step_seconds=times)).table["step_time"].tolist() == [1.0, 3.0]


def test_a_ratio_within_the_band_of_its_metric_is_not_told() -> None:
    """Packs of unlike sizes differ by up to a quarter in time; of a stable rate every difference counts."""
    ends = [(1.2, 1.4), (1.3, 1.4), (0.7, 0.79), (0.7, 0.85)]
    table = pd.DataFrame(
        {
            f"{name}_change_{end}": [pair[i] for pair in ends]
            for name in METRICS
            for i, end in enumerate(["low", "high"])
        }
    )
    told = Comparison(table, ["mitigation", "width"], METRICS)
    assert told.is_told("step_time").tolist() == [False, True, True, False]
    assert told.is_told("stable_rate").tolist() == [True, True, True, True]


def test_the_packs_of_both_are_drawn_by_themselves() -> None:
    own, base = np.array([1.0, 1.3, 1.7, 2.2]), np.array([1.0, 1.1, 1.6, 1.9])
    rng = np.random.default_rng(0)
    first, second = (np.median(rng.choice(packs, (RESAMPLES, len(packs))), axis=1) for packs in (own, base))
    found = StepTimes(own, False).relative_to(StepTimes(base, False))
    assert [found.low, found.high] == np.quantile(first / second, [0.025, 0.975]).tolist()
