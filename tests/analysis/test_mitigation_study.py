"""The study of mitigations: that it is planned as it says, and that a small one is trained, compared and reported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from analysis import open_sweep
from analysis.mitigations import compare

ROOT = Path(__file__).parents[2]
SMALL = ["model.width=16", "model.depth=1", "model.head_dim=8", "model.context=16", "train.steps=16", "train.batch=4"]
SMALL += ["schedule.warmup=2", "fault.start=8", "optim.lr=1e-2,1", "seed=range(2)", "train.validate_every=16"]


def run(home: Path, *words: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "STABILITY_HARNESS_CACHE": str(home / "cache")}
    command = [sys.executable, "-m", *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=home, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which a small study of three mitigations was trained."""
    home = tmp_path_factory.mktemp("study")
    names = "mitigation=none,clip_1,qk_norm"
    assert "trained 48 of 48 trials" in run(home, "sweeps", "study=mitigations", "out=small", names, *SMALL)
    return home


def test_the_study_trains_every_mitigation_on_the_same_trials(tmp_path: Path) -> None:
    words = run(tmp_path, "sweeps", "study=mitigations", "mitigation=none,qk_norm", "out=planned", "plan=true")
    # Two widths, four rates, three seeds, three faults and none.
    assert words.startswith(f"{2 * 2 * 4 * 3 * 4} trials asked for, 0 golden twins added")


def test_a_real_study_is_compared(home: Path) -> None:
    found = compare(open_sweep(home / "small"))
    assert found.reason == "" and list(found.table["mitigation"]) != [] and found.table["mitigation"][0] == "none"
    assert sorted(found.table["mitigation"]) == ["clip_1", "none", "qk_norm"]
    table = found.table.set_index("mitigation")
    assert set(table["final_loss_seeds"]) == {2} and (table["final_loss"] < np.log(256)).all()
    faults = {"rare_tokens", "learning_rate_jump", "rank_noise"}
    assert {name.partition(".")[2] for name in found.metrics if name.startswith("deviation.")} == faults
    for metric in found.metrics:
        assert table[metric].notna().all(), metric
        assert table.loc[["clip_1", "qk_norm"], f"{metric}_change"].notna().all(), metric
    assert (table["step_seconds"] > 0).all() and table["step_time"]["none"] == 1
    assert table["step_time_bound"]["qk_norm"] == "", "another structure has packs of its own"


def test_a_real_study_is_reported(home: Path) -> None:
    lines = run(home, "analysis", "report", "small").splitlines()
    assert any(line.startswith("Largest stable learning rate at width 16: ") for line in lines)
    assert any(line.startswith("Worst deviation over the faults at width 16: ") for line in lines)
    assert "mitigation_map.png" in lines[-1]
    assert "<h2>Mitigations</h2>" in (home / "small" / "report.html").read_text(encoding="utf-8")
    run(home, "analysis", "figure", "mitigation_map", "small", "map.png")
    assert (home / "map.png").read_bytes().startswith(b"\x89PNG")
