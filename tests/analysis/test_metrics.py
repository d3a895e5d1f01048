"""Metrics against values worked out by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import scipy.stats
import xarray as xr

from analysis import open_sweep
from analysis.measures import metrics
from analysis.reading import twins
from analysis.reading.twins import Trials, deviations, twin_curves
from tests.analysis import synthetic
from tests.sweeps import command


def one_value(values: xr.DataArray, trial) -> float:
    return float(values.sel(trial=trial.id))


# --- single trials -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("steps", "window"), [(200, 10), (101, 6), (40, 5), (3, 3)])
def test_final_loss_is_the_mean_over_the_last_steps(tmp_path: Path, steps: int, window: int) -> None:
    trial, longer = synthetic.make_trial(steps=steps), synthetic.make_trial(steps=steps + 50)
    for each in (trial, longer):
        synthetic.write_pack(tmp_path, [each], lambda t: np.arange(t.train.steps, dtype=float))
    ds = open_sweep(tmp_path)
    assert one_value(metrics.final_loss(ds), trial) == np.arange(steps)[-window:].mean()


def test_final_loss_is_nan_where_there_is_none(tmp_path: Path) -> None:
    trials = [synthetic.make_trial(seed=seed) for seed in range(5)]
    lost = {trials[1].id: slice(10, None), trials[2].id: slice(39, None), trials[3].id: slice(10, 11)}

    def loss(trial) -> np.ndarray:
        values = np.ones(40)
        values[lost.get(trial.id, slice(0))] = np.nan
        return values

    synthetic.write_pack(tmp_path, trials[:4], loss)
    synthetic.write_pack(tmp_path, trials[4:], loss, steps_done=38, finish=False)
    final = metrics.final_loss(open_sweep(tmp_path))
    assert [one_value(final, trial) for trial in trials[:1]] == [1]
    assert all(np.isnan(one_value(final, trial)) for trial in trials[1:])


def test_steps_whose_batch_was_dropped_are_left_out_of_the_final_loss(tmp_path: Path) -> None:
    trials = [synthetic.make_trial(seed=seed) for seed in range(3)]
    synthetic.write_pack(tmp_path, trials, lambda t: np.arange(t.train.steps, dtype=float))
    ds = open_sweep(tmp_path)
    dropped = np.zeros((3, 40), dtype=bool)
    dropped[0, [36, 38]] = dropped[1, 20] = dropped[2, 35:] = True
    ds["loss"] = ds["loss"].where(~dropped)
    final = metrics.final_loss(ds)
    assert [one_value(final, trial) for trial in trials[:2]] == [(35 + 37 + 39) / 3, 37]
    assert np.isnan(one_value(final, trials[2])), "nothing is left"


def test_initial_loss_is_that_of_the_first_step(tmp_path: Path) -> None:
    trials = [synthetic.make_trial(seed=seed) for seed in range(2)]
    synthetic.write_pack(tmp_path, trials, lambda t: np.where(np.arange(40) == 0, [5, np.inf][t.seed], 1))
    np.testing.assert_array_equal(metrics.initial_loss(open_sweep(tmp_path)).values, [5, np.nan])


# --- LR sensitivity ----------------------------------------------------------------------------------------------


def final_losses(table: dict) -> dict:
    """Trial -> loss curve that starts at 5 and ends at a given value."""
    return {
        trial.id: np.where(np.arange(trial.train.steps) == 0, synthetic.INITIAL, value)
        for trial, value in table.items()
    }


def sensitivity_of(tmp_path: Path, losses: dict[float, list[float]], **fields):
    """`losses`: rate -> final loss of each seed."""
    values = {
        synthetic.make_trial(lr=lr, seed=seed, **fields): loss
        for lr, own in losses.items()
        for seed, loss in enumerate(own)
    }
    curves = final_losses(values)
    synthetic.write_pack(tmp_path, list(values), lambda trial: curves[trial.id])
    return metrics.lr_sensitivity(open_sweep(tmp_path))


@pytest.mark.parametrize(
    ("losses", "expected", "uncapped"),
    [
        ({1e-3: [3], 1e-2: [2], 1e-1: [4]}, (3 + 2 + 4) / 3 - 2, 1),
        ({1e-3: [3], 1e-2: [2], 1e-1: [np.nan]}, (3 + 2 + 5) / 3 - 2, np.inf),
        ({1e-3: [3], 1e-2: [2], 1e-1: [90]}, (3 + 2 + 5) / 3 - 2, 95 / 3 - 2),
        ({1e-3: [5], 1e-2: [5], 1e-1: [np.nan]}, 0, np.inf),
        ({1e-3: [2], 1e-2: [2], 1e-1: [2]}, 0, 0),
    ],
    ids=["plain", "non-finite counts as no learning", "worse than no learning too", "at chance everywhere", "flat"],
)
def test_lr_sensitivity_by_hand(tmp_path: Path, losses: dict, expected: float, uncapped: float) -> None:
    table = sensitivity_of(tmp_path, losses)
    assert len(table) == 1
    row = table.iloc[0]
    assert row["uncapped"] == pytest.approx(uncapped, abs=1e-5)
    assert row["sensitivity"] == pytest.approx(expected, abs=1e-6)  # losses are stored in single precision
    assert (row["width"], row["mitigation"], row["seeds"], row["rates"]) == (32, "none", 1, 3)
    assert (row["lowest_rate"], row["highest_rate"]) == (1e-3, 1e-1)
    assert np.isnan(row["low"]) and np.isnan(row["high"])


def test_each_seed_has_its_own_sensitivity_and_the_interval_is_over_them(tmp_path: Path) -> None:
    row = sensitivity_of(tmp_path, {1e-3: [3, 2], 1e-2: [2, 4]}).iloc[0]
    assert row["sensitivity"] == pytest.approx((0.5 + 1.0) / 2)
    # 0.5 and 1.0 by hand: their standard error is 0.25, and Student's t with one degree of freedom 12.706.
    assert (row["low"], row["high"]) == pytest.approx((0.75 - 12.706 * 0.25, 0.75 + 12.706 * 0.25), abs=1e-3)
    assert row["seeds"] == 2
    assert (row["best_rate"], row["best_loss"]) == (1e-3, pytest.approx(2.5))


def of_segments(values: dict[tuple[float, int], list[float]], initial: float = 5.0) -> dict:
    """`signals` and `ends` of trials: the final loss of each segment, by rate and seed, and one before training."""

    def segments(own: list[float]) -> np.ndarray:
        return np.array([*own, *[np.nan] * (64 - len(own))])

    return {
        "signals": {"validation_loss": lambda t: np.full(t.train.steps, np.mean(values[t.optim.lr, t.seed]))},
        "ends": {
            "initial_segment_loss": lambda t: segments([initial - 0.5, initial + 0.5]),
            "final_segment_loss": lambda t: segments(values[t.optim.lr, t.seed]),
        },
    }


def test_initial_loss_is_that_of_held_out_text_where_the_store_has_it(tmp_path: Path) -> None:
    trial = synthetic.make_trial(lr=1e-2)
    synthetic.write_pack(tmp_path, [trial], **of_segments({(1e-2, 0): [2.0, 3.0]}, initial=5.4))
    ds = open_sweep(tmp_path)
    assert metrics.initial_loss(ds).values == pytest.approx([5.4]) == ds["initial_validation_loss"].values
    assert ds["final_validation_loss"].values == [2.5]


def test_sensitivity_is_of_the_validation_loss_with_the_text_in_its_interval(tmp_path: Path) -> None:
    """Two seeds alike: between them nothing differs, and what is not known is the text's."""
    values = {(lr, seed): own for lr, own in {1e-3: [2.0, 4.0], 1e-2: [2.5, 5.5]}.items() for seed in (0, 1)}
    trials = [synthetic.make_trial(lr=lr, seed=seed) for lr, seed in values]
    synthetic.write_pack(tmp_path, trials, lambda t: np.full(40, 3.0), **of_segments(values))
    row = metrics.lr_sensitivity(open_sweep(tmp_path)).iloc[0]
    # Above the best rate, 1e-3, by half of 0.5 and 1.5 in the two segments.
    expected = scipy.stats.t.interval(0.95, 1, 0.5, scipy.stats.sem([0.25, 0.75]))
    assert (row["sensitivity"], row["best_rate"], row["best_loss"]) == (pytest.approx(0.5), 1e-3, pytest.approx(3.0))
    assert (row["low"], row["high"]) == pytest.approx(expected, rel=1e-6)
    of_training = metrics.lr_sensitivity(open_sweep(tmp_path), loss="training").iloc[0]
    assert of_training["sensitivity"] == 0 and of_training["best_loss"] == pytest.approx(3.0)


