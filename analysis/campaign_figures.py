"""The pictures of a campaign: where faults hurt, what became of them, how far the loss went and when it came back.

Each takes a sweep with `analysis.outcomes`, and leaves out the trials that measure the clean envelope.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd
import xarray as xr
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from analysis.drawing import Drawing, count, style
from analysis.outcomes import LINGERING, MASKED, NON_FINITE, OUTCOMES, RECOVERED, recipes, twin_curves
from analysis.recovery_figure import recovery_against_beta2
from analysis.statistics import studied

# From harmless to worst; they differ in lightness too.
COLOURS = dict(zip(OUTCOMES, ["#9dc3e6", "#4da88f", "#f0c75e", "#dd7442", "#6a2135"], strict=True))
LIGHT = (MASKED, RECOVERED, LINGERING)  # colours on which writing is dark
NEVER_FIRED = "never fired"
# Bits of the mantissa and of the exponent, which stands above it; the sign is on top.
FORMATS = {"fp32": (23, 8), "bf16": (7, 8), "fp16": (10, 5), "fp8_e4m3": (3, 4), "fp8_e5m2": (2, 5)}
MOST_ROWS, MOST_ROWS_WITH_COUNTS = 40, 24  # of a map whose writing can be read
TIME_BINS = 5
NARROWEST = 0.045  # share of a bar that has room for a number
MOST_PANELS, MOST_LINES = 4, 60  # of the deviation curves


def site_labels(faulty: xr.Dataset) -> np.ndarray:
    """The site that each trial's fault struck, [trial]; if it never fired, that of its config, else "never fired"."""
    struck = faulty["struck_site"].values
    planned = faulty["site"].values if "site" in faulty.coords else np.full(len(struck), "")
    return np.select([struck != "", planned != ""], [struck, planned], NEVER_FIRED)


def fault_table(sweep: xr.Dataset) -> pd.DataFrame:
    """One row a judged fault: its `trial`, the `site`, `tensor` and `bit` that it struck, in which number `format`, its
    `outcome` and `deviation_max`, and the steps at which it began (`start`) and its trial ended (`steps`).
    """
    faulty = studied(sweep)
    names = {"struck_tensor": "tensor", "struck_bit": "bit", "fault_outcome": "outcome"}
    same = ("trial", "steps", "deviation_max")
    table = pd.DataFrame({names.get(old, old): faulty[old].values for old in (*same, *names)})
    table["format"] = faulty["format"].values if "format" in faulty.coords else "fp32"
    table["start"] = faulty["start"].values if "start" in faulty.coords else 0
    table["site"] = site_labels(faulty)
    return table[table["outcome"].isin(OUTCOMES)].reset_index(drop=True)


# --- the vulnerability map ---------------------------------------------------------------------------------------


def vulnerability_map(sweep: xr.Dataset) -> Drawing:
    """Share of faults that were not masked, by bit and by what was struck: a panel a number format.

    A row is a site and tensor; with more than 40 of them the model's blocks are pooled, and with more than 40 still,
    the tensors of a site. Only faults that struck a single bit are in it.
    """
    table = fault_table(sweep)
    single = table[table["bit"].notna() & table["format"].isin(FORMATS)]
    if single.empty:
        return Drawing(None, "No figure: no judged fault struck a single bit of a number.")
    single, what = _with_rows(single)
    parts = {name: single[single["format"] == name] for name in FORMATS if (single["format"] == name).any()}
    heights = [0.3 * part["row"].nunique() + 0.9 for part in parts.values()]
    with style():
        figure = Figure(figsize=(14, sum(heights) + 1.6), layout="constrained")
        panels = list(figure.subplots(len(parts), squeeze=False, height_ratios=heights)[:, 0])
        for panel, (name, part) in zip(panels, parts.items(), strict=True):
            image = _draw_map(panel, part, name)
            panel.set_ylabel(what)
        panels[-1].set_xlabel("bit of the number (0: last of the mantissa)")
        bar = figure.colorbar(image, ax=panels, label="share not masked", fraction=0.02, pad=0.02, aspect=12)
        bar.outline.set_visible(False)
        empty = Patch(facecolor="0.93", edgecolor="0.7", hatch="////", label="no fault")
        figure.legend(handles=[empty], loc="outside lower left", frameon=False)
        figure.suptitle("Vulnerability to bit faults")
    cells = single.groupby(["format", "row", "bit"]).size()
    each = str(cells.min()) if cells.min() == cells.max() else f"{cells.min()} to {cells.max()}"
    caption = (
        f"Share of the {count(len(single), 'fault')} of a single bit that were not masked, which are those that "
        f"recovered, lingered, diverged or became non-finite, by {what} and bit. A cell with data has {each} of them "
        "(the numbers in the cells, if there is room), n is their sum in a row, and hatched cells have none."
    )
    others = len(table) - len(single)
    return Drawing(
        figure, caption + (f" Not shown: {count(others, 'fault')} of several bits or of none." if others else "")
    )


