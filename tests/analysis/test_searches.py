"""Figures of searches, from studies that are written here by Optuna itself."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import optuna
import pandas as pd
import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from analysis.figures.registry import Needs, figures
from analysis.reading.searches import front, read_searches
from tests.analysis import synthetic
from tests.analysis.given import given

SEARCH_FIGURES = figures(Needs.SEARCHES)

SPACES = {
    "max_stable_lr": {"optim.lr": FloatDistribution(1e-3, 10, log=True)},
    "worst_fault": {
        "fault.bit": IntDistribution(0, 31),
        "fault": CategoricalDistribution(["weight_bit", "moment_bit"]),
    },
    "pareto": {"optim.clip": FloatDistribution(0.1, 10), "mitigation": CategoricalDistribution(["none", "qk_norm"])},
}
DIRECTIONS = {"max_stable_lr": ["maximize"], "worst_fault": ["minimize", "maximize"], "pareto": ["minimize"] * 2}


@pytest.fixture(autouse=True)
def unsynced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Optuna waits for the disk at each of thousands of lines, which here need not outlive the machine."""
    monkeypatch.setattr(os, "fsync", lambda file: None)


def write(out: Path, kind: str, cells: int, points: int, is_dense: bool = False) -> None:
    """A search with random objectives; of the points one is a duplicate, one failed and one still runs.

    Of a dense one all points are on the front, most of them near each other.
    """
    (out / "search").mkdir(exist_ok=True)
    storage = JournalStorage(JournalFileBackend(str(out / "search" / "journal.jsonl")))
    draw = np.random.default_rng(0)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    for cell in range(cells):
        study = optuna.create_study(
            storage=storage,
            study_name=f"{kind} {cell}",
            directions=DIRECTIONS[kind],
            sampler=optuna.samplers.RandomSampler(seed=cell),
        )
        objectives = [f"objective {number} [nat]" for number in range(len(DIRECTIONS[kind]))]
        for name, value in {"kind": kind, "cell": f"model.width={32 * 2**cell}", "objectives": objectives}.items():
            study.set_user_attr(name, value)
        for _ in range(points):
            trial = study.ask(SPACES[kind])
            if kind == "max_stable_lr":
                is_stable = trial.params["optim.lr"] < 0.5
                trial.set_user_attr("stable", 1.0 if is_stable else 0.5)
                study.tell(trial, trial.params["optim.lr"] * is_stable)
            else:
                trial.set_user_attr("breaks", bool(draw.random() < 0.3)) if kind == "worst_fault" else None
                near = (trial.number / points) ** 3
                study.tell(trial, [near, 1 - near] if is_dense else draw.random(2).tolist())
        duplicate, failed, _ = (study.ask(SPACES[kind]) for _ in range(3))
        duplicate.set_user_attr("duplicate", 0)
        study.tell(duplicate, [0.5] * len(objectives))
        study.tell(failed, state=optuna.trial.TrialState.FAIL)


def test_without_a_search_there_is_nothing(tmp_path: Path) -> None:
    assert read_searches(tmp_path) == []
    assert all(draw(given(searches=[])).figure is None for draw in SEARCH_FIGURES.values())


def test_each_point_once_in_order(tmp_path: Path) -> None:
    write(tmp_path, "worst_fault", cells=2, points=12)
    histories = read_searches(tmp_path)
    assert [history.cell for history in histories] == ["model.width=32", "model.width=64"]
    for history in histories:
        assert list(history.points["number"]) == list(range(1, 13))
        assert history.directions == ["minimize", "maximize"]


def test_the_front_has_what_nothing_beats() -> None:
    points = pd.DataFrame({"objective 0": [1.0, 2, 3, 1, 4], "objective 1": [5.0, 3, 3, 6, 1]})
    assert list(front(points, ["minimize", "minimize"]).index) == [0, 1, 4]
    assert list(front(points, ["minimize", "maximize"]).index) == [3]
    assert list(front(points, ["maximize", "maximize"]).index) == [4, 2, 3]


@pytest.mark.parametrize("cells", [1, 14])
@pytest.mark.parametrize("kind", SPACES)
def test_the_figures_can_be_read(tmp_path: Path, kind: str, cells: int) -> None:
    write(tmp_path, kind, cells, points=8)
    searches = read_searches(tmp_path)
    for name, draw in SEARCH_FIGURES.items():
        drawing = draw(given(searches=searches))
        if name == "pareto_front" and kind == "max_stable_lr":
            assert drawing.figure is None
            continue
        assert drawing.figure is not None and synthetic.check_texts(drawing.figure) > 5
        for panel in drawing.figure.axes:
            assert panel.get_ylabel() and panel.get_title() == f"search={kind}" and panel.collections
        assert ("Not shown: 4 further cells." in drawing.caption) == (cells == 14)


def test_numbers_of_a_dense_front_do_not_lie_on_each_other(tmp_path: Path) -> None:
    write(tmp_path, "pareto", cells=1, points=60, is_dense=True)
    drawing = SEARCH_FIGURES["pareto_front"](given(searches=read_searches(tmp_path)))
    assert synthetic.check_texts(drawing.figure)
    (panel,) = drawing.figure.axes
    assert [text.get_text() for text in panel.texts] == list("12345678") and "; 8: optim.clip=" in drawing.caption


def test_several_kinds_in_one_folder(tmp_path: Path) -> None:
    for kind in SPACES:
        write(tmp_path, kind, cells=2, points=8)
    searches = read_searches(tmp_path)
    history, fronts = (draw(given(searches=searches)).figure for draw in SEARCH_FIGURES.values())
    assert [panel.get_title() for panel in history.axes] == [
        f"search={kind}" for kind in ("max_stable_lr", "worst_fault", "worst_fault", "pareto", "pareto")
    ]
    assert [panel.get_title() for panel in fronts.axes] == ["search=worst_fault", "search=pareto"]
    assert all(synthetic.check_texts(figure) for figure in (history, fronts))
