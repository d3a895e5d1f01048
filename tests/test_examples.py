"""A guard, a detector and an objective are one file each: installed packages bring them, and a sweep uses them."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest

from analysis import fault_events, open_sweep
from analysis.reports.report import write_report
from tests.sweeps.command import Ended, end, fork

ROOT = Path(__file__).parent.parent
SMALL = (
    *("model.width=16", "model.depth=1", "model.head_dim=8", "model.context=16", "train.batch=2", "train.steps=40"),
    *("data.source=zipf", "data.vocabulary=32", "data.length=2000", "train.validate_tokens=64"),
    *("train.validate_between=16", "schedule.warmup=2", "hydra.launcher.workers=1", "optim.lr=1e-2"),
)


INSTALLED = ("guard", "detector", "objective", "branch", "fault")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The path of a process for which the examples are installed."""
    site = tmp_path_factory.mktemp("site")
    places = [site]
    for name in INSTALLED:
        project = tomllib.loads((ROOT / "examples" / name / "pyproject.toml").read_text())["project"]
        about = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 1.0\n")
        ((group, entries),) = project["entry-points"].items()
        lines = [f"[{group}]", *(f"{key} = {value}" for key, value in entries.items())]
        (about / "entry_points.txt").write_text("\n".join(lines) + "\n")
        places.append(ROOT / "examples" / name)
    return places


def sweep(installed: list[Path], out: Path, *overrides: str) -> Ended:
    return end(fork(*SMALL, *overrides, f"out={out}", cwd=out.parent, path=installed))


def test_a_guard_sends_a_row_back_and_shows_a_signal(installed: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    fault = (
        *("fault=none,value", "fault.start=23", "fault.site=activation", "fault.tensor=logits"),
        *("fault.elements=null", "fault.model=scale", "fault.value=30", "seed=0,1"),
    )
    done = sweep(installed, out, "loss_alarm.nats=1.5", *fault)
    assert done.status == 0, done.err
    results = open_sweep(out)
    assert results["loss_above_mean"].attrs["long_name"] == "training loss over its running mean"
    shown, loss = results["loss_above_mean"].values, results["loss"].values
    mean = loss[:, 0].astype(float)
    for step in range(1, 40):
        np.testing.assert_allclose(shown[:, step], loss[:, step] - mean, atol=1e-5)
        mean = 0.9 * mean + 0.1 * loss[:, step]
    assert (results["fault"].values != "none").sum() == 2 and len(fault_events(out)) == 2, "each struck once"
    for name in ("loss", "validation_loss", "grad_norm", "update_rms"):
        values = results.sortby("seed")[name].values
        faulty = results.sortby("seed")["fault"].values != "none"
        np.testing.assert_array_equal(values[faulty], values[~faulty])
    assert out / "figures" / "guard_signals.png" in write_report(out).figures
    without = sweep(installed, tmp_path / "without", *fault)
    assert without.status == 0, without.err
    plain = open_sweep(tmp_path / "without").sortby("seed")
    assert "loss_above_mean" not in plain
    struck = plain["loss"].values[plain["fault"].values != "none"]
    assert (struck[:, 23] > 1.5 + struck[:, 22]).all(), "without the guard the loss jumps"


def test_a_detector_stands_in_the_leaderboard_by_its_name(installed: list[Path], tmp_path: Path) -> None:
    """With constants of its own; and it says the same of what is stored as while it watched."""
    out = tmp_path / "out"
    fault = (
        *("fault=none,value", "fault.start=30", "fault.site=activation", "fault.tensor=logits"),
        *("fault.elements=null", "fault.model=scale", "fault.value=30", "seed=range(4)"),
    )
    done = sweep(installed, out, "detect=ewma_chart+finite", "detect.ewma_chart.least=10", *fault)
    assert done.status == 0, done.err
    watched = open_sweep(out)
    assert (watched["alarm_ewma_chart"].sum("step") > 0).values[watched["fault"].values != "none"].any()
    words = ["leaderboard", str(out), "ewma_chart", "skip_step", "detect.ewma_chart.least=10"]
    script = f"""
import sys
import numpy as np
from analysis import alarms, open_sweep
from sweeps.commands.console import run

sweep = open_sweep({str(out)!r})
again = alarms(sweep, "ewma_chart", least=10)
assert np.array_equal(again["alarm"].values, sweep["alarm_ewma_chart"].values == 1)
np.testing.assert_array_equal(again["score"].values.astype("f4"), sweep["score_ewma_chart"].values)
sys.exit(run({words!r}))
"""
    path = os.pathsep.join(map(str, [*installed, ROOT]))
    told = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert told.returncode == 0, told.stderr
    assert {"ewma_chart", "skip_step"} <= set(told.stdout.split())
    refused = sweep(installed, tmp_path / "no", "detect=ewma_charts")
    assert refused.status == 2 and "did you mean ewma_chart?" in refused.err


def test_an_objective_has_a_loss_of_its_own(installed: list[Path], tmp_path: Path) -> None:
    options = ("objective.name=completion", "completion.prompt=0,0.5", "seed=0")
    done = sweep(installed, tmp_path / "out", *options)
    assert done.status == 0, done.err
    plain = sweep(installed, tmp_path / "plain", "seed=0,1")
    assert plain.status == 0, plain.err
    found, usual = open_sweep(tmp_path / "out"), open_sweep(tmp_path / "plain")
    whole = found.isel(trial=int(np.flatnonzero(found["prompt"].values == 0)[0]))
    half = found.isel(trial=int(np.flatnonzero(found["prompt"].values != 0)[0]))  # its default is not known here
    same = usual.isel(trial=int(np.flatnonzero(usual["seed"].values == 0)[0]))
    np.testing.assert_allclose(whole["loss"], same["loss"], rtol=2e-4)
    assert (np.abs(half["loss"].values - same["loss"].values) > 1e-3).mean() > 0.8
    refused = sweep(installed, tmp_path / "no", "objective.name=completions")
    assert refused.status == 2 and "allowed: next_token, policy, completion" in refused.err


def test_each_keeps_the_promises_of_its_kind(installed: list[Path]) -> None:
    """By the tests that stand beside it, which call `harness.testing`."""
    beside = [str(file) for name in INSTALLED for file in (ROOT / "examples" / name).glob("test_*.py")]
    assert len(beside) == len(INSTALLED)
    path = os.pathsep.join(map(str, [*installed, ROOT]))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, *beside]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    assert done.returncode == 0 and f"{len(INSTALLED)} passed" in done.stdout, done.stdout + done.stderr
