"""How long a fault is felt, against how long Adam's second moment remembers it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis.figures.drawing import Drawing, looks, page
from analysis.figures.legends import legend_below
from analysis.figures.registry import Needs, Results, drawn_from
from analysis.measures.outcomes import OUTCOMES, SETTLED_NAT, SETTLED_WINDOW
from analysis.measures.statistics import median_interval, studied, wilson_interval
from analysis.reading.levels import in_order, is_level, word
from analysis.reading.twins import numbers_of
from harness.basics.printing import count

SPREAD = 0.7  # of the distance between two values of beta2, over which the lines' points are spread
LINEAR_BELOW = 1  # step; the axis is logarithmic above, and 0 is on it
MOST_DOTS = 20  # trials of a line at one value of beta2 that can be told apart
HEADROOM = 2  # times the longest watch: where what lies beyond the run is marked
# The measures of recovery, by the coordinate of `analysis.measures.outcomes` that holds the steps: what the loss is
# back in.
MEASURES = {
    "visible_steps": "in its golden range",
    "settling_steps": f"within {SETTLED_NAT} nat of golden",
    "recovery_steps": "inside the clean envelope",
}


@drawn_from(Needs.OUTCOMES, place=4, points="x=beta2&y=recovery_steps&colour=clip")
def recovery_against_beta2(results: Results) -> Drawing:
    """Recovery time against beta2, and below it the share that did not recover: a column a clipping, a line a fault.

    By three measures, one under the other. Until the loss, and the gradient norm, are back in their golden range for
    good (`visible_steps`): what somebody who watches the run would call recovered. Until the loss is level with golden
    (`settling_steps`): what the fault cost is made up for. And until it is back inside the clean envelope
    (`recovery_steps`): nothing is left of the fault but rounding.

    Times are medians with bootstrap intervals. A trial that had not recovered when its run ended counts as longer than
    all others, which is right for a median, and is drawn at the steps for which it was watched. Shares have Wilson
    intervals.
    """
    table = recovery_table(results.judged)
    if table["beta2"].nunique() < 2:
        values = count(table["beta2"].nunique(), "value")
        return Drawing(None, f"No figure: the judged faults that changed something have {values} of beta2, not two.")
    clips = in_order(table["clip"])[::-1]
    faults, betas = sorted(table["fault"].unique()), sorted(table["beta2"].unique())
    has_dots = table.groupby(["measure", "clip", "fault", "beta2"], dropna=False).size().max() <= MOST_DOTS
    with page(4.6 * len(clips) + 1.6, 5 * len(MEASURES) + 1.2, "Recovery time against beta2") as figure:
        ratios = [2, 1] * len(MEASURES)
        panels = figure.subplots(2 * len(MEASURES), len(clips), squeeze=False, sharex=True, height_ratios=ratios)
        top = HEADROOM * table["watched"].max()
        for number, (measure, back) in enumerate(MEASURES.items()):
            pairs = panels[2 * number : 2 * number + 2]
            for (upper, lower), clip in zip(pairs.T, clips, strict=True):
                trials = table[(table["measure"] == measure) & is_level(table["clip"], clip)]
                _draw_pair(upper, lower, trials, faults, betas, top, has_dots)
            pairs[0, 0].set_ylabel(f"until the loss is back\n{back}\n[steps since the strike]")
            pairs[1, 0].set_ylabel("not back\n[% of trials]")
        for column, clip in enumerate(clips):
            panels[0, column].set_title(f"clip = {word(clip)}")
            panels[-1, column].set_xlabel("Adam's beta2")
            for panel in panels[:, column]:
                panel.tick_params(labelleft=column == 0)
        panels[0, 0].set_xticks(range(len(betas)), [word(value) for value in betas])
        panels[0, 0].set_xlim(-0.5, len(betas) - 0.5)
        figure.align_ylabels()
        _legend(figure, faults, table, has_dots)
    total = int((table["measure"] == "recovery_steps").sum())
    lost = {measure: int((~table["recovered"] & (table["measure"] == measure)).sum()) for measure in MEASURES}
    caption = (
        f"Steps from the strike of {count(total, 'fault')} that changed something: in the upper third until loss and "
        "gradient norm were in their golden range for good (0 if they never left it), in the middle until it was "
        f"level with golden for good (at most {SETTLED_NAT} nat/token above on average over {SETTLED_WINDOW} steps), "
        "in the lower third until it was inside the clean envelope for good (0 if masked), which is much tighter. "
        "Medians over seeds and whatever else the sweep varies, with 95% percentile bootstrap intervals. Not back in "
        f"the range by the end of the run: {count(lost['visible_steps'], 'trial')}; not level: "
        f"{lost['settling_steps']}; not inside the envelope: {lost['recovery_steps']}. In the medians "
        "they count as longer than all others, so a median or an interval may lie beyond the run. Below the times: "
        "their share, with 95% Wilson intervals."
    )
    return Drawing(figure, caption)


def recovery_table(sweep: xr.Dataset) -> pd.DataFrame:
    """One row a judged fault that changed something and `measure`, which is one of `MEASURES`.

    Columns: `measure`, `fault`, `beta2`, `clip`, `recovery` in steps (infinite if it did not
    recover), whether it `recovered`, and the steps for which it was `watched` since the strike. A fault that is judged
    without a finished golden twin has a row for `recovery_steps` alone, since there was nothing to come back to.
    """
    faulty = studied(sweep)
    names = ("fault", "clip", *MEASURES)
    table = pd.DataFrame({name: faulty[name].values for name in names})
    table["beta2"] = numbers_of(faulty, "beta2", 0.0)
    table["watched"] = faulty["steps"].values - np.nan_to_num(numbers_of(faulty, "fault_start", 0))
    table["has_range"] = faulty["visibility"].values != ""
    table = table[faulty["fault_outcome"].isin(OUTCOMES).values & ~faulty["idle"].values]
    kept = ["fault", "beta2", "clip", "watched", "has_range"]
    long = table.melt(kept, list(MEASURES), var_name="measure", value_name="recovery")
    long["recovered"] = long["recovery"].notna()
    long["recovery"] = long["recovery"].fillna(np.inf)
    return long[long["has_range"] | (long["measure"] == "recovery_steps")].drop(columns="has_range")


def _draw_pair(
    upper: Axes, lower: Axes, table: pd.DataFrame, faults: list[str], betas: list[float], top: float, has_dots: bool
) -> None:
    """Times, and below them shares, of one measure and clipping; what lies beyond the run is at `top`."""
    for position, (fault, look) in enumerate(looks(faults).items()):
        offset = SPREAD * ((position + 0.5) / len(faults) - 0.5)
        trials = table[table["fault"] == fault]
        if has_dots:
            x, back, colour = trials["beta2"].map(betas.index) + offset, trials["recovered"], look["color"]
            upper.scatter(x[back], trials["recovery"][back], s=12, color=colour, alpha=0.5, linewidth=0)
            beyond = {"marker": "^", "facecolor": "none", "edgecolor": colour, "zorder": 3}
            upper.scatter(x[~back], trials["watched"][~back], s=34, **beyond)
        line, places = {**look, "markersize": 6, "capsize": 3, "linewidth": 1.5}, np.arange(len(betas)) + offset
        times = [trials.loc[trials["beta2"] == value, "recovery"].to_numpy() for value in betas]
        median, low, high = np.array([median_interval(steps) for steps in times]).T
        # NaN, so that the line is not drawn across a median that is beyond the run.
        known = np.where(np.isfinite(median), median, np.nan)
        upper.errorbar(places, known, np.nan_to_num([known - low, np.minimum(high, 2 * top) - known]), **line)
        beyond = places[np.isinf(median)]
        upper.scatter(beyond, np.full(len(beyond), top), s=60, marker="^", color=look["color"], zorder=3)
        counts = trials.groupby("beta2")["recovered"].agg(["size", "sum"])
        lost, total = (counts["size"] - counts["sum"]).to_numpy(), counts["size"].to_numpy()
        low, high = wilson_interval(lost, total)
        reach = 100 * np.array([lost / total - low, high - lost / total]).clip(min=0)
        lower.errorbar(np.array([*map(betas.index, counts.index)]) + offset, 100 * lost / total, reach, **line)
    upper.set_yscale("symlog", linthresh=LINEAR_BELOW)
    upper.set_ylim(-0.4, 1.5 * top)
    lower.set_ylim(-4, 104)


def _legend(figure: Figure, faults: Sequence[str], table: pd.DataFrame, has_dots: bool) -> None:
    handles = [Line2D([], [], **look, label=fault) for fault, look in looks(faults).items()]
    has_lost = not table["recovered"].all()
    symbols: dict[str, tuple[dict[str, Any], bool]] = {
        "one trial": ({"marker": "."}, has_dots),
        "trial not recovered by its end": ({"marker": "^", "markerfacecolor": "none"}, has_dots and has_lost),
        "median beyond the run": ({"marker": "^", "markersize": 8}, has_lost),
    }
    for label, (look, is_there) in symbols.items():
        handles += [Line2D([], [], color="0.4", linestyle="none", label=label, **look)] if is_there else []
    legend_below(figure, handles)
