"""A sweep is opened and plotted while it trains, and neither notices the other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import xarray as xr

from analysis import open_sweep
from analysis.reports.report import write_report
from harness.config import ConfigError
from tests.sweeps import command

STEPS, BLOCK = 500, 25  # seconds a pack
GRID = ("seed=range(2)", "optim.lr=1e-3,1e-2", "pack.size=2", f"train.steps={STEPS}", f"telemetry.block={BLOCK}")


def look(out: Path) -> xr.Dataset | None:
    """The sweep as it is now, loss in memory; None as long as its store has no value."""
    try:
        ds = open_sweep(out)
    except ConfigError:
        return None
    ds["loss"] = ds["loss"].load()
    return ds if np.isfinite(ds["loss"].values).any() else None


def is_half_done(ds: xr.Dataset) -> bool:
    """Whether a pack is complete, and another has begun and has some of its steps."""
    losses = np.isfinite(ds["loss"].values[~ds["complete"].values])
    return bool(ds["complete"].any()) and bool(losses.any())


def check(ds: xr.Dataset) -> None:
    """Of trials in training there are whole blocks from the first step on, and NaN for the rest."""
    known = np.isfinite(ds["loss"].values)
    steps = known.sum(axis=1)
    np.testing.assert_array_equal(known, np.arange(STEPS) < steps[:, None])
    assert (steps % BLOCK == 0).all() and (steps[ds["complete"].values] == STEPS).all()
    assert (ds["outcome"].values == np.where(ds["complete"].values, "trained", "unfinished")).all()


def test_a_sweep_is_opened_and_plotted_while_it_trains(empty: Path) -> None:
    out = empty / "out"
    process = command.fork(*command.tiny(*GRID, "out=out"), cwd=empty)

    def seen(holds: Callable[[xr.Dataset], bool]) -> xr.Dataset | None:
        assert process.poll() is None, "it ended before it was seen like that"
        ds = look(out)
        return ds if ds is not None and holds(ds) else None

    first = command.until(lambda: seen(lambda ds: True), "a value in the store")
    check(first)
    assert not first["complete"].all()
    second = command.until(lambda: seen(is_half_done), "one pack done, and another begun")
    report = write_report(out)
    check(second)
    assert report.findings[0].startswith("4 trials: ") and "unfinished" in report.findings[0], report.findings
    drawn = [path.stem for path in report.figures]
    assert report.html.exists() and {"loss_against_rate", "sensitivity_against_width"} <= set(drawn)
    assert second.sizes["trial"] == 4 and sorted(second["complete"].values) == [False, False, True, True]

    ended = command.end(process)
    assert (ended.status, ended.err) == (0, "") and "trained 4 of 4 trials: 4 trained" in ended.out
    whole = look(out)
    assert whole is not None and whole["complete"].all()
    check(whole)
    for seen in (first, second):
        final, known = whole["loss"].sel(trial=seen["trial"]).values, np.isfinite(seen["loss"].values)
        np.testing.assert_array_equal(seen["loss"].values[known], final[known])
