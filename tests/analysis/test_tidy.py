"""`analysis.table` and `analysis.grid`: one row a trial, and means over seeds on the axes of a sweep."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

import analysis
from analysis.measures.statistics import mean_interval
from harness.config import ConfigError, Trial
from tests.analysis import synthetic
from tests.analysis.synthetic import RareTokens, make_trial

SEEDS = range(3)


def lost(trial: Trial) -> np.ndarray:
    """A constant that tells width, rate and seed apart."""
    return np.full(trial.train.steps, 2 + trial.model.width / 100 + trial.optim.lr + trial.seed / 10)


def swept(folder: Path, trials: Sequence[Trial], nonfinite: int | None = None) -> xr.Dataset:
    """A store of these trials, opened; the one of that number is not finite from step 20 on."""

    def losses(trial: Trial) -> np.ndarray:
        loss = lost(trial)
        loss[20:] = np.nan if nonfinite is not None and trial is trials[nonfinite] else loss[20:]
        return loss

    synthetic.write_pack(folder, trials, losses)
    return analysis.open_sweep(folder)


@pytest.fixture
def sweep(tmp_path: Path) -> xr.Dataset:
    """Two rates by a clip that is null or 1, three seeds each."""
    trials = [make_trial(lr=lr, seed=seed, clip=clip) for lr in (1e-3, 1e-2) for clip in (None, 1.0) for seed in SEEDS]
    return swept(tmp_path, trials)


def test_a_table_has_what_was_varied_and_what_came_of_it(sweep: xr.Dataset) -> None:
    table = analysis.table(sweep)
    ends = ["outcome", "nonfinite_step", "final_loss", "final_validation_loss", "final_validation_loss_error"]
    assert [*table.columns] == ["lr", "clip", "seed", *ends]
    assert table.index.tolist() == sweep.trial.values.tolist() and len(table) == 12
    assert table["clip"].tolist()[:6] == ["none"] * 3 + [1.0] * 3
    assert table["final_loss"].to_numpy() == pytest.approx(sweep.final_loss.values)
    one = analysis.table(sweep.sel(trial=sweep.lr == 1e-3))
    assert [*one.columns] == ["clip", "seed", *ends], "what these trials share is left out"


def test_a_table_names_twins_where_there_are_faults(tmp_path: Path) -> None:
    golden = make_trial()
    table = analysis.table(swept(tmp_path, [golden, make_trial(fault=RareTokens())]))
    assert table.columns[-1] == "golden" and table["golden"].tolist() == [golden.id] * 2
    assert "fault" in table.columns


def test_a_grid_has_means_and_intervals_over_seeds(sweep: xr.Dataset) -> None:
    grid = analysis.grid(sweep, ["lr", "clip"], "final_loss")
    assert grid.sizes == {"lr": 2, "clip": 2} and grid["clip"].values.tolist() == [1.0, "none"]
    assert (grid["count"] == 3).all() and grid["mean"].attrs["units"] == "nat/token"
    losses = np.array([2 + 0.32 + 1e-2 + seed / 10 for seed in SEEDS])
    cell = grid.sel(lr=1e-2, clip="none")
    assert float(cell["mean"]) == pytest.approx(losses.mean(), rel=1e-6)
    low, high = mean_interval(losses[:, None])
    assert [float(cell["low"]), float(cell["high"])] == pytest.approx([low, high], rel=1e-5)
    assert grid["lr"].values.tolist() == [1e-3, 1e-2] and grid["lr"].attrs["path"] == "optim.lr"


def test_losses_on_held_out_text_have_its_noise_in_their_interval(sweep: xr.Dataset) -> None:
    """From their segments, as everywhere else."""
    parts = np.random.default_rng(0).normal(3, 0.1, (12, sweep.sizes["segment"]))
    sweep["final_segment_loss"] = (("trial", "segment"), parts)
    sweep["final_validation_loss"] = ("trial", parts.mean(axis=1))
    grid = analysis.grid(sweep.isel(trial=slice(0, 3)), ["lr"])
    low, high = mean_interval(parts[:3])
    assert [float(grid[name][0]) for name in ("mean", "low", "high")] == pytest.approx([parts[:3].mean(), low, high])


def test_one_seed_has_no_interval_and_a_cell_without_trials_no_mean(sweep: xr.Dataset) -> None:
    left = sweep.isel(trial=[0, 6, 9])  # rate 1e-3 with null, and 1e-2 with both, one seed each
    grid = analysis.grid(left, ["lr", "clip"], "final_loss")
    assert grid["count"].values.tolist() == [[0, 1], [1, 1]] and np.isnan(grid["low"]).all()
    assert np.isnan(grid["mean"].values).tolist() == [[True, False], [False, False]]


def test_a_seed_that_was_lost_is_not_left_out_of_a_mean(tmp_path: Path) -> None:
    trials = [make_trial(lr=lr, seed=seed) for lr in (1e-3, 1e-2) for seed in SEEDS]
    grid = analysis.grid(swept(tmp_path, trials, nonfinite=4), ["lr"], "final_loss")
    assert np.isnan(grid["mean"].values).tolist() == [False, True] and grid["count"].values.tolist() == [3, 3]
    when = analysis.grid(analysis.open_sweep(tmp_path), ["lr"], "nonfinite_step")
    assert np.isnan(when["mean"]).all()


def test_trials_of_a_cell_differ_in_seeds_alone(sweep: xr.Dataset) -> None:
    reason = (
        r"^axes=lr: trials of one cell differ in clip \(1.0, none\); allowed: clip among them, or trials of one clip$"
    )
    with pytest.raises(ConfigError, match=reason):
        analysis.grid(sweep, ["lr"])
    assert analysis.grid(sweep.sel(trial=sweep["clip"] == 1.0), ["lr"]).sizes == {"lr": 2}


@pytest.mark.parametrize(
    ("axes", "variable", "reason"),
    [
        (["lrr", "clip"], "final_loss", "^axis lrr: unknown; allowed: .*lr"),
        (["lr", "clip"], "finalloss", "^variable=finalloss: no number of a trial; allowed: .*final_loss"),
        (["lr", "clip"], "outcome", "^variable=outcome: no number of a trial"),
        (["lr", "clip"], "loss", "^variable=loss: no number of a trial"),
        ([], "final_loss", r"^axes=\[\]: none is named; allowed: some of lr, clip, seed$"),
    ],
)
def test_wrong_names(sweep: xr.Dataset, axes: list[str], variable: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        analysis.grid(sweep, axes, variable)


def test_no_trials(sweep: xr.Dataset) -> None:
    nothing = sweep.isel(trial=[])
    assert len(analysis.table(nothing)) == 0
    assert analysis.grid(nothing, ["lr"])["mean"].shape == (0,)


def test_what_a_mitigation_sets_is_no_axis(tmp_path: Path) -> None:
    trials = [make_trial(mitigation=name, seed=seed) for name in ("none", "qk_norm") for seed in SEEDS]
    sweep = swept(tmp_path, trials)
    assert "qk_norm" in sweep.coords and [*analysis.table(sweep).columns[:2]] == ["mitigation", "seed"]
    assert analysis.grid(sweep, ["mitigation"], "final_loss").sizes == {"mitigation": 2}
    assert analysis.grid(sweep, ["qk_norm"], "final_loss").sizes == {"qk_norm": 2}, "which tells them apart as well"
