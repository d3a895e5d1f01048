"""The pictures of a sweep. Each is a plain matplotlib Figure: pyplot and the global settings stay as they were."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, NullLocator, ScalarFormatter

from analysis.figures.drawing import MARKERS, Drawing, palette, short, style
from analysis.figures.stability_edge import stability_edge
from analysis.measures import metrics
from analysis.reading.acted import BASELINE
from harness.basics.printing import count

# Neighbouring series stand the first factor apart on a log axis, so that their markers do not hide each other, and all
# of them within the second, so that they do not reach the next width.
DODGE, SPREAD = 1.06, 1.35
MOST_SERIES, MOST_COLUMNS = 10, 4  # lines of a panel, and columns of a figure, that can be told apart
MOST_IN_TITLE = 48  # letters over a panel of faulty and golden loss
TITLE_PAD = 34  # points, for the two lines of details between a title and its panel
LETTER, LINE = 0.085, 0.21  # inches: of a legend's letter at most, on average, and of a legend's line
MOST_LETTERS, MOST_NAME = 34, 21  # of names in two columns under a figure, and beside one of the usual width
GOLDEN, FAULTY, STRIKE = "#4c72b0", "#c44e52", "#e0a030"


def _series(table: pd.DataFrame, axes: Sequence[str]) -> pd.Series:
    """What one line of a plot stands for: the mitigation, and whatever else the sweep varies."""
    parts = [table[axes[0]].astype(str)] + [f"{axis} = " + table[axis].map(short).astype(str) for axis in axes[1:]]
    return pd.Series([", ".join(words) for words in zip(*parts, strict=True)], index=table.index, dtype=object)


def _in_order(series: Sequence[str]) -> list[str]:
    """Alphabetical, but the recipe without a mitigation first."""
    return sorted(set(series), key=lambda name: (name.split(",")[0] != "none", name))


def _chosen(scores: pd.Series, most: int) -> tuple[list[str], str]:
    """The series to show of those in `scores`, in order: those without a mitigation, and of the others the lowest.

    Where a sweep has further axes, many are without a mitigation: then the lowest of them, in half of the places. With
    the words for the caption on how many that leaves out, if it does.
    """
    series = _in_order(scores.index)
    if len(series) <= most:
        return series, ""
    lowest = scores.sort_values(kind="stable").index
    is_plain = np.array([name.split(",")[0] == "none" for name in lowest])
    plain, others = lowest[is_plain], lowest[~is_plain]
    kept = plain[: max(most // 2, most - len(others))]
    what = "mitigations" if len(kept) == len(plain) else "combinations"
    words = f" Not shown: {len(series) - most} {what} with higher values."
    return _in_order([*kept, *others[: most - len(kept)]]), words


def _dodged(values: pd.Series, position: int, count: int) -> pd.Series:
    factor = min(DODGE, SPREAD ** (1 / max(1, count - 1)))
    return values * factor ** (position - (count - 1) / 2)


# --- loss against learning rate ----------------------------------------------------------------------------------


def loss_against_rate(ds: xr.Dataset) -> Drawing:
    """Final validation loss of the clean trials against the learning rate: a panel a width, a line a mitigation.

    What is drawn is min(final loss, loss at initialisation), the quantity that LR sensitivity averages; trials that
    became non-finite are crosses at the loss at initialisation. Points are seeds. The loss at initialisation, that of
    the baseline where every width has one, is marked if any trial comes near it, for it would squeeze all others into
    the bottom.
    """
    table = metrics.clean_table(ds)
    axes = metrics.swept_axes(table, ("width", "mitigation"))
    table = table[table["complete"] & (table["lr"] > 0)].assign(series=lambda t: _series(t, axes[1:]))
    if table["lr"].nunique() < 2:
        return Drawing(None, f"No figure: {count(table['lr'].nunique(), 'learning rate')} among the finished trials.")
    series, left_out = _chosen(table.groupby("series")["capped_loss"].mean(), MOST_SERIES)
    table = table[table["series"].isin(series)]
    widths = sorted(table["width"].unique())
    columns = len(widths) if len(widths) <= 3 else math.ceil(math.sqrt(len(widths)))
    rows = math.ceil(len(widths) / columns)
    lost = int(table["nonfinite_step"].notna().sum())
    start, whose = _start(table)
    middle = (table["capped_loss"].min() + start["initial_loss"].mean()) / 2
    is_near_initial = lost > 0 or table["capped_loss"].max() > middle
    with style():
        longest = max(map(len, series))
        is_long = longest > MOST_LETTERS
        row = 2 + LETTER * longest if is_long else 2 * (1.5 + LETTER * longest)
        width = max(3.9 * columns + 0.6, row)
        height = 3.4 * rows + 1.2 + (LINE * len(series) if is_long else 0)
        figure = Figure(figsize=(width, height), layout="constrained")
        panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).ravel()
        for number, (panel, width) in enumerate(zip(panels, widths, strict=False)):
            _draw_rates(panel, table[table["width"] == width], series)
            if is_near_initial:
                level = start.loc[start["width"] == width, "initial_loss"].mean()
                panel.axhline(level, color="0.4", linestyle=":", linewidth=1.4, zorder=1)
            is_lowest = number + columns >= len(widths)
            panel.set(title=f"width {width}", xlabel="peak learning rate" if is_lowest else "")
            panel.set_ylabel("" if number % columns else "final validation loss [nat/token]")
            panel.tick_params(labelbottom=is_lowest)
        for panel in panels[len(widths) :]:
            panel.set_axis_off()
        _rate_legend(figure, series, lost > 0, whose if is_near_initial else None, ncols=1 if is_long else 2)
        figure.suptitle("Final loss against learning rate")
    crosses = f"crosses are the {count(lost, 'trial')} that became non-finite" if lost else "none became non-finite"
    caption = (
        "Final validation loss of the trials without a fault against the peak learning rate, at most the loss at "
        f"initialisation; lines are means over {count(_seeds(table), 'seed')}, dots are single trials, and {crosses}."
        f"{left_out}"
    )
    return Drawing(figure, caption)


def _start(table: pd.DataFrame) -> tuple[pd.DataFrame, str]:
    """The trials whose losses at initialisation are marked, and the legend's words for whose they are."""
    plain = table[table["mitigation"] == BASELINE]
    if table["mitigation"].nunique() == 1:
        return table, ""
    if set(plain["width"]) == set(table["width"]):
        return plain, f", mitigation: {BASELINE}"
    return table, ", mean over mitigations"


