"""Curves of deviations: a sample over the envelope of as many steps, on an axis that no single explosion stretches."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgba
from matplotlib.lines import Line2D

from analysis import open_sweep
from analysis.figures.deviation_curves import CEILING, MOST_LINES, deviation_curves
from analysis.figures.registry import Results
from analysis.measures.judged_faults import COLOURS
from analysis.measures.outcomes import OUTCOMES
from analysis.measures.statistics import studied
from tests.analysis import synthetic
from tests.analysis.judging import GOLDEN, START, STEPS, Campaign


def curves(panel: Axes) -> list[Line2D]:
    return [line for line in panel.lines if len(line.get_xdata()) > 2 and line.get_linestyle() == "-"]


def band(panel: Axes) -> tuple[np.ndarray, np.ndarray]:
    """The steps and the heights of the clean envelope."""
    (area,) = [artist for artist in panel.collections if isinstance(artist, PolyCollection)]
    corners = area.get_paths()[0].vertices
    upper = corners[corners[:, 1] > 1e-20]
    steps, first = np.unique(upper[:, 0], return_index=True)
    return steps, upper[first, 1]


def test_deviation_curves_are_a_sample_over_the_envelope(sweeps, drawn) -> None:
    ds, drawing = sweeps["three sites"], drawn["three sites"]["deviation_curves"]
    panels = [panel for panel in drawing.figure.axes if panel.get_title()]
    assert len(panels) == 4 and "2 recipes with fewer such faults not shown" in drawing.caption
    for panel in panels:
        assert panel.get_yscale() == "log"
        assert 40 < len(curves(panel)) <= MOST_LINES + len(OUTCOMES)
        colours = {to_rgba(line.get_color()) for line in curves(panel)}
        assert to_rgba(COLOURS["lingering"]) in colours and to_rgba(COLOURS["masked"]) in colours
        assert all(line.get_xdata()[0] == 0 for line in curves(panel))
        beta2, clip = panel.get_title().split("\n")[0].split(", ")
        is_own = (ds["beta2"].values == float(beta2[6:])) & ((clip == "clip=none") == (ds["clip"].values == "none"))
        check_band(panel, studied(ds.isel(trial=np.flatnonzero(is_own))))
    assert "clean envelope" in synthetic.legend_words(drawing.figure)


def check_band(panel: Axes, faulty: xr.Dataset) -> None:
    """Its height over the last step of each fault is the envelope that the fault is judged by."""
    steps, height = band(panel)
    at = dict(zip(steps.astype(int), height, strict=True))
    last = (faulty["steps"] - faulty["fault_start"] - 1).values.astype(int)
    limits = {step: limit for step, limit in zip(last, faulty["envelope_max"].values, strict=True) if limit > 0}
    assert len(limits) > 30 and {step: at[step] for step in limits} == pytest.approx(limits)
    assert (np.diff(height) >= 0).all() and height[0] < height[-1]


def test_a_small_campaign_is_drawn_whole_and_says_that_it_has_no_envelope(sweeps, drawn) -> None:
    size = "one site, one bit, no envelope"
    drawing, ds = drawn[size]["deviation_curves"], studied(sweeps[size])
    highest = sorted(np.nanmax(line.get_ydata()) for line in curves(drawing.figure.axes[0]))
    np.testing.assert_allclose(highest, np.sort(ds["deviation_max"].values))
    assert "no clean envelope" in synthetic.legend_words(drawing.figure) and "envelope" not in drawing.caption


@pytest.mark.parametrize("exploded", [0, 1, 2])
def test_an_explosion_runs_along_the_edge_and_is_counted(tmp_path: Path, exploded: int) -> None:
    campaign = Campaign(tmp_path)
    for number in range(4):
        campaign.fault(f"small {number}", {range(START, STEPS): 2.0**-number})
    for number in range(exploded):
        campaign.fault(f"exploded {number}", {START: 1e35 * (1 + number), START + 1: 1e20, range(START + 2, STEPS): 1})
    campaign.write()
    drawing = deviation_curves(Results(open_sweep(tmp_path)))
    panel = drawing.figure.axes[0]
    assert panel.get_ylim()[1] <= 2 * CEILING * GOLDEN and panel.get_ylim()[0] > 2.0**-8
    edges = [line.get_ydata()[:3].tolist() for line in curves(panel) if line.get_ydata().max() > 2]
    assert edges == [[CEILING * GOLDEN, CEILING * GOLDEN, 1.0]] * exploded
    counted = {0: "The axis ends", 1: "; 1 line that goes higher", 2: "; 2 lines that go higher"}[exploded]
    assert (counted in drawing.caption) == (exploded > 0)
    assert "|" not in panel.get_ylabel() and panel.get_ylabel().endswith("[nat/token]")
    assert synthetic.check_texts(drawing.figure)


def test_a_clean_run_that_explodes_does_not_stretch_the_axis_either(tmp_path: Path) -> None:
    campaign = Campaign(tmp_path)
    campaign.envelope()
    campaign.curves[campaign.trials["twin 0"].id][25] = 1e30
    campaign.fault("a", {range(START, STEPS): 1.0})
    campaign.write()
    panel = deviation_curves(Results(open_sweep(tmp_path))).figure.axes[0]
    assert band(panel)[1].max() > 1e29 and panel.get_ylim()[1] <= 2 * CEILING * GOLDEN