def _with_rows(table: pd.DataFrame) -> tuple[pd.DataFrame, str]:
    """The table with the label of each fault's row, and the word for what a row is."""
    is_one_site = table["site"].nunique() == 1
    pooled = table["tensor"].map(lambda name: re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name))
    for tensors in (table["tensor"], pooled):
        rows = tensors if is_one_site else table["site"] + ": " + tensors
        if rows.nunique() <= MOST_ROWS:
            return table.assign(
                row=rows
            ), f"tensor at site {table['site'].iloc[0]}" if is_one_site else "site and tensor"
    return table.assign(row=table["site"]), "site"


def _draw_map(panel: Axes, table: pd.DataFrame, format: str) -> ScalarMappable:
    mantissa, exponent = FORMATS[format]
    rows, bits = sorted(table["row"].unique()), mantissa + exponent + 1
    total, hurt = np.zeros((2, len(rows), bits), dtype=int)
    place = pd.Index(rows).get_indexer(table["row"]), table["bit"].astype(int).to_numpy()
    np.add.at(total, place, 1)
    np.add.at(hurt, place, (table["outcome"] != MASKED).to_numpy())
    share = np.ma.masked_array(hurt / np.maximum(total, 1), total == 0)
    panel.grid(False)
    # Cells without data are transparent, so the background shows.
    panel.patch.set(facecolor="0.93", edgecolor="0.7", hatch="////", linewidth=0)
    edges = np.arange(bits + 1) - 0.5, np.arange(len(rows) + 1) - 0.5
    image = panel.pcolormesh(*edges, share, cmap="rocket_r", vmin=0, vmax=1, edgecolors="white", linewidth=0.5)
    if len(rows) <= MOST_ROWS_WITH_COUNTS:
        for row, bit in zip(*np.nonzero(total), strict=True):
            colour = "white" if share[row, bit] > 0.35 else "0.2"
            panel.text(float(bit), float(row), str(total[row, bit]), ha="center", va="center", fontsize=7, color=colour)
    for number, label in enumerate(rows):
        own = (table["row"] == label).sum()
        panel.text(bits - 0.3, number, f"n = {own}", ha="left", va="center", fontsize="small")
    fields = {"mantissa": (0, mantissa), "exponent": (mantissa, bits - 1), "sign": (bits - 1, bits)}
    for name, (first, end) in fields.items():
        panel.axvline(end - 0.5, color="0.2", linewidth=1.4)
        middle = (first + end - 1) / 2
        panel.annotate(
            name, (middle, 1), (0, 4), ("data", "axes fraction"), "offset points", ha="center", fontsize="small"
        )
    panel.set_title(format, loc="left", pad=18, fontweight="bold")
    panel.set_xticks(range(bits))
    panel.set_yticks(range(len(rows)), rows)
    panel.tick_params(labelsize="small")
    panel.set(xlim=(-0.5, bits - 0.5), ylim=(len(rows) - 0.5, -0.5))
    return image


# --- outcomes by site and by time --------------------------------------------------------------------------------


def outcome_shares(sweep: xr.Dataset) -> Drawing:
    """Share of each outcome as stacked bars with counts: one a site, and one a stretch of time when faults began."""
    table = fault_table(sweep)
    if table.empty:
        return Drawing(None, "No figure: no fault is judged, since none is finished together with its golden twin.")
    times, what = _times(table)
    groups = {"site": (table["site"], "site of the fault"), "time": (times, what)}
    bars = {name: labels.nunique() for name, (labels, _) in groups.items()}
    with style():
        heights = [number + 0.3 for number in bars.values()]
        figure = Figure(figsize=(10, 0.46 * sum(heights) + 1.8), layout="constrained")
        panels = figure.subplots(2, height_ratios=heights, sharex=True)
        for panel, (labels, title) in zip(panels, groups.values(), strict=True):
            _draw_shares(panel, table["outcome"], labels)
            panel.set_ylabel(title)
        panels[-1].set_xlabel("share of the faults [%]")
        figure.align_ylabels()
        handles = [Patch(color=COLOURS[outcome], label=outcome) for outcome in OUTCOMES]
        figure.legend(handles=handles, loc="outside lower center", ncols=len(OUTCOMES), frameon=False)
        figure.suptitle("What became of the faults")
    left_out = studied(sweep).sizes["trial"] - len(table)
    unjudged = (
        f" {count(left_out, 'fault')} unfinished or without a golden twin to judge by not counted." if left_out else ""
    )
    caption = f"Outcomes of {count(len(table), 'fault')} by {groups['site'][1]} and by {what}; numbers are faults."
    return Drawing(figure, caption + unjudged)


