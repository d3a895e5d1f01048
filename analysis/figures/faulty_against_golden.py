"""Losses of faulty trials beside those of their golden twins."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from analysis.figures.drawing import Drawing, page
from analysis.figures.legends import legend_below, signs
from analysis.figures.registry import Needs, Results, drawn_from
from analysis.figures.series import chosen, middle_width
from analysis.figures.strikes import mark_strikes, strike_patch, strikes
from analysis.measures import metrics
from analysis.reading.finals import final_loss
from analysis.reading.loss_words import loss_name, with_unit
from harness.basics.printing import count
from harness.config import NO_FAULT

MOST_COLUMNS = 4  # of a figure that can be read
MOST_IN_TITLE = 48  # letters over a panel
TITLE_PAD = 34  # points, for the two lines of details between a title and its panel
GOLDEN, FAULTY = "#4c72b0", "#c44e52"
END: dict[str, Any] = {"color": FAULTY, "marker": "x", "markersize": 8, "markeredgewidth": 2.2}


@drawn_from(Needs.SWEEP, place=4, points="x=fault&y=final_loss&colour=mitigation")
def faulty_against_golden(results: Results) -> Drawing:
    """Loss of a faulty trial and of its golden twin, and their difference, with the strike marked.

    A row a kind of fault, a column a mitigation. The one trial of each is chosen by rule: the middle width (the lower
    of two), there the learning rate at which the golden twins' final loss is lowest, and of the trials left the one
    that deviates most from its twin; then the first by id. With fault events strikes
    are marked where they happened, otherwise where the config has them.
    """
    ds, events = results.sweep, results.events
    if not (ds["fault"].values != NO_FAULT.name).any():
        return Drawing(None, "No figure: the sweep has no faults.")
    table = metrics.deviation_table(ds)
    if table.empty:
        return Drawing(None, "No figure: no faulty trial is finished and has a finished golden twin.")
    golden_loss = pd.Series(final_loss(ds).values, index=ds["trial"].values)
    table["golden_loss"] = golden_loss.reindex(table["golden"]).to_numpy()
    kinds = sorted(table["fault"].unique())
    mitigations, left_out = chosen(table.groupby("mitigation")["size"].median(), MOST_COLUMNS)
    with page(max(7.4, 4.2 * len(mitigations) + 0.8), 4.4 * len(kinds) + 1.0, "Faulty against golden loss") as figure:
        shape, ratios = (2 * len(kinds), len(mitigations)), [2.2, 1] * len(kinds)
        panels = figure.subplots(*shape, squeeze=False, height_ratios=ratios, sharex="col", sharey="row")
        for row, kind in enumerate(kinds):
            for column, mitigation in enumerate(mitigations):
                pair = panels[2 * row, column], panels[2 * row + 1, column]
                trials = table[(table["fault"] == kind) & (table["mitigation"] == mitigation)]
                title = textwrap.fill(f"{kind}, mitigation: {mitigation}", MOST_IN_TITLE)
                _draw_twins(pair, ds, representative(trials), title, events)
            panels[2 * row, 0].set_ylabel(with_unit(results.sweep, loss_name(results.sweep), "\n"))
            panels[2 * row + 1, 0].set_ylabel(with_unit(results.sweep, "faulty - golden", "\n"))
        lost = "last finite loss before the trial became non-finite"
        handles = [
            Line2D([], [], color=GOLDEN, linewidth=1.6, label="golden"),
            Line2D([], [], color=FAULTY, linewidth=1.4, linestyle="--", label="faulty"),
            strike_patch(),
            Line2D([], [], **END, linestyle="none", label=lost),
        ]
        legend_below(figure, [*handles, *signs(mitigations)], most=4)
    return Drawing(
        figure,
        "Training loss of a faulty trial and of its golden twin, which is the same trial without the fault, and below "
        "it their difference; for each fault and mitigation the middle width, the rate with the lowest golden loss, "
        f"and there the trial that deviates most.{left_out}",
    )


def representative(table: pd.DataFrame) -> pd.Series | None:
    """The trial to show of one fault and mitigation: a row of `metrics.deviation_table` with `golden_loss`."""
    if table.empty:
        return None
    table = middle_width(table)
    means = table.drop_duplicates("golden").groupby("lr")["golden_loss"].mean().fillna(np.inf)
    table = table[table["lr"] == means.idxmin()]
    return table.sort_values(["size", "trial"], ascending=[False, True]).iloc[0]


def _draw_twins(
    pair: tuple[Axes, Axes], ds: xr.Dataset, trial: pd.Series | None, title: str, events: pd.DataFrame | None
) -> None:
    upper, lower = pair
    if trial is None:
        upper.text(0.5, 0.5, "no such trial", ha="center", va="center", transform=upper.transAxes)
        upper.set_title(title, pad=TITLE_PAD)
        return
    losses = ds["loss"].sel(trial=[trial["golden"], trial["trial"]]).isel(step=slice(0, int(trial["steps"])))
    golden, faulty = losses.astype("float64").compute().values
    steps = losses["step"].values
    upper.plot(steps, golden, color=GOLDEN, linewidth=1.6)
    upper.plot(steps, faulty, color=FAULTY, linewidth=1.4, linestyle="--")
    lower.plot(steps, faulty - golden, color=FAULTY, linewidth=1.4)
    lower.axhline(0, color="0.4", linewidth=1)
    spans = strikes(trial, events)
    for panel in pair:
        mark_strikes(panel, spans)
    finite = np.concatenate([golden, faulty])
    finite = finite[np.isfinite(finite)]
    if len(finite) and finite.min() > 0 and finite.max() > 4 * golden[:1].max(initial=1):
        # The fault drives the loss so high that nothing else could be seen.
        upper.set_yscale("log")
        lower.set_yscale("symlog", linthresh=0.1)
    known = np.flatnonzero(np.isfinite(faulty))
    if not np.isnan(trial["nonfinite_step"]) and len(known):
        upper.plot(steps[known[-1]], faulty[known[-1]], **END | {"markersize": 9})
    width = "" if np.isnan(trial["width"]) else f"width {trial['width']}, "  # a run of one's own has none
    details = f"{width}lr {trial['lr']:g}, seed {trial['seed']}\n{_strike_words(spans)}"
    if not np.isnan(trial["nonfinite_step"]):
        details += f", non-finite from step {trial['nonfinite_step']:.0f}"
    upper.set_title(title, pad=TITLE_PAD)
    upper.annotate(details, (0.5, 1), (0, 5), "axes fraction", "offset points", ha="center", fontsize="small")
    lower.set_xlabel("step")
    lower.tick_params(labelbottom=True)


def _strike_words(spans: Sequence[tuple[int, int]]) -> str:
    if not spans:
        return "never fired"
    first, last = spans[0]
    strike = f"strike at step {first}" if first == last else f"strike at steps {first} to {last}"
    return strike if len(spans) == 1 else f"{strike} and {count(len(spans) - 1, 'time')} more"
