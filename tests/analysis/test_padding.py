"""Trials of several depths, ranks and lengths in one sweep: what a trial does not have is no number that was lost."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import xarray as xr

from analysis.measures.detectors import alarms
from analysis.measures.incidents import runs
from analysis.measures.leaderboard import scored
from analysis.pages.trial_page import trial_page
from analysis.reading.open_sweep import open_sweep, open_with_packs
from analysis.reading.padding import own_sizes
from tests.analysis.exporting import export
from tests.sweeps import command
from tests.sweeps.test_detect import SHORT, WATCHING

SINGLE = [name for name in WATCHING if name != "gain_peers"]  # those that a trial of one rank may have
READ = ["at_rest=1", "qk_rank=3", "kurtosis=2", "attention_entropy=3", "residual_gain=1", "moment_size=1"]
READ += ["moment_lag=1"]
AXES = ["model.depth=1,3", "train.ranks=1,3", "train.steps=40,60", "fault=none,weight_bit"]
FIXED = ["train.batch=6", "optim.lr=3e-3", "schedule.decay=constant", "fault.start=30", "fault.bit=30", "seed=0,1"]
OPTIONS = [f"detect.{name}.{key}={value}" for name in SINGLE for key, value in SHORT.get(name, {}).items()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("mixed") / "out"
    signals = [f"signals.{one}" for one in READ]
    ended = command.call(f"out={out}", *command.tiny(*AXES, *FIXED, *signals), f"detect={'+'.join(SINGLE)}", *OPTIONS)
    assert ended.status == 0, ended.err
    return out


@pytest.fixture(scope="module")
def mixed(folder: Path) -> xr.Dataset:
    sweep = open_sweep(folder).load()
    assert (sweep.sizes["layer"], sweep.sizes["rank"], sweep.sizes["step"]) == (3, 3, 60)
    return sweep


def test_sizes_of_each_trial(mixed: xr.Dataset) -> None:
    sizes = own_sizes(mixed)
    assert np.array_equal(sizes["layer"], mixed.depth.values) and np.array_equal(sizes["rank"], mixed.ranks.values)
    alone = mixed.isel(trial=(mixed.depth == 1).values).drop_vars("depth")
    assert set(own_sizes(alone)["layer"]) == {3}, "nothing says that they have fewer"


@pytest.mark.parametrize("name", SINGLE)
def test_they_replay_as_they_were_watched(mixed: xr.Dataset, name: str) -> None:
    again = alarms(mixed, name, **SHORT.get(name, {}))
    for depth in (1, 3):
        at = (mixed.depth == depth).values
        said = mixed[f"alarm_{name}"].values[at] == 1
        assert np.array_equal(again["alarm"].values[at], said) and said.any(), depth
        scores = again["score"].values[at].astype(np.float32)
        assert np.array_equal(scores, mixed[f"score_{name}"].values[at], equal_nan=True)


def test_ranks_that_a_trial_lacks_say_nothing(mixed: xr.Dataset) -> None:
    again = alarms(mixed, "gain_peers", **SHORT["gain_peers"])
    three = (mixed.ranks == 3).values
    alone = alarms(mixed.isel(trial=three), "gain_peers", **SHORT["gain_peers"])
    assert np.array_equal(again["score"].values[three], alone["score"].values, equal_nan=True)
    assert again["alarm"].values[three].any() and not again["alarm"].values[~three].any()
    assert np.isnan(again["score"].values[~three]).all()


def test_a_number_that_was_lost_is_an_alarm(mixed: xr.Dataset) -> None:
    """In the only layer of a shallow trial, and in the last one of a deep trial."""
    for depth in (1, 3):
        (row, *_) = np.flatnonzero((mixed.depth == depth).values & (mixed.fault == "none").values)
        torn = mixed.copy(deep=True)
        torn["activation_rms"].values[row, 20, depth - 1] = np.inf
        again = alarms(torn, "combined")["alarm"].values
        assert again[row, 20] and not alarms(mixed, "combined")["alarm"].values[row, 20]
        (run,) = runs(torn, chosen=[str(mixed.trial.values[row])])
        assert run["activation_rms"].shape == (int(mixed.steps[row]), depth)


def test_scores_are_those_of_each_depth_alone(mixed: xr.Dataset) -> None:
    """False alarms of the whole are the sum of those of its parts."""
    constants = {"combined": SHORT["combined"]}
    whole, *parts = (
        scored(sweep, ["combined"], constants).iloc[0]
        for sweep in (mixed, *(mixed.isel(trial=(mixed.depth == depth).values) for depth in (1, 3)))
    )
    counts = [row["false_alarms"] * row["clean_steps"] for row in (whole, *parts)]
    assert counts[0] == pytest.approx(sum(counts[1:])) and whole["incidents"] == sum(p["incidents"] for p in parts)


def test_pages_and_exports_show_what_there_is(folder: Path, mixed: xr.Dataset) -> None:
    sweep, packs = open_with_packs(folder)
    is_clean = (mixed.fault == "none").values & (mixed.steps == 40).values
    (row, *_) = np.flatnonzero((mixed.depth == 1).values & is_clean)
    trial = str(mixed.trial.values[row])
    made = trial_page(folder, sweep.attrs, packs, trial)
    curve = made["curves"][trial]["activation_rms"]
    assert curve["of"] == 40 and curve["holes"] == []
    export(folder, "csv")
    (curves,) = (folder.parent / "place").rglob("*curves*.csv")
    lines = [line for line in curves.read_text().splitlines() if line.startswith(trial)]
    assert any("activation_rms/layer_0" in line for line in lines) and not any("layer_1" in line for line in lines)