@pytest.mark.parametrize("initial", [3.5, 90.0])
def test_the_cap_hangs_on_the_loss_at_initialisation_and_what_is_not_capped_does_not(
    tmp_path: Path, initial: float
) -> None:
    values = {(1e-3, 0): [2.0], (1e-2, 0): [3.0], (1e-1, 0): [7.0]}
    trials = [synthetic.make_trial(lr=lr) for lr, _ in values]
    synthetic.write_pack(tmp_path, trials, **of_segments(values, initial))
    row = metrics.lr_sensitivity(open_sweep(tmp_path)).iloc[0]
    assert row["sensitivity"] == pytest.approx((2 + 3 + min(7, initial)) / 3 - 2)
    assert row["uncapped"] == pytest.approx(4 - 2)


def test_whose_best_loss_is_meant_is_named(tmp_path: Path) -> None:
    """Each seed's own best, 3 and 2, or both at the rate that is best for their mean."""
    losses = {1e-3: [3.0, 4.0], 1e-2: [4.0, 2.0]}
    sensitivity_of(tmp_path, losses)
    ds = open_sweep(tmp_path)
    assert metrics.lr_sensitivity(ds, best="seed").iloc[0]["sensitivity"] == pytest.approx((0.5 + 1.0) / 2)
    assert metrics.lr_sensitivity(ds, best="mean").iloc[0]["sensitivity"] == pytest.approx((-0.5 + 1.0) / 2)
    with pytest.raises(ValueError, match="best=worst: expected one of seed, mean"):
        metrics.lr_sensitivity(ds, best="worst")
    with pytest.raises(ValueError, match="loss=test: expected one of validation, training"):
        metrics.lr_sensitivity(ds, loss="test")