def _draw_rates(panel: Axes, table: pd.DataFrame, series: Sequence[str]) -> None:
    panel.set_xscale("log")
    colours = palette(series)
    for position, name in enumerate(series):
        own = table[table["series"] == name]
        own = own.assign(lr=_dodged(own["lr"], position, len(series)))
        means = own.groupby("lr")["capped_loss"].mean().dropna()
        panel.plot(means.index, means, color=colours[name], linewidth=1.8)
        finite, lost = own[own["nonfinite_step"].isna()], own[own["nonfinite_step"].notna()]
        marker, colour = MARKERS[position % len(MARKERS)], colours[name]
        panel.scatter(finite["lr"], finite["capped_loss"], s=16, marker=marker, color=colour, zorder=3, alpha=0.8)
        panel.scatter(lost["lr"], lost["capped_loss"], s=55, marker="x", color=colour, zorder=4, linewidth=1.8)


def _rate_legend(figure: Figure, series: Sequence[str], has_crosses: bool, initial: str | None, ncols: int) -> None:
    """`initial`: whose loss at initialisation is marked; None: it is not."""
    colours = palette(series)
    handles = [
        Line2D([], [], color=colours[name], linewidth=1.8, marker=MARKERS[position % len(MARKERS)], markersize=4)
        for position, name in enumerate(series)
    ]
    labels = [f"mitigation: {name}" for name in series]
    if has_crosses:
        handles.append(Line2D([], [], color="0.35", marker="x", markersize=7, markeredgewidth=1.8, linestyle="none"))
        labels.append("non-finite trial, drawn at the loss at initialisation")
    if initial is not None:
        handles.append(Line2D([], [], color="0.4", linestyle=":", linewidth=1.4))
        labels.append(f"loss at initialisation{initial}")
    figure.legend(handles, labels, loc="outside lower center", ncols=ncols, frameon=False)


# --- sensitivity against width -----------------------------------------------------------------------------------


