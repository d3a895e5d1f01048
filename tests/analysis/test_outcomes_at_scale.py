"""Ten thousand trials are judged block by block."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from analysis import open_sweep, outcomes
from harness.config import Trial
from tests.analysis import synthetic
from tests.analysis.reads import count_reads

GOLDEN = 2.0


def test_ten_thousand_trials_are_read_by_the_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file of losses and norms is read a few times at most, whatever the number of trials in it."""
    packs, size, steps = 40, 250, 20
    base = synthetic.make_trial(steps=steps)
    kinds = [synthetic.LastBit] * 8 + [synthetic.WeightBit] * (packs * size - 9)
    faults = [kind(start=10, seed=number) for number, kind in enumerate(kinds)]
    trials = [base, *(dataclasses.replace(base, fault=fault) for fault in faults)]
    size_of = {
        trial.id: 0.5 if trial.fault.name == "last_bit" else number % 3 for number, trial in enumerate(trials[1:])
    }

    def loss(trial: Trial) -> np.ndarray:
        return GOLDEN + np.where(np.arange(steps) >= 10, size_of.get(trial.id, 0.0), 0.0)

    for begin in range(0, len(trials), size):
        synthetic.write_pack(tmp_path, trials[begin : begin + size], loss, block=steps, measured=synthetic.READ)
    monkeypatch.setattr("analysis.reading.stored_variables.CHUNK_BYTES", 4 * steps * size * 2)
    sweep = open_sweep(tmp_path)
    read = count_reads(monkeypatch)
    judged = outcomes(sweep)
    assert len(judged["trial"]) == 10_000
    chunks = [path for path in read if path.name == "c.0.0"]
    assert {path.parent.name for path in chunks} == {"loss", "grad_norm"}
    assert len(chunks) <= 3 * 2 * packs
    number = np.array([size_of.get(trial, -1) for trial in judged["trial"].values])
    np.testing.assert_array_equal(judged["deviation_max"].values[number >= 0], number[number >= 0])
    expected = np.select([number < 0, number <= 0.5], ["", "masked"], "lingering")
    np.testing.assert_array_equal(judged["fault_outcome"].values, expected)