def test_faulty_and_unfinished_trials_do_not_count(tmp_path: Path) -> None:
    faulty = synthetic.make_trial(lr=1e-2, fault=synthetic.WeightBit(start=1))
    running = synthetic.make_trial(lr=1e-2, seed=1)
    synthetic.write_pack(tmp_path, [faulty], lambda t: np.full(40, 0.1))
    synthetic.write_pack(tmp_path, [running], steps_done=10, finish=False)
    synthetic.write_pack(tmp_path, [synthetic.make_trial(lr=1e-3, seed=1)])
    row = sensitivity_of(tmp_path, {1e-3: [3], 1e-2: [2]}).iloc[0]
    assert row["sensitivity"] == pytest.approx(0.5) and row["seeds"] == 1, "seed 1 has one rate of two so far"


def test_one_rate_has_no_sensitivity(tmp_path: Path) -> None:
    row = sensitivity_of(tmp_path, {1e-2: [3, 2]}).iloc[0]
    assert np.isnan(row["sensitivity"]) and row["rates"] == 1


def test_groups_are_width_mitigation_and_other_axes(tmp_path: Path) -> None:
    for width, depth, mitigation in [(32, 1, "none"), (32, 1, "qk_norm"), (64, 1, "none"), (64, 3, "none")]:
        trials = [synthetic.make_trial(width, lr, depth=depth, mitigation=mitigation) for lr in (1e-3, 1e-1)]
        synthetic.write_pack(tmp_path, trials)
    ds = open_sweep(tmp_path)
    table = metrics.lr_sensitivity(ds)
    assert metrics.group_axes(table) == ["width", "mitigation", "depth"], "qk_norm follows from the mitigation"
    found = list(table[["width", "mitigation", "depth"]].itertuples(index=False, name=None))
    assert found == [(32, "none", 1), (32, "qk_norm", 1), (64, "none", 1), (64, "none", 3)]
    assert len(metrics.lr_sensitivity(ds, over=["width"])) == 2


# --- deviation from golden ---------------------------------------------------------------------------------------


