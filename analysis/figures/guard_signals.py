"""The signals that guards declare, whatever they are: how each runs with and without faults."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from analysis.figures.drawing import Drawing, looks, page
from analysis.figures.legends import LINE, legend_below, signs
from analysis.figures.registry import Needs, Results, drawn_from
from analysis.figures.series import MOST_SERIES, chosen, middle_width, series_of
from analysis.figures.strikes import mark_strikes, strike_patch, strikes
from analysis.measures import metrics
from analysis.reading.levels import word
from analysis.reading.twins import BLOCK_BYTES, blocks
from harness.basics.printing import count, label
from harness.config import NO_FAULT

MOST_IN_TITLE = 48  # letters over a panel
SPIKE = 50  # times the median size: with such values the axis is logarithmic away from 0
MOST_TICKS = 4  # of powers of ten on one side of 0
STRIKE = "0.6"  # grey, since lines have all colours


@drawn_from(Needs.GUARDS, place=1, points="x=lr&y=final_loss&colour=playbook")
def guard_signals(results: Results) -> Drawing:
    """A panel a signal, a line a mitigation and fault: the median over seeds at each step, with the strikes marked.

    Shown are the middle width at which there are such signals (the lower of two), and there the learning rate at which
    the trials without a fault end lowest. Whatever else the sweep varies has lines of its own, but the fields of a
    fault, over which the median is taken too; strikes are marked where they do not differ in when they strike.
    """
    sweep, names = results.sweep, results.guard_signals
    table = _shown_trials(sweep, names)
    if table.empty:
        return Drawing(None, "No figure: no finished trial has a signal of a guard.")
    series, left_out = chosen(table.groupby("series")["final_loss"].mean(), MOST_SERIES, "higher final losses")
    parts = {name: table[table["series"] == name] for name in series}
    spans = {span for part in parts.values() for span in _common_strikes(part, results.events)}
    columns, rows = min(2, len(names)), math.ceil(len(names) / 2)
    height = 3.4 * rows + 0.8 + LINE * math.ceil((len(series) + 2) / 2)
    with page(max(7, 5.2 * columns), height, "Signals of guards") as figure:
        panels = figure.subplots(rows, columns, squeeze=False, sharex=True).ravel()
        for panel, name in zip(panels, names, strict=False):
            _draw_signal(panel, sweep[name], parts)
            mark_strikes(panel, sorted(spans), STRIKE)
        for panel in panels[len(names) :]:
            panel.set_axis_off()
        handles: list[Artist] = [Line2D([], [], **_look(name, parts), label=f"mitigation: {name}") for name in series]
        handles += [*([strike_patch(STRIKE)] if spans else []), *signs(series)]
        legend_below(figure, handles)
    trials = f"{count(len(table), 'trial')}{_where(table)}"
    caption = f"What guards showed of {trials}: at each step the median over seeds, a line a mitigation and fault."
    return Drawing(figure, caption + left_out)


def _where(table: pd.DataFrame) -> str:
    """The width and the rate of the trials that are shown, as far as they have them."""
    named = {"of width": table["width"].iloc[0], "at learning rate": table["lr"].iloc[0]}
    return "".join(f" {words} {word(value)}" for words, value in named.items() if not pd.isna(value))


def _shown_trials(sweep: xr.Dataset, names: Sequence[str]) -> pd.DataFrame:
    """The rows of `trial_table` that the figure shows, with their number in the sweep (`row`) and their `series`."""
    has_signal = np.zeros(sweep.sizes["trial"], dtype=bool)
    for name in names:
        for block in blocks(sweep[name], np.flatnonzero(sweep["complete"].values)):
            has_signal[block] |= ~np.isnan(sweep[name].isel(trial=block).values).all(axis=1)
    if not has_signal.any():
        return pd.DataFrame()
    rows = np.flatnonzero(has_signal)
    table = middle_width(metrics.trial_table(sweep[metrics.READ].isel(trial=rows)).assign(row=rows))
    is_clean = table["fault"] == NO_FAULT.name
    losses = table[is_clean if is_clean.any() else ~is_clean].groupby("lr")["final_loss"].mean()
    table = table[table["lr"] == losses.fillna(np.inf).idxmin()] if len(losses) else table
    swept = table.drop(columns=["row", *(name for name in table if str(name).startswith("fault_"))])
    axes = metrics.swept_axes(sweep, swept, ("mitigation", "fault"))
    if table["fault"].nunique() == 1:
        axes.remove("fault")
    return table.assign(series=series_of(table, axes))


def _common_strikes(trials: pd.DataFrame, events: pd.DataFrame | None) -> list[tuple[int, int]]:
    """The `strikes` of trials with one fault; none if they are planned at different steps."""
    when = [name for name in ("fault_start", "fault_duration", "fault_period") if name in trials]
    if (trials["fault"] == NO_FAULT.name).all() or len(trials[when].drop_duplicates()) > 1:
        return []
    return strikes(trials.sort_values("strikes", kind="stable").iloc[-1], events)


def _look(line: str, parts: Mapping[str, pd.DataFrame]) -> dict[str, Any]:
    is_faulty = (parts[line]["fault"] != NO_FAULT.name).all()
    return {"color": looks([*parts])[line]["color"], "linestyle": "--" if is_faulty else "-", "linewidth": 1.6}


def _draw_signal(panel: Axes, signal: xr.DataArray, parts: Mapping[str, pd.DataFrame]) -> None:
    """The medians of each line's trials."""
    curves = {line: _medians(signal, part["row"].to_numpy()) for line, part in parts.items()}
    for line, median in curves.items():
        panel.plot(signal["step"].values, median, **_look(line, parts))
    sizes = np.abs(np.concatenate([*curves.values()]))
    sizes = sizes[np.isfinite(sizes) & (sizes > 0)]
    if len(sizes) and sizes.max() > SPIKE * np.median(sizes):
        low, high = (int(np.ceil(np.log10(size))) for size in (np.median(sizes), sizes.max()))
        panel.set_yscale("symlog", linthresh=10.0**low)
        powers = 10.0 ** np.arange(low, high + 1, math.ceil((high - low) / MOST_TICKS))
        limits = panel.get_ylim()
        panel.set_yticks([*-powers, 0, *powers])
        panel.set_ylim(limits)
    panel.set_title(textwrap.fill(label(signal.attrs["long_name"]), MOST_IN_TITLE), fontsize="medium")
    panel.set_ylabel(f"{label(str(signal.name))}\n[{label(signal.attrs['units'])}]")
    panel.set_xlabel("step")
    panel.tick_params(labelbottom=True)


def _medians(signal: xr.DataArray, rows: np.ndarray) -> np.ndarray:
    """Over these trials, [steps]; so many steps are in memory at once that the number of trials has no bound."""
    steps = max(1, BLOCK_BYTES // (signal.dtype.itemsize * len(rows)))
    parts = [slice(first, first + steps) for first in range(0, signal.sizes["step"], steps)]
    return np.concatenate([pd.DataFrame(signal.isel(trial=rows, step=part).values).median() for part in parts])
