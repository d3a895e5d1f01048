"""Exports read back equal, each through its tracker's own API, and nothing is there twice."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from analysis import open_sweep
from analysis.export.registry import targets
from tests.analysis.exporting import (
    SIGNALS,
    begin,
    check_equal,
    environment,
    export,
    finish,
    no_network,
    noisy,
    out,
    target,
    tracker,
    trials_of,
    usable,
    waits,
)
from tests.analysis.tracked import READ, TRACKERS

__all__ = ["environment", "no_network", "out", "target", "tracker"]  # fixtures


# --- what is there -----------------------------------------------------------------------------------------------


def test_every_value_is_that_of_the_store(out: Path, target: str) -> None:
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    export(out, target)
    found = check_equal(out, target, waits(target))
    assert any(np.inf in own.curves["loss"].values() for own in found.values())
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before, "nothing is written into the folder"


def test_tags_parameters_last_values_and_events(out: Path, tracker: str) -> None:
    export(out, tracker)
    sweep, found = open_sweep(out), READ[tracker](out.parent / "place")
    for trial, fault, golden in zip(*(sweep[name].values for name in ("trial", "fault", "golden")), strict=True):
        one = sweep.sel(trial=trial)
        if not one["complete"]:
            continue
        own = found[trial]
        expected = {"study": "a study", "fault": fault, "golden": golden, "outcome": "trained", "mitigation": "none"}
        assert {name: own.tags[name] for name in expected} == expected
        finals = {name: float(one[name]) for name in ("final_loss", "final_validation_loss")}
        finals = {name: value for name, value in finals.items() if not np.isnan(value)}
        assert {name: own.finals[name] for name in finals} == pytest.approx(finals, rel=1e-6)
        lr = float(own.parameters["optim.lr"])
        assert lr == float(one["lr"]) and int(own.parameters["model.width"]) == 32
        strikes = {("fault", 10), ("fault", 11)} if fault != "none" else set()
        is_first = trial in (trials_of(1e-2)[0].id, trials_of(1.0)[0].id)
        assert own.events == (strikes | {("incident", 12)} if is_first else strikes)


@pytest.mark.parametrize("name", ["csv", "parquet"])
def test_events_of_tables(out: Path, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    target = usable(name, monkeypatch, tmp_path)
    export(out, target)
    found = READ[target](out.parent / "place")
    assert sorted(event for own in found.values() for event in own.events) == sorted(
        [("fault", 10), ("fault", 11)] * 4 + [("incident", 12)] * 2
    )
    sweep = open_sweep(out)
    for trial in sweep["trial"].values:
        final = float(sweep["final_validation_loss"].sel(trial=trial))
        assert found[trial].finals.get("final_validation_loss", np.nan) == pytest.approx(final, nan_ok=True, abs=0)


# --- nothing twice -----------------------------------------------------------------------------------------------


def test_a_second_export_adds_nothing(out: Path, target: str) -> None:
    export(out, target)
    first = READ[target](out.parent / "place")
    lines = export(out, target)
    assert READ[target](out.parent / "place") == first
    if target in TRACKERS:
        assert "nothing new" in lines[0]


def test_a_sweep_that_goes_on_adds_what_is_new(tmp_path: Path, tracker: str) -> None:
    out, trials = tmp_path / "out", trials_of()
    store = begin(out, trials, 15)
    export(out, tracker)
    check_equal(out, tracker, waits(tracker))
    values = {name: np.array([curve(trial) for trial in trials]) for name, curve in SIGNALS.items()}
    values["loss"] = np.array([noisy(trial) for trial in trials])
    store.write(10, {name: of[:, 10:30] for name, of in values.items()})
    lines = export(out, tracker)
    if not waits(tracker):
        assert "4 continued" in lines[0] or "4 made anew" in lines[0]
    check_equal(out, tracker, waits(tracker))
    store.write(30, {name: of[:, 30:] for name, of in values.items()})
    finish(store, trials)
    more = trials_of(1e-3)
    begin(out, more, 10)
    lines = export(out, tracker)
    assert "4 new" in lines[0] and ("4 continued" in lines[0] or waits(tracker))
    found = check_equal(out, tracker, waits(tracker))
    assert found[trials[0].id].tags["outcome"] == "trained"


def test_a_row_that_went_back_is_made_anew(tmp_path: Path, tracker: str) -> None:
    out, trials = tmp_path / "out", trials_of()
    store = begin(out, trials, 30)
    export(out, tracker)
    values = np.array([noisy(trial) for trial in trials])[:, 10:]
    values[0] *= 2
    store.write(10, {"loss": values})
    lines = export(out, tracker)
    if not waits(tracker):
        assert "4 made anew" in lines[0]
    check_equal(out, tracker, waits(tracker))
    finish(store, trials)
    export(out, tracker)
    check_equal(out, tracker)


@pytest.mark.parametrize("after", [0, 1, 3])
def test_an_export_that_was_killed_leaves_nothing_twice(
    out: Path, tracker: str, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As its library had put so many runs, and the next was there in part."""
    cls = targets()[tracker]
    put, done = cls.put, []

    def killed(self: Any, run: Any, curves: Any, handle: str | None) -> str:
        if len(done) == after:
            put(self, run, curves[:1], handle)
            raise KeyboardInterrupt
        done.append(run)
        return put(self, run, curves, handle)

    with monkeypatch.context() as patch:
        patch.setattr(cls, "put", killed)
        with pytest.raises(KeyboardInterrupt):
            export(out, tracker)
    export(out, tracker)
    check_equal(out, tracker, waits(tracker))


def test_other_signals_are_other_runs(out: Path, tracker: str) -> None:
    export(out, tracker, "--signals", "loss")
    assert all(own.curves.keys() <= {"loss"} for own in READ[tracker](out.parent / "place").values())
    export(out, tracker)
    check_equal(out, tracker, waits(tracker))


def test_what_was_deleted_as_a_whole_comes_again(out: Path, tracker: str) -> None:
    export(out, tracker)
    for path in (out.parent / "place").iterdir():
        if not path.name.startswith("exported-"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    export(out, tracker)
    check_equal(out, tracker, waits(tracker))