def _times(table: pd.DataFrame) -> tuple[pd.Series, str]:
    """A label for when each fault began, such that labels sort by time, and what they mean."""
    if table["start"].nunique() <= TIME_BINS and table["steps"].nunique() == 1:
        return pd.Series(pd.Categorical(table["start"].astype(int), ordered=True)), "first step of the fault"
    part = np.minimum(table["start"] * TIME_BINS // table["steps"], TIME_BINS - 1).astype(int)
    if table["steps"].nunique() == 1:
        edges = np.ceil(np.arange(TIME_BINS + 1) * table["steps"].iloc[0] / TIME_BINS).astype(int)
        names = [f"{edges[i]} to {edges[i + 1] - 1}" for i in range(TIME_BINS)]
        return pd.Series(pd.Categorical.from_codes(part, names, ordered=True)), "first step of the fault"
    names = [f"{100 * i // TIME_BINS} to {100 * (i + 1) // TIME_BINS}%" for i in range(TIME_BINS)]
    return pd.Series(pd.Categorical.from_codes(part, names, ordered=True)), "first step of the fault, in % of the run"


def _draw_shares(panel: Axes, outcome: pd.Series, labels: pd.Series) -> None:
    counts = pd.crosstab(labels, outcome).reindex(columns=list(OUTCOMES), fill_value=0)
    counts = counts[counts.sum(axis=1) > 0]
    total = counts.sum(axis=1).to_numpy()
    left = np.zeros(len(counts))
    for name in OUTCOMES:
        share = counts[name].to_numpy() / total
        panel.barh(range(len(counts)), 100 * share, left=100 * left, height=0.75, color=COLOURS[name], linewidth=0)
        for row in np.flatnonzero(share >= NARROWEST):
            middle, colour = 100 * (left[row] + share[row] / 2), "0.15" if name in LIGHT else "white"
            text = str(counts[name].iloc[row])
            panel.text(middle, float(row), text, ha="center", va="center", fontsize="small", color=colour)
        left += share
    panel.set_yticks(range(len(counts)), [f"{label} (n = {n})" for label, n in zip(counts.index, total, strict=True)])
    panel.grid(False, axis="y")
    panel.set(xlim=(0, 100), ylim=(len(counts) - 0.5, -0.5))


# --- deviation curves --------------------------------------------------------------------------------------------


def deviation_curves(sweep: xr.Dataset) -> Drawing:
    """|D_t| against the steps since the strike, a thin line a fault, over the clean envelope: a panel a recipe.

    Drawn are the four recipes with the most faults, and of each recipe at most about 60 faults: of every outcome in
    proportion, at least one, at even distances in the order of their largest deviation.
    """
    number, names = recipes(sweep)
    position = pd.Series(np.arange(sweep.sizes["trial"]), index=sweep["trial"].values)
    table = fault_table(sweep)
    table = table[table["deviation_max"] > 0].assign(row=lambda t: position.reindex(t["trial"]).to_numpy())
    if table.empty:
        return Drawing(None, "No figure: no judged fault moved the loss of its trial.")
    table["recipe"] = number[table["row"]]
    shown = sorted(table["recipe"].value_counts(sort=True).index[:MOST_PANELS])
    golden = position.reindex(sweep["golden"].values).to_numpy()
    columns = min(2, len(shown))
    rows = math.ceil(len(shown) / columns)
    with style():
        figure = Figure(figsize=(5.2 * columns + 1.6, 4 * rows + 1.2), layout="constrained")
        panels = list(figure.subplots(rows, columns, squeeze=False, sharey=True, sharex=True).ravel())
        for panel, recipe in zip(panels, shown, strict=False):
            own = table[table["recipe"] == recipe]
            drawn = _sample(own)
            _draw_deviations(panel, sweep, drawn, golden[drawn["row"]].astype(int))
            panel.set_title(f"{names[recipe]}\n{len(drawn)} of {count(len(own), 'fault')}", fontsize="medium")
        _mark_envelopes(panels[: len(shown)], sweep, number, shown)
        for index, panel in enumerate(panels[: len(shown)]):
            panel.set_ylabel("" if index % columns else "|loss, faulty - golden| [nat/token]")
            is_lowest = index + columns >= len(shown)
            panel.set_xlabel("steps since the strike" if is_lowest else "")
            panel.tick_params(labelbottom=is_lowest)
        for panel in panels[len(shown) :]:
            panel.set_axis_off()
        _deviation_legend(figure, table[table["recipe"].isin(shown)], sweep, number, shown)
        figure.suptitle("How far faults drove the loss from golden")
    left_out = len(names) - len(shown)
    caption = (
        "Size of the difference of training loss between a faulty trial and its golden twin, against the steps since "
        "the strike, for faults that moved the loss; steps with equal losses are gaps. Lines are a sample: of every "
        "outcome in proportion, evenly spaced in the order of their largest deviation."
    )
    return Drawing(
        figure, caption + (f" {count(left_out, 'recipe')} with fewer such faults not shown." if left_out else "")
    )


def _sample(table: pd.DataFrame) -> pd.DataFrame:
    """At most about 60 of the rows, the same ones every time."""
    parts = []
    for outcome in OUTCOMES:
        own = table[table["outcome"] == outcome].sort_values(["deviation_max", "trial"])
        wanted = math.ceil(len(own) * min(1, MOST_LINES / len(table)))
        parts.append(own.iloc[np.unique(np.linspace(len(own) - 1, 0, wanted).round().astype(int))])
    return pd.concat(parts)


def _draw_deviations(panel: Axes, sweep: xr.Dataset, drawn: pd.DataFrame, golden: np.ndarray) -> None:
    panel.set_yscale("log")
    curves, twins = twin_curves(sweep["loss"], drawn["row"].to_numpy(), golden)
    with np.errstate(invalid="ignore"):
        size = np.abs(curves.astype("float64") - twins)
    for values, fault in zip(size, drawn.itertuples(), strict=True):
        begin = int(np.nan_to_num(fault.start))
        own = np.where(np.isfinite(values) & (values > 0), values, np.nan)[begin : int(fault.steps)]
        colour = COLOURS[fault.outcome]
        panel.plot(np.arange(len(own)), own, color=colour, linewidth=0.9, alpha=0.85)
        last = np.flatnonzero(~np.isnan(own))
        if fault.outcome == NON_FINITE and len(last):
            panel.plot(last[-1], own[last[-1]], color=colour, marker="x", markersize=7, markeredgewidth=1.8)


def _mark_envelopes(panels: Sequence[Axes], sweep: xr.Dataset, number: np.ndarray, shown: Sequence[int]) -> None:
    """The band from below the axis up to the largest clean deviation, and a line at the largest final one."""
    low, high = panels[0].get_ylim()
    for panel, recipe in zip(panels, shown, strict=True):
        first = np.argmax(number == recipe)
        largest, final = (float(sweep[name].values[first]) for name in ("envelope_max", "envelope_final"))
        if largest > 0:
            panel.axhspan(1e-30, largest, color="0.55", alpha=0.25, linewidth=0, zorder=0)
            high = max(high, 1.5 * largest)
        if final > 0:
            panel.axhline(final, color="0.3", linewidth=1.2, linestyle="--", zorder=1)
            low = min(low, final / 2)
    panels[0].set_ylim(low, high)


def _deviation_legend(
    figure: Figure, table: pd.DataFrame, sweep: xr.Dataset, number: np.ndarray, shown: Sequence[int]
) -> None:
    present = [outcome for outcome in OUTCOMES if (table["outcome"] == outcome).any()]
    handles: list[Artist] = [Line2D([], [], color=COLOURS[word], linewidth=2, label=word) for word in present]
    if NON_FINITE in present:
        last = Line2D([], [], color=COLOURS[NON_FINITE], marker="x", linestyle="none", label="last finite loss")
        last.set(markersize=7, markeredgewidth=1.8)
        handles.append(last)
    has_envelope = np.isin(number, shown) & (sweep["envelope_max"].values > 0)
    if has_envelope.any():
        handles.append(Patch(color="0.55", alpha=0.35, label="clean envelope"))
        handles.append(Line2D([], [], color="0.3", linestyle="--", linewidth=1.2, label="envelope of the final loss"))
    else:
        handles.append(Line2D([], [], linestyle="none", label="no clean envelope"))
    figure.legend(handles=handles, loc="outside lower center", ncols=2 * min(2, len(shown)), frameon=False)


# File name -> how to draw it, from a sweep with outcomes.
CAMPAIGN_FIGURES: dict[str, Callable[[xr.Dataset], Drawing]] = {
    "vulnerability_map": vulnerability_map,
    "outcome_shares": outcome_shares,
    "deviation_curves": deviation_curves,
    "recovery_against_beta2": recovery_against_beta2,
}
