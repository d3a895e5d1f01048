"""Exports read back equal, each through its tracker's own API, and nothing is there twice."""

from __future__ import annotations

import importlib.util
import shutil
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from analysis import open_sweep
from analysis.__main__ import main
from analysis.export.registry import targets
from harness.config import Fault, Trial
from harness.storage.store import PackStore
from tests.analysis import synthetic
from tests.analysis.tracked import LIBRARIES, READ, TRACKERS, Tracked, is_in_ci, stored

STEPS = 40


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """A socket that leaves the machine, or its own ports, is refused."""
    connect = socket.socket.connect

    def refused(self: socket.socket, address: Any) -> None:
        if self.family != socket.AF_UNIX:
            raise AssertionError(f"connects to {address}")
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", refused)
    monkeypatch.setattr(socket.socket, "connect_ex", refused)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a target sets for its library is gone after a test."""
    for name in ("MLFLOW_DISABLE_TELEMETRY", "TRACKIO_DIR", "HF_HUB_OFFLINE", "WANDB_MODE", "WANDB_ERROR_REPORTING"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.fixture(params=READ)
def target(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    return usable(request.param, monkeypatch, tmp_path)


@pytest.fixture(params=TRACKERS)
def tracker(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    return usable(request.param, monkeypatch, tmp_path)


def usable(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """A target whose library is there, and which writes to `tmp_path`/place."""
    library = LIBRARIES.get(name)
    if library is not None and importlib.util.find_spec(library) is None:
        pytest.fail(f"no {library}") if is_in_ci() else pytest.skip(f"needs {library}")
    if name == "trackio":
        monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "place"))
        from trackio import sqlite_storage

        monkeypatch.setattr(sqlite_storage, "TRACKIO_DIR", (tmp_path / "place").resolve())
    return name


# --- a sweep that has everything ---------------------------------------------------------------------------------


def noisy(trial: Trial, shape: tuple[int, ...] = (STEPS,)) -> np.ndarray:
    """Values of every size; of a rate of 1 they are infinite from step 20 on, and no numbers from step 21."""
    rng = np.random.default_rng([trial.seed, len(shape)])
    values = rng.normal(size=shape) * 10.0 ** rng.integers(-30, 30, shape)
    if trial.optim.lr == 1:
        values[20], values[21:] = np.inf, np.nan
    return values


SIGNALS: dict[str, Any] = {
    "grad_norm": lambda trial: noisy(trial)[::-1],
    "validation_loss": lambda trial: np.where(np.arange(STEPS) % 10 == 9, 2.5, np.nan),
    "activation_rms": lambda trial: noisy(trial, (STEPS, 2)),
}
INCIDENT = {"step": 12, "last": 13, "closed": 20, "alarms": 2, "steps_lost": 3}
INCIDENT |= {"acts": [{"step": 12, "detectors": {"finite": 1.0}, "loss": 9.0, "action": "skip", "to": None}]}


def trials_of(lr: float = 1e-2) -> list[Trial]:
    fault = synthetic.WeightBit(start=10, duration=2)
    made = [synthetic.make_trial(lr=lr, seed=seed, fault=own) for seed in (0, 1) for own in (Fault(), fault)]
    return made


def begin(out: Path, trials: list[Trial], steps: int = STEPS) -> PackStore:
    """A pack that is not finished."""
    return synthetic.write_pack(out, trials, noisy, signals=SIGNALS, steps_done=steps, finish=False, study="a study")


def finish(store: PackStore, trials: list[Trial]) -> None:
    """With strikes of the faults, and an incident of the first trial."""
    events = [synthetic.strike_events(trial)[:2] for trial in trials]
    size = len(trials)
    store.finish(
        outcome=["trained"] * size,
        nonfinite_step=[None] * size,
        masked_step=[None] * size,
        faults=events,
        strikes=[len(own) for own in events],
        changes=[len(own) for own in events],
        incidents=[[INCIDENT], *[[]] * (size - 1)],
    )


def write_sweep(out: Path) -> None:
    """A finished pack, one with infinities, and one that has got to step 20."""
    for lr in (1e-2, 1.0):
        trials = trials_of(lr)
        finish(begin(out, trials), trials)
    begin(out, trials_of(1e-3), 20)


def export(out: Path, target: str, *more: str) -> list[str]:
    """The command, into a folder beside `out`; what it says."""
    place = out.parent / "place"
    return said(["export", str(out), "--to", target, "--into", str(place), *more], 0)


def said(words: list[str], status: int) -> list[str]:
    """Lines of the command, which has to end so."""
    import contextlib
    import io

    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        ended = main(words)
    assert ended == status, out.getvalue() + err.getvalue()
    return (out if not status else err).getvalue().splitlines()


def check_equal(out: Path, target: str, finished_only: bool = False) -> dict[str, Tracked]:
    """All curves are those of the store; gives what the target has."""
    sweep = open_sweep(out)
    sweep = sweep.isel(trial=np.flatnonzero(sweep["complete"].values)) if finished_only else sweep
    expected, found = stored(sweep), READ[target](out.parent / "place")
    assert found.keys() == expected.keys()
    for trial, own in expected.items():
        assert found[trial].curves.keys() == own.curves.keys()
        for name, points in own.curves.items():
            assert found[trial].curves[name] == points, (trial, name)
    return found


@pytest.fixture
def out(tmp_path: Path) -> Path:
    write_sweep(tmp_path / "out")
    return tmp_path / "out"


def waits(target: str) -> bool:
    return getattr(targets()[target], "finished_only", False)


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


def test_events_of_tables(out: Path, target: str) -> None:
    if target in TRACKERS or target == "netcdf":
        pytest.skip("no table of events")
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