def sensitivity_against_width(ds: xr.Dataset) -> Drawing:
    """LR sensitivity against width, a line a mitigation, with intervals over seeds and held-out text."""
    table = metrics.lr_sensitivity(ds)
    axes = metrics.group_axes(table)
    table = table[table["sensitivity"].notna()].assign(series=lambda t: _series(t, axes[1:]))
    if table.empty:
        return Drawing(None, "No figure: no width has finished trials at two learning rates or more.")
    series, left_out = _chosen(table.groupby("series")["sensitivity"].mean(), MOST_SERIES)
    table = table[table["series"].isin(series)]
    widths, colours = sorted(table["width"].unique()), palette(series)
    with style():
        longest = max(map(len, series))
        figure = Figure(figsize=(6.6 + LETTER * max(0, longest - MOST_NAME), 4.6), layout="constrained")
        panel = figure.subplots()
        panel.set_xscale("log", base=2)
        for position, name in enumerate(series):
            own = table[table["series"] == name].sort_values("width")
            reach = np.array([own["sensitivity"] - own["low"], own["high"] - own["sensitivity"]]).clip(min=0)
            panel.errorbar(
                _dodged(own["width"], position, len(series)),
                own["sensitivity"],
                yerr=reach,
                color=colours[name],
                marker=MARKERS[position % len(MARKERS)],
                capsize=4,
                label=name,
            )
        panel.xaxis.set_major_locator(FixedLocator(widths))
        panel.xaxis.set_major_formatter(ScalarFormatter())
        panel.xaxis.set_minor_locator(NullLocator())
        panel.set_xlim(widths[0] / 1.4, widths[-1] * 1.4)
        panel.set_ylim(bottom=min(0, *panel.get_ylim()))
        panel.set(title="Learning-rate sensitivity against width", xlabel="width of the model")
        panel.set_ylabel("LR sensitivity [nat/token]")
        figure.legend(title="mitigation", loc="outside right upper", frameon=False)
    return Drawing(figure, _sensitivity_caption(table) + left_out)


def _sensitivity_caption(table: pd.DataFrame) -> str:
    seeds = int(table["seeds"].max())
    bars = (
        f"bars are 95% intervals over {seeds} seeds and the held-out text" if seeds > 1 else "one seed, so no intervals"
    )
    ranges = table[["lowest_rate", "highest_rate", "rates"]].drop_duplicates()
    span = f"{table['lowest_rate'].min():g} to {table['highest_rate'].max():g}"
    warning = "" if len(ranges) == 1 else "; groups cover different rates, so their values cannot be compared"
    return f"How far the loss rises above its best over learning rates {span} (lower is steadier); {bars}{warning}."


# --- faulty against golden ---------------------------------------------------------------------------------------


def faulty_against_golden(ds: xr.Dataset, events: pd.DataFrame | None = None) -> Drawing:
    """Loss of a faulty trial and of its golden twin, and their difference, with the strike marked.

    A row a kind of fault, a column a mitigation. The one trial of each is chosen by rule: the middle width (the lower
    of two), there the learning rate at which the golden twins' final loss is lowest, and of the trials left the one
    that deviates most from its twin; then the first by id. With `events`, as `analysis.fault_events` gives them,
    strikes are marked where they happened, otherwise where the config has them.
    """
    if not (ds["fault"].values != "none").any():
        return Drawing(None, "No figure: the sweep has no faults.")
    table = metrics.deviation_table(ds)
    if table.empty:
        return Drawing(None, "No figure: no faulty trial is finished and has a finished golden twin.")
    golden_loss = pd.Series(metrics.final_loss(ds).values, index=ds["trial"].values)
    table["golden_loss"] = golden_loss.reindex(table["golden"]).to_numpy()
    kinds = sorted(table["fault"].unique())
    mitigations, left_out = _chosen(table.groupby("mitigation")["size"].median(), MOST_COLUMNS)
    with style():
        figure = Figure(figsize=(4.2 * len(mitigations) + 0.8, 4.4 * len(kinds) + 1.0), layout="constrained")
        shape, ratios = (2 * len(kinds), len(mitigations)), [2.2, 1] * len(kinds)
        panels = figure.subplots(*shape, squeeze=False, height_ratios=ratios, sharex="col", sharey="row")
        for row, kind in enumerate(kinds):
            for column, mitigation in enumerate(mitigations):
                pair = panels[2 * row, column], panels[2 * row + 1, column]
                own = table[(table["fault"] == kind) & (table["mitigation"] == mitigation)]
                _draw_twins(pair, ds, representative(own), _title(kind, mitigation), events)
            panels[2 * row, 0].set_ylabel("training loss\n[nat/token]")
            panels[2 * row + 1, 0].set_ylabel("faulty - golden\n[nat/token]")
        _twin_legend(figure)
        figure.suptitle("Faulty against golden loss")
    return Drawing(
        figure,
        "Training loss of a faulty trial and of its golden twin, which is the same trial without the fault, and below "
        "it their difference; for each fault and mitigation the middle width, the rate with the lowest golden loss, "
        f"and there the trial that deviates most.{left_out}",
    )


def _title(kind: str, mitigation: str) -> str:
    return textwrap.fill(f"{kind}, mitigation: {mitigation}", MOST_IN_TITLE)


