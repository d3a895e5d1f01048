"""The largest stable learning rate, on synthetic stores."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from analysis.figures.largest_stable_rate import edge_table, largest_stable_rate
from analysis.figures.registry import Results
from harness.config import Trial
from tests.analysis import synthetic
from tests.analysis.mitigated import LOST, Ending, Study

RATES = (1e-3, 1e-2, 1e-1, 1.0)
DIVERGENT = Ending(outcome="divergent")


def ending(trial: Trial) -> Ending:
    """Stable up to 1e-1 / 1e-2 / nowhere / everywhere; one seed alone decides, and what is beyond does not count."""
    rate, width = trial.optim.lr, trial.model.width
    if width == 32:
        return LOST if rate == 1.0 and trial.seed == 1 else Ending()
    if width == 64:
        return DIVERGENT if rate == 1e-1 and trial.seed == 2 else Ending()
    if width == 96:
        return LOST
    return Ending()


@pytest.fixture
def study(tmp_path: Path) -> Study:
    return Study(tmp_path).write(ending, widths=(32, 64, 96, 128), rates=RATES, mitigations=("none", "m1"))


def test_the_bracket_of_each_group(study: Study) -> None:
    table = edge_table(study.sweep).set_index(["mitigation", "width"])
    nan = np.nan
    expected = {32: (1e-1, 1.0), 64: (1e-2, 1e-1), 96: (nan, 1e-3), 128: (1.0, nan)}
    for (_, width), row in table.iterrows():
        np.testing.assert_equal((row["stable"], row["unstable"]), expected[int(width)])
        assert (row["seeds"], row["rates"]) == (3, 4)
    assert len(table) == 8


def test_the_figure_marks_edges_and_open_ends(study: Study) -> None:
    drawing = largest_stable_rate(Results(study.sweep))
    assert drawing.figure is not None and synthetic.check_texts(drawing.figure)
    (panel,) = drawing.figure.axes
    lines = [line for line in panel.lines if len(line.get_xdata()) == 3]
    assert len(lines) == 2 and [list(line.get_ydata()) for line in lines] == [[1e-1, 1e-2, 1.0]] * 2
    arrows = [text for text in panel.texts if getattr(text, "arrow_patch", None)]
    assert len(arrows) == 4, "up where all rates are stable, down where none is"
    assert "3 seeds a rate, 4 rates a marker" in drawing.caption
