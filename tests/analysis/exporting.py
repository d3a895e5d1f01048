"""What tests of exports share: a sweep that has everything, the command, and no network."""

from __future__ import annotations

import importlib.util
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
