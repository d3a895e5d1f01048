"""The figures of a campaign: readable whatever its size, and that they hold the numbers of the table."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.colors import to_rgba
from matplotlib.patches import Rectangle

from analysis import open_sweep
from analysis.figures.registry import Needs, Results, figures
from analysis.measures.judged_faults import COLOURS, fault_table
from analysis.measures.outcomes import OUTCOMES
from tests.analysis import synthetic

CAMPAIGN_FIGURES = figures(Needs.OUTCOMES)

# --- every figure ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", synthetic.SIZES)
@pytest.mark.parametrize("name", CAMPAIGN_FIGURES)
def test_readable_at_every_size(drawn, name: str, size: str) -> None:
    drawing = drawn[size][name]
    if drawing.figure is None:
        assert (name, size) == ("recovery_against_beta2", "one site, one bit, no envelope")
        assert drawing.caption == "No figure: the judged faults that changed something have 1 value of beta2, not two."
        return
    assert synthetic.check_texts(drawing.figure) > 10
    assert synthetic.legend_words(drawing.figure) and drawing.figure.get_suptitle() and drawing.caption.endswith(".")
    assert any(panel.get_xlabel() for panel in drawing.figure.axes)
    assert any(panel.get_ylabel() for panel in drawing.figure.axes)


@pytest.mark.parametrize("name", CAMPAIGN_FIGURES)
def test_global_settings_stay(drawn, name: str) -> None:
    assert drawn["few faults"][name].figure and synthetic.settings() == synthetic.SETTINGS


# --- shares ------------------------------------------------------------------------------------------------------


def bar_counts(panel) -> dict[str, list[float]]:
    """Outcome -> width of its bar in each row, in percent."""
    bars = [patch for patch in panel.patches if isinstance(patch, Rectangle)]
    return {
        outcome: [bar.get_width() for bar in bars if bar.get_facecolor() == to_rgba(COLOURS[outcome])]
        for outcome in OUTCOMES
    }


def test_bars_by_site_and_by_time_are_the_table(sweeps, drawn) -> None:
    ds = sweeps["three sites"]
    by_site, by_time = drawn["three sites"]["outcome_shares"].figure.axes
    table = fault_table(ds)
    labels = [label.get_text() for label in by_site.get_yticklabels()]
    sites = sorted(table["site"].unique())
    assert labels == [f"{site} (n = {(table['site'] == site).sum()})" for site in sites]
    widths = bar_counts(by_site)
    for row, site in enumerate(sites):
        own = table[table["site"] == site]["outcome"].value_counts(normalize=True)
        assert {outcome: widths[outcome][row] for outcome in OUTCOMES} == pytest.approx(
            {outcome: 100 * own.get(outcome, 0) for outcome in OUTCOMES}
        )
    times = [label.get_text().split(" (")[0] for label in by_time.get_yticklabels()]
    assert times == ["0 to 19", "20 to 39", "40 to 59", "60 to 79", "80 to 99"]
    early = (table["start"] < 20).sum()
    assert by_time.get_yticklabels()[0].get_text() == f"0 to 19 (n = {early})"


def test_few_first_steps_are_rows_of_their_own_and_runs_of_different_length_are_cut_by_share(tmp_path: Path) -> None:
    def labels(out: Path) -> list[str]:
        figure = CAMPAIGN_FIGURES["outcome_shares"](Results(open_sweep(out))).figure
        return [label.get_text() for label in figure.axes[1].get_yticklabels()]

    trials = [
        synthetic.make_trial(fault=synthetic.WeightBit(start=start), seed=seed) for start in (5, 30) for seed in (0, 1)
    ]
    synthetic.write_pack(tmp_path, synthetic.with_golden(trials), faults=synthetic.strike_events)
    assert labels(tmp_path) == ["5 (n = 2)", "30 (n = 2)"]
    longer = synthetic.make_trial(fault=synthetic.WeightBit(start=199), steps=200)
    synthetic.write_pack(tmp_path, [longer.golden, longer], faults=synthetic.strike_events)
    assert labels(tmp_path) == ["0 to 20% (n = 2)", "60 to 80% (n = 2)", "80 to 100% (n = 1)"]
