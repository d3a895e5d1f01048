"""Runs that diverge by themselves: when they begin to, what has warned of it, and how often nothing was to warn of."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import xarray as xr

from analysis.__main__ import main
from analysis.figures.registry import Needs, Results, figures
from analysis.measures.early_warning import HORIZON, onset, unaided, warning_table
from analysis.measures.leaderboard import moved
from analysis.reading.open_sweep import open_sweep
from harness.objectives.outcome import DIVERGENT, judge
from tests.sweeps import command

NEVER = float("nan")


def falls(steps: int = 200) -> np.ndarray:
    return 3 + 2 * np.exp(-np.arange(steps) / 20)


def test_the_onset_is_where_the_loss_first_gives_up_half_of_what_was_learned() -> None:
    loss = falls()
    loss[120:] = 4.5  # of 5 at first and 3 at best
    assert onset(loss, NEVER, 200) == 120 and judge(loss, None) == DIVERGENT
    loss[:] = falls()
    assert np.isnan(onset(loss, NEVER, 200))
    loss[60] = 20.0  # one step: not a window's mean, unless it is as large as ten of them
    assert onset(loss, NEVER, 200) == 60
    loss[60] = 8.0
    assert np.isnan(onset(loss, NEVER, 200))
    slow = falls()
    slow[100:] = np.linspace(3, 6, 100)
    assert onset(slow, NEVER, 200) == 134  # above 4 there; the mean of ten is, some steps later
    never_learned = 5 + 0.01 * np.arange(200.0)
    assert onset(never_learned, NEVER, 200) <= 1


def test_what_is_not_finite_or_was_dropped_has_an_onset_too() -> None:
    loss = falls()
    loss[80:] = np.nan
    assert onset(loss, 80.0, 200) == 80
    loss[70:80] = 30.0
    assert onset(loss, 80.0, 200) == 70
    dropped = falls()
    dropped[120:], dropped[::7] = 4.5, np.nan
    assert onset(dropped, NEVER, 200) == 120
    assert onset(np.full(200, np.nan), 0.0, 200) == 0
    infinite = falls()
    infinite[50], infinite[51:] = np.inf, np.nan
    assert onset(infinite, 50.0, 200) == 50


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs that end well, and some that do not; a fault among them, which is not to be counted."""
    out = tmp_path_factory.mktemp("divergences") / "out"
    keys = ["train.steps=60", "schedule.decay=constant", "schedule.warmup=20", "seed=range(3)", "mitigation=sgd"]
    for more in (["optim.lr=0.1,30"], ["optim.lr=0.1", "fault=nan_gradient", "fault.start=30", "train.ranks=2"]):
        ended = command.call(f"out={out}", *command.tiny(*keys, *more))
        assert ended.status == 0, ended.err
    return out


def test_runs_without_a_fault_alone_count(out: Path) -> None:
    sweep = open_sweep(out)
    runs = unaided(sweep)
    assert set(sweep["fault"].values[runs["trial"]]) == {"none"} and len(runs) == 9  # three are twins of the fault
    assert list(runs["is_lost"]) == list(sweep["lr"].values[runs["trial"]] > 1)
    assert runs["onset"].notna().tolist() == runs["is_lost"].tolist()


def said(sweep: xr.Dataset, at: dict[int, list[int]]) -> Any:
    """Alarms of a detector at these steps of trials."""
    is_alarm = np.zeros((sweep.sizes["trial"], sweep.sizes["step"]), bool)
    for trial, steps in at.items():
        is_alarm[trial, steps] = True
    return mock.patch(f"{warning_table.__module__}.moved", lambda *_: iter([("told", 1.0, is_alarm)]))


def test_warnings_come_before_the_onset_and_not_long_before(out: Path) -> None:
    sweep = open_sweep(out)
    runs = unaided(sweep)
    lost, well = (runs[runs["is_lost"] == bad].reset_index(drop=True) for bad in (True, False))
    onsets, trials = lost["onset"].astype(int), lost["trial"]
    early = {trials[0]: [max(0, onsets[0] - 2), onsets[0]], trials[1]: [onsets[1]], trials[2]: [59]}
    with said(sweep, early):
        (row,) = warning_table(sweep, ["told"]).to_dict("records")
    assert (row["lost"], row["well"]) == (3, 6) and row["warned"] == pytest.approx(1 / 3)
    assert row["lead"] == min(2, onsets[0]) and row["in_time"] == pytest.approx(2 / 3) and row["never"] == 0
    assert row["false_alarms"] == 0 and row["alarmed_runs"] == 0 and row["chance"] == 0
    with said(sweep, {well["trial"][0]: [0, 1], well["trial"][1]: [59]}):
        (row,) = warning_table(sweep, ["told"]).to_dict("records")
    assert row["warned"] == 0 and row["never"] == 1 and np.isnan(row["lead"])
    assert row["alarmed_runs"] == pytest.approx(2 / 6) and row["false_alarms"] == pytest.approx(1000 * 3 / (6 * 60))
    expected = np.mean([begin > 0 for begin in onsets]) / 6 + np.mean([begin > 59 for begin in onsets]) / 6
    assert HORIZON >= 50 and row["chance"] == pytest.approx(expected)


def test_lower_thresholds_have_more_alarms(out: Path) -> None:
    sweep = open_sweep(out).load()
    names = ["loss_ratio", "finite"]
    assert [(name, factor) for name, factor, _ in moved(sweep, names, (0.5, 1.0))] == [
        ("loss_ratio", 0.5),
        ("loss_ratio", 1.0),
        ("finite", 1.0),
    ]
    more, own, _ = (is_alarm.sum() for *_, is_alarm in moved(sweep, names, (0.01, 1.0)))
    assert more > own


def test_the_command_and_the_figure(out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drawing = figures(Needs.INCIDENTS)["early_warning"](Results.open(out))
    assert drawing.figure is not None and "3 runs without a fault that ended badly" in drawing.caption
    assert main(["lead", str(out)]) == 0
    text = capsys.readouterr().out
    assert "3 runs without a fault end badly, 6 end well:" in text and "combined" in text
    ended = command.call(f"out={tmp_path / 'well'}", *command.tiny("train.steps=20", "seed=range(2)"))
    assert ended.status == 0, ended.err
    drawing = figures(Needs.INCIDENTS)["early_warning"](Results.open(tmp_path / "well"))
    assert drawing.figure is None and "some of which end badly" in drawing.caption
    assert main(["lead", str(tmp_path / "well")]) == 2
    assert "or in which some runs without a fault end badly" in capsys.readouterr().err
