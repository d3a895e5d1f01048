"""Stores with readings, without them, and of several ranks, opened as one dataset."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from analysis.figures.registry import Results
from analysis.reading.open_sweep import open_sweep
from harness.storage.store import Signal
from tests.analysis import synthetic

STEPS = 20
READ = {
    "residual_gain": Signal(("trial", "step", "layer", "rank"), "1", "gain"),
    "output_log_z": Signal(("trial", "step"), "nat", "log Z"),
}


def test_packs_with_and_without_readings_are_one_dataset(tmp_path: Path) -> None:
    plain = [synthetic.make_trial(seed=seed, steps=STEPS) for seed in range(2)]
    read = [synthetic.make_trial(seed=seed, steps=STEPS) for seed in range(2, 4)]
    gains = np.full((STEPS, read[0].model.depth, 1), np.nan, "f4")
    gains[::5] = 0.5
    curves = {"residual_gain": lambda trial: gains * trial.seed, "output_log_z": lambda trial: gains[:, 0, 0]}
    synthetic.write_pack(tmp_path, plain, synthetic.training_curve)
    older = open_sweep(tmp_path)
    assert "rank" not in older.dims and not set(READ) & set(older.data_vars)
    synthetic.write_pack(tmp_path, read, synthetic.training_curve, guarded=READ, signals=curves)
    sweep = open_sweep(tmp_path)
    assert sweep["residual_gain"].dims == ("trial", "step", "layer", "rank") and sweep.sizes["rank"] == 1
    assert sweep["residual_gain"].sel(trial=plain[0].id).isnull().all()
    assert np.array_equal(sweep["residual_gain"].sel(trial=read[1].id).values, gains * 3, equal_nan=True)
    assert sweep["output_log_z"].sel(trial=read[0].id).values[5] == 0.5
    assert Results(sweep).guard_signals == [], "what is read is no guard's"
