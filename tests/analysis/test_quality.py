"""Sweeps of policies: the quality of their completions in figures, tables and sentences, and what their loss is."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

from analysis import incidents, open_sweep, outcomes
from analysis.figures.quality_over_steps import curve, quality_over_steps
from analysis.figures.registry import Results
from analysis.measures.quality import final_quality
from analysis.pages.overview import columns_of, finals
from analysis.reading.loss_words import with_unit
from analysis.reports import report
from analysis.reports.campaign import meanings
from analysis.reports.findings import quality_lines
from harness.config import Trial
from harness.config.trial import ObjectiveConfig
from harness.storage.store import Signal
from tests.analysis import synthetic

ENDS = {1e-2: 0.6, 1e-1: 0.2}  # mean quality at the end by learning rate


def quality(trial: Trial) -> np.ndarray:
    """It rises to its end, half a tenth apart by seed; one trial is lost."""
    values = np.linspace(0, 1, trial.train.steps).clip(max=0.5) * 2 * ENDS[trial.optim.lr] + 0.05 * trial.seed
    values[30:] = np.nan if (trial.optim.lr, trial.seed) == (1e-1, 2) else values[30:]
    return values


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policies")
    trials = [synthetic.make_trial(lr=lr, seed=seed) for lr in ENDS for seed in range(3)]
    policy = (("objective", ObjectiveConfig(name="policy")),)
    trials = [dataclasses.replace(trial, extras=policy) for trial in trials]
    signal = Signal(("trial", "step"), "1", "mean quality of completions")
    declared = {"signals": {"quality": quality}, "guarded": {"quality": signal}}
    synthetic.write_pack(folder, trials, lambda trial: -quality(trial), **declared)
    return folder


@pytest.fixture(scope="module")
def sweep(out: Path) -> xr.Dataset:
    return open_sweep(out)


def test_where_quality_ended_by_what_was_varied(sweep: xr.Dataset) -> None:
    found = final_quality(sweep)
    assert found["under"].tolist() == ["lr 0.01", "lr 0.1"] and found["trials"].tolist() == [3, 2]
    assert found["quality"].tolist() == pytest.approx([0.65, 0.225]) and found["lost"].tolist() == [0, 1]
    assert (found["low"] < found["quality"]).all() and (found["quality"] < found["high"]).all()
    (line,) = quality_lines(found)
    assert line.startswith("Mean quality at the end: lr 0.01: 0.65 [") and "(1 more became non-finite)." in line


def test_a_line_ends_where_one_of_its_trials_does(sweep: xr.Dataset) -> None:
    steps, mean, low, high = curve(sweep.isel(trial=np.flatnonzero(sweep["lr"].values == 1e-1)))
    assert len(steps) == 40 and np.isfinite(mean[:30]).all() and np.isnan(mean[30:]).all()
    assert mean[10] == pytest.approx(float(np.mean([quality_at(seed) for seed in range(3)])), abs=1e-6)
    assert (low[:30] < mean[:30]).all() and (mean[:30] < high[:30]).all()


def quality_at(seed: int, step: int = 10) -> float:
    return float(quality(synthetic.make_trial(lr=1e-1, seed=seed))[step])


def test_the_report_tells_of_quality_and_of_no_figure_that_there_is_not(out: Path) -> None:
    written = report.write_report(out)
    assert "quality_over_steps.png" in {path.name for path in written.figures}
    assert any(line.startswith("Mean quality at the end") for line in written.summary)
    page = written.html.read_text()
    assert "<h2>Quality</h2>" in page and "No figure" not in page and "sensitivity" not in page
    assert "mean quality at the end" in page


def test_the_loss_of_a_policy_has_its_name_and_no_unit(sweep: xr.Dataset) -> None:
    assert sweep["loss"].attrs["units"] == sweep["final_loss"].attrs["units"] == "1"
    assert with_unit(sweep, "deviation") == "deviation"
    columns = columns_of(sweep, **finals(sweep))["columns"]
    assert (columns["final_loss"]["label"], columns["final_loss"]["unit"]) == ("minus the mean quality at the end", "")
    assert columns["final_validation_loss"]["unit"] == "nat/token"


def test_what_is_left_of_an_incident_has_the_unit_of_the_loss(sweep: xr.Dataset, tmp_path: Path) -> None:
    usual = tmp_path / "usual"
    synthetic.write_pack(usual, [synthetic.make_trial(seed=seed) for seed in range(2)])
    for one, least in ((sweep, "0.015."), (open_sweep(usual), "0.015 nat/token.")):
        assert incidents(one).attrs["loss_unit"] == least.removeprefix("0.015").strip(" .")
        assert meanings(outcomes(one))[0].endswith(f"called lingering left more than {least}")


def test_the_loss_of_unlike_objectives_has_both_names(tmp_path: Path) -> None:
    """As each pack of the store has it; so an objective of another package has its own."""
    usual = synthetic.make_trial(lr=1e-2)
    policy = dataclasses.replace(usual, extras=(("objective", ObjectiveConfig(name="policy")),))
    for trial in (policy, usual):
        synthetic.write_pack(tmp_path, [trial])
    both = open_sweep(tmp_path)["loss"].attrs
    assert sorted(both["units"].split(" or ")) == ["1", "nat/token"]
    assert sorted(both["long_name"].split(" or ")) == ["minus the mean quality", "training loss"]


def test_other_sweeps_have_no_quality(tmp_path: Path) -> None:
    synthetic.write_pack(tmp_path, [synthetic.make_trial(lr=lr) for lr in ENDS])
    sweep = open_sweep(tmp_path)
    assert final_quality(sweep).empty and sweep["loss"].attrs["units"] == "nat/token"
    assert quality_over_steps(Results(sweep)).figure is None
    page = report.write_report(tmp_path).html.read_text()
    assert "<h2>Quality</h2>" not in page and "policy" not in page