def test_deviation_from_the_golden_twin(tmp_path: Path) -> None:
    faults = {
        kind: synthetic.WeightBit(start=20, bit=bit) for bit, kind in enumerate(["spike", "masked", "lost", "dip"])
    }
    trials = {kind: synthetic.make_trial(fault=fault) for kind, fault in faults.items()}
    curves = {trial.id: np.full(40, 2.0) for trial in [*trials.values(), trials["dip"].golden]}
    curves[trials["spike"].id][20:25] = [6, 5, 4, 1, 3]
    curves[trials["lost"].id][25:] = np.nan
    curves[trials["dip"].id][20:] = 1.5
    synthetic.write_pack(tmp_path, synthetic.with_golden(trials.values()), lambda t: curves[t.id])
    orphan = synthetic.make_trial(seed=9, fault=faults["spike"])
    synthetic.write_pack(tmp_path, [orphan])
    ds = open_sweep(tmp_path)

    known, row = Trials.of(ds), np.flatnonzero(ds["trial"].values == trials["spike"].id)
    (spike,) = deviations(*twin_curves(ds["loss"], row, known.golden[row]))
    np.testing.assert_array_equal(spike[18:26], [0, 0, 4, 3, 2, -1, 1, 0])
    table = metrics.deviation_table(ds).set_index("trial")
    assert orphan.id not in table.index and len(table) == 4
    expected = {"spike": (4, 0, 4, False), "masked": (0, 0, 0, True), "dip": (0, -0.5, 0.5, False)}
    for kind, values in expected.items():
        row = table.loc[trials[kind].id]
        assert tuple(row[["worst_deviation", "final_deviation", "size", "is_equal"]]) == values, kind
    lost = table.loc[trials["lost"].id]
    assert lost["worst_deviation"] == 0 and np.isnan(lost["final_deviation"]) and np.isinf(lost["size"])


def test_deviations_are_read_a_block_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the block, the table is the same; and no more is in memory than the trials of a chunk."""
    for seed in range(6):
        trial = synthetic.make_trial(seed=seed, fault=synthetic.WeightBit(start=20))
        curves = {trial.id: 2 + np.where(np.arange(40) >= 20, float(seed), 0), trial.golden.id: np.full(40, 2.0)}
        synthetic.write_pack(tmp_path, [trial.golden, trial], lambda t, curves=curves: curves[t.id])
    whole = metrics.deviation_table(open_sweep(tmp_path))
    assert sorted(whole["size"]) == list(range(6))
    monkeypatch.setattr("analysis.reading.stored_variables.CHUNK_BYTES", 1)
    monkeypatch.setattr(twins, "BLOCK_BYTES", 1)
    read: list[int] = []
    curves_of = twins.twin_curves
    monkeypatch.setattr(twins, "twin_curves", lambda v, rows, g: read.append(len(rows)) or curves_of(v, rows, g))
    pd.testing.assert_frame_equal(metrics.deviation_table(open_sweep(tmp_path)), whole)
    assert read == [1] * 6


def test_what_became_of_a_trial_is_no_axis(tmp_path: Path) -> None:
    """Where a first non-finite value came from is stored of real runs; the rates of one recipe are one group still."""
    words = command.tiny(f"out={tmp_path / 'out'}", "optim.lr=1e-3,1e-2,1e30", "seed=range(2)", "train.steps=20", "-m")
    assert command.call(*words).status == 0
    sweep = open_sweep(tmp_path / "out")
    assert (sweep["outcome"] == "non-finite").sum() == 2 and (sweep["provenance_tensor"] != "").sum() == 2
    (row,) = metrics.lr_sensitivity(sweep).to_dict("records")
    assert metrics.group_axes(metrics.lr_sensitivity(sweep)) == ["width", "mitigation"]
    assert (row["seeds"], row["rates"], row["highest_rate"]) == (2, 3, 1e30) and row["sensitivity"] > 0


@pytest.mark.parametrize(
    "lengths", [{"none": (200, 200), "warmup": (219, 225)}, {"none": (200, 210), "warmup": (219, 225)}]
)
def test_a_length_that_follows_from_arm_and_batch_is_no_axis(lengths: dict[str, tuple[int, int]]) -> None:
    """Whether arms that warm up have lengths of their own alone, or all have."""
    rows = [(arm, batch, steps) for arm, both in lengths.items() for batch, steps in zip((4, 32), both, strict=True)]
    table = pd.DataFrame(rows, columns=["mitigation", "batch", "steps"]).assign(width=32, seed=range(4))
    paths = {"steps": "train.steps", "batch": "train.batch", "width": "model.width", "seed": "seed"}
    coords = {name: ("trial", table[name], {"path": paths.get(name, name)}) for name in ("steps", *table)}
    sweep = xr.Dataset(coords=coords)
    assert metrics.swept_axes(
        sweep, table[["steps", "batch", "mitigation", "width", "seed"]], ("mitigation", "width")
    ) == [
        "mitigation",
        "width",
        "batch",
    ]
    alone = table.assign(batch=4, steps=[100, 200, 100, 200])
    assert metrics.swept_axes(sweep, alone[["steps", "batch", "mitigation", "width"]], ("mitigation",)) == [
        "mitigation",
        "steps",
    ]
