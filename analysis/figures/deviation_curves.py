"""How far faults drove the loss from golden, step by step, over the clean envelope."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd
import xarray as xr
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from analysis.figures.drawing import CROSS, Drawing, page, panels_in_grid
from analysis.figures.legends import legend_below, signs
from analysis.figures.registry import Needs, Results, drawn_from
from analysis.measures.envelope import Envelope
from analysis.measures.judged_faults import COLOURS, fault_table
from analysis.measures.outcomes import OUTCOMES
from analysis.reading.loss_words import with_unit
from analysis.reading.twins import Trials, deviations, twin_curves
from harness.basics.printing import count
from harness.objectives.outcome import NON_FINITE

MOST_PANELS, MOST_LINES = 4, 60
# Times the largest golden loss, above which the axis ends: what a loss does up there says nothing more, and one that
# comes near the largest number there is would leave no room for the others.
CEILING = 10


@drawn_from(Needs.OUTCOMES, place=3, points="x=struck_site&y=deviation_final&colour=fault_outcome")
def deviation_curves(results: Results) -> Drawing:
    """|D_t| against the steps since the strike, a thin line a fault, over the clean envelope: a panel a recipe.

    Drawn are the four recipes with the most faults, and of each recipe at most about 60 faults: of every outcome in
    proportion, at least one, at even distances in the order of their largest deviation. The axis ends at ten times the
    largest golden loss; a line that goes higher runs along its edge. At k steps the envelope is that of clean runs cut
    off there (`analysis.measures.envelope`), so a fault is judged by it at the end of its line.
    """
    sweep = results.judged
    trials = Trials.of(sweep)
    envelope = Envelope.of(sweep, trials)
    table = fault_table(sweep)
    table = table[table["deviation_max"] > 0]
    if table.empty:
        return Drawing(None, "No figure: no judged fault moved the loss of its trial.")
    row = pd.Index(sweep["trial"].values).get_indexer(table["trial"])
    table = table.assign(row=row, recipe=envelope.number[row])
    shown = sorted(table["recipe"].value_counts(sort=True).index[:MOST_PANELS])
    drawn = {recipe: _sample(table[table["recipe"] == recipe]) for recipe in shown}
    curves = {recipe: _curves(sweep, trials, faults) for recipe, faults in drawn.items()}
    ceiling = CEILING * max(highest for _, highest in curves.values())
    columns = min(2, len(shown))
    height = 4 * math.ceil(len(shown) / columns) + 1.2
    with page(5.2 * columns + 1.6, height, "How far faults drove the loss from golden") as figure:
        labels = "steps since the strike", with_unit(results.sweep, "size of the loss's deviation from golden", "\n")
        panels = panels_in_grid(figure, len(shown), columns, *labels)
        for panel, recipe in zip(panels, shown, strict=True):
            _draw_deviations(panel, drawn[recipe], curves[recipe][0], ceiling)
            total = count(int((table["recipe"] == recipe).sum()), "fault")
            panel.set_title(f"{envelope.names[recipe]}\n{len(drawn[recipe])} of {total}", fontsize="medium")
        longest = int((table["steps"] - table["start"])[table["recipe"].isin(shown)].max())
        has_envelope = _draw_envelopes(panels, envelope, shown, longest, ceiling)
        names = [envelope.names[recipe] for recipe in shown]
        _legend(figure, table[table["recipe"].isin(shown)], names, has_envelope, columns)
    caption = (
        "Size of the difference of training loss between a faulty trial and its golden twin, against the steps since "
        "the strike, for faults that moved the loss; steps with equal losses are gaps. Lines are a sample: of every "
        "outcome in proportion, evenly spaced in the order of their largest deviation."
    )
    if has_envelope:
        caption += (
            " The envelope at some step is the largest deviation of clean runs up to there: a fault is masked if its "
            "largest deviation is below the envelope at the last step of its run."
        )
    above = sum(int((np.nan_to_num(size).max(axis=1) > ceiling).sum()) for size, _ in curves.values())
    if above:
        lines = "1 line that goes" if above == 1 else f"{above} lines that go"
        caption += f" The axis ends at {CEILING} times the largest golden loss; {lines} higher run along its edge."
    if left_out := table["recipe"].nunique() - len(shown):
        caption += f" {count(left_out, 'recipe')} with fewer such faults not shown."
    return Drawing(figure, caption)


def _sample(table: pd.DataFrame) -> pd.DataFrame:
    """At most about 60 of the rows, the same ones every time."""
    parts = []
    for outcome in OUTCOMES:
        faults = table[table["outcome"] == outcome].sort_values(["deviation_max", "trial"])
        wanted = math.ceil(len(faults) * min(1, MOST_LINES / len(table)))
        parts.append(faults.iloc[np.unique(np.linspace(len(faults) - 1, 0, wanted).round().astype(int))])
    return pd.concat(parts)


def _curves(sweep: xr.Dataset, trials: Trials, drawn: pd.DataFrame) -> tuple[np.ndarray, float]:
    """|D_t| [n, steps] of the faults to draw, NaN where it is 0 or not known, and the largest golden loss."""
    rows = drawn["row"].to_numpy()
    faulty, golden = twin_curves(sweep["loss"], rows, trials.golden[rows])
    size = np.abs(deviations(faulty, golden, trials.begin[rows]))
    return np.where(size > 0, size, np.nan), float(golden[np.isfinite(golden)].max())


def _draw_deviations(panel: Axes, drawn: pd.DataFrame, size: np.ndarray, ceiling: float) -> None:
    panel.set_yscale("log")
    for values, fault in zip(size, drawn.itertuples(), strict=True):
        curve = np.minimum(values[int(np.nan_to_num(fault.start)) : int(fault.steps)], ceiling)
        colour, known = COLOURS[fault.outcome], np.flatnonzero(~np.isnan(curve))
        panel.plot(np.arange(len(curve)), curve, color=colour, linewidth=0.9, alpha=0.85)
        if fault.outcome == NON_FINITE and len(known):
            panel.plot(known[-1], curve[known[-1]], color=colour, **CROSS, clip_on=False)


def _draw_envelopes(
    panels: Sequence[Axes], envelope: Envelope, shown: Sequence[int], longest: int, ceiling: float
) -> bool:
    """Draw the clean deviations of the steps 0 to `longest` - 1; returns whether there was any.

    A band goes from below the axis up to the largest one so far, and a line stands at the largest final one.
    """
    low, high = panels[0].get_ylim()
    steps = np.arange(longest)
    place = np.minimum(steps, envelope.largest.shape[1] - 1)
    has_any = False
    for panel, recipe in zip(panels, shown, strict=True):
        curves = envelope.largest[envelope.row[recipe], place], envelope.final[envelope.row[recipe], place]
        largest, final = (np.where(curve > 0, curve, np.nan) for curve in curves)
        if not np.isnan(largest).all():
            has_any = True
            panel.fill_between(steps, 1e-30, largest, color="0.55", alpha=0.25, linewidth=0, zorder=0)
            high = max(high, 1.5 * np.nanmax(largest))
        if not np.isnan(final).all():
            panel.plot(steps, final, color="0.3", linewidth=1.2, linestyle="--", zorder=3)
            low = min(low, np.nanmin(final) / 2)
    # Above the ceiling by so much that a line along it can be seen.
    panels[0].set_ylim(low, min(high, 1.5 * ceiling))
    return has_any


def _legend(figure: Figure, table: pd.DataFrame, names: Sequence[str], has_envelope: bool, columns: int) -> None:
    """`names` are those over the panels."""
    present = [outcome for outcome in OUTCOMES if (table["outcome"] == outcome).any()]
    handles: list[Artist] = [Line2D([], [], color=COLOURS[name], linewidth=2, label=name) for name in present]
    if NON_FINITE in present:
        handles.append(Line2D([], [], color=COLOURS[NON_FINITE], **CROSS, linestyle="none", label="last finite loss"))
    if has_envelope:
        handles.append(Patch(color="0.55", alpha=0.35, label="clean envelope"))
        handles.append(Line2D([], [], color="0.3", linestyle="--", linewidth=1.2, label="envelope of the final loss"))
    else:
        handles.append(Line2D([], [], linestyle="none", label="no clean envelope"))
    handles += signs(names)
    legend_below(figure, handles, most=2 * columns)
