"""Snippets of Python in the documentation work on a sweep with two seeds, two widths and a level null."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from analysis.figures.registry import Results
from tests.sweeps import command

ROOT = Path(__file__).parent.parent
GRID = ("seed=range(2)", "model.width=16,32", "optim.clip=null,0.5")


def snippet(page: str, word: str) -> str:
    """The one snippet of a page in which a word stands."""
    (code,) = [text for text in re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.S) if word in text]
    return code


def sweep(out: str, *words: str) -> None:
    ended = command.call(*command.tiny("--multirun", f"out={out}", *GRID, *words))
    assert ended.status == 0, ended.err


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_six_lines_with_one_more_axis(home: Path) -> None:
    """An axis more is a name more in `grid`; null is one of its levels, and seeds are no axis."""
    sweep("results/quickstart", "mitigation=none,qk_norm", "optim.lr=1e-3,1e-2")
    code = snippet("README.md", "analysis.grid").replace('"mitigation"]', '"mitigation", "clip"]')
    code = code.replace('lr", hue', 'lr", row="clip", hue')
    exec(code, space := {})
    grid = space["grid"]
    assert grid["clip"].values.tolist() == [0.5, "none"] and (grid["count"] == 2).all()
    assert grid["mean"].size == 16 and grid.to_array().notnull().all()
    assert ((grid["low"] < grid["mean"]) & (grid["mean"] < grid["high"])).all()


def test_detectors_of_the_page(home: Path) -> None:
    sweep("results/watched", "detect=skip_step+cusum", "fault=none,weight_bit", "fault.start=8", "train.steps=20")
    exec(snippet("docs/detection.md", "results/watched"), space := {})
    assert space["said"]["alarm"].shape == (16, 20) and (space["table"]["incidents"] == 8).all()


def test_weights_of_the_page(home: Path) -> None:
    pytest.importorskip("transformers")
    sweep("results/gpt2", "recipe=gpt2", "keep=weights", "model.head_dim=16")
    exec(snippet("docs/howto/results.md", "to_gpt2"), space := {})
    assert space["weights"]["blocks.0.attention.query"].shape in ((16, 16), (32, 32))


def test_the_figure_of_the_page(home: Path) -> None:
    sweep("results/signum", "optim.lr=1e-3,1e-2")
    exec(snippet("docs/extending.md", "def loss_against_time"), space := {"__name__": "loss_against_time"})
    drawing = space["loss_against_time"](Results.open(home / "results" / "signum"))
    assert len(drawing.figure.axes[0].lines) == 16
    assert all(np.isfinite(line.get_ydata()).any() for line in drawing.figure.axes[0].lines)