def representative(table: pd.DataFrame) -> pd.Series | None:
    """The trial to show of one fault and mitigation: a row of `metrics.deviation_table` with `golden_loss`."""
    if table.empty:
        return None
    widths = sorted(table["width"].unique())
    table = table[table["width"] == widths[(len(widths) - 1) // 2]]
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
        for first, last in spans:
            panel.axvspan(first, last, color=STRIKE, alpha=0.35, linewidth=0)
            panel.axvline(first, color=STRIKE, linewidth=1.4, zorder=1)
    _set_scales(upper, lower, golden, faulty)
    _mark_end(upper, steps, faulty, trial["nonfinite_step"])
    details = f"width {trial['width']}, lr {trial['lr']:g}, seed {trial['seed']}\n{_strike_words(spans)}"
    if not np.isnan(trial["nonfinite_step"]):
        details += f", non-finite from step {trial['nonfinite_step']:.0f}"
    upper.set_title(title, pad=TITLE_PAD)
    upper.annotate(details, (0.5, 1), (0, 5), "axes fraction", "offset points", ha="center", fontsize="small")
    lower.set_xlabel("step")
    lower.tick_params(labelbottom=True)


def strikes(trial: pd.Series, events: pd.DataFrame | None) -> list[tuple[int, int]]:
    """(first, last) step of each stretch of strikes in a row; empty if events are given and the fault never fired.

    The store keeps only the first events of a fault that strikes often (`trial["strikes"]` counts them all); the rest
    is marked where the config has it.
    """
    planned = _planned_strikes(trial)
    if events is None:
        steps = planned
    else:
        own = events[events["trial"] == trial["trial"]]
        steps = np.unique(own["step"].dropna().astype(int))
        if 0 < len(own) < trial["strikes"]:
            steps = np.union1d(steps, planned[planned > steps[-1]])
    groups = np.split(steps, np.flatnonzero(np.diff(steps) > 1) + 1) if len(steps) else []
    return [(int(group[0]), int(group[-1])) for group in groups]


def _planned_strikes(trial: pd.Series) -> np.ndarray:
    """The steps at which the config has strikes, as far as the trial got. A fault without a duration is permanent."""
    # A sweep in which no trial has a value of a field has no such coordinate.
    start, duration, period = trial["fault_start"], trial.get("fault_duration", np.nan), trial.get("fault_period", 1)
    end = np.nanmin([trial["steps"], trial["nonfinite_step"] + 1, start + duration])
    return np.arange(start, end, 1 if np.isnan(period) else period, dtype=int)


def _strike_words(spans: Sequence[tuple[int, int]]) -> str:
    if not spans:
        return "never fired"
    first, last = spans[0]
    words = f"strike at step {first}" if first == last else f"strike at steps {first} to {last}"
    return words if len(spans) == 1 else f"{words} and {count(len(spans) - 1, 'time')} more"


def _set_scales(upper: Axes, lower: Axes, golden: np.ndarray, faulty: np.ndarray) -> None:
    """Logarithmic where the fault drives the loss so high that nothing else could be seen."""
    finite = np.concatenate([golden, faulty])
    finite = finite[np.isfinite(finite)]
    if len(finite) and finite.min() > 0 and finite.max() > 4 * golden[:1].max(initial=1):
        upper.set_yscale("log")
        lower.set_yscale("symlog", linthresh=0.1)


def _mark_end(panel: Axes, steps: np.ndarray, faulty: np.ndarray, nonfinite_step: float) -> None:
    finite = np.flatnonzero(np.isfinite(faulty))
    if not np.isnan(nonfinite_step) and len(finite):
        end = finite[-1]
        panel.plot(steps[end], faulty[end], color=FAULTY, marker="x", markersize=9, markeredgewidth=2.2)


def _twin_legend(figure: Figure) -> None:
    handles = [
        Line2D([], [], color=GOLDEN, linewidth=1.6),
        Line2D([], [], color=FAULTY, linewidth=1.4, linestyle="--"),
        Patch(color=STRIKE, alpha=0.6),
        Line2D([], [], color=FAULTY, marker="x", markersize=8, markeredgewidth=2.2, linestyle="none"),
    ]
    labels = ["golden", "faulty", "strike", "last finite loss before the trial became non-finite"]
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)


def _seeds(table: pd.DataFrame) -> int:
    return len(table.drop_duplicates([column for column in metrics.SEEDS if column in table]))


# File name -> how to draw it, from the dataset and the fault events.
FIGURES: dict[str, Callable[[xr.Dataset, pd.DataFrame], Drawing]] = {
    "loss_against_rate": lambda ds, events: loss_against_rate(ds),
    "stability_edge": lambda ds, events: stability_edge(ds),
    "sensitivity_against_width": lambda ds, events: sensitivity_against_width(ds),
    "faulty_against_golden": faulty_against_golden,
}
