"""Forecasts as pictures: bands over sizes with what was measured, reliability of probabilities, decisions by cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from analysis.figures.drawing import Drawing, looks, page, panels_in_grid
from analysis.figures.legends import legend_below
from analysis.forecast_scores.decisions import Decision, Reversal
from analysis.forecast_scores.scores import FLOOR, Truth
from analysis.forecast_scores.sealing import Sealed, units_of
from analysis.forecasts.base import LEVELS, MIDDLE, log_parameters
from analysis.measures.forecast_targets import TARGETS, Observations
from analysis.measures.statistics import wilson_interval
from harness.basics.printing import label

LOW, HIGH = LEVELS.index(0.1), LEVELS.index(0.9)
BINS = np.array([0.0, 0.05, 0.2, 0.4, 0.6, 0.8, 0.95, 1.0])
MOST_PAIRS = 6
DODGE = 0.02  # decades of parameters between what was forecast and what was measured


def forecast_bands(sealed: Sealed, by: str, target: str, known: Observations, test: Observations) -> Drawing:
    """A panel a recipe: what was known, what was forecast with its 80% interval, and what came true."""
    places = units_of(sealed.units, target)
    units, quantiles = sealed.units.iloc[places], sealed.quantiles(by, target)
    if quantiles is None:
        return Drawing(None, f"{by} has not forecast {target}.")
    values = quantiles[places]
    recipes = sorted(units["recipe"].unique())
    columns = min(4, len(recipes))
    rows = -(-len(recipes) // columns)
    units_of_target = "" if TARGETS[target].units == "1" else f" [{TARGETS[target].units}]"
    name = "largest stable learning rate" if target == "edge" else TARGETS[target].text + units_of_target
    with page(2.7 * columns + 0.6, 2.1 * rows + 1.2) as figure:
        panels = panels_in_grid(figure, len(recipes), columns, "parameters", "")
        figure.supylabel(name)
        for panel, recipe in zip(panels, recipes, strict=True):
            panel.set_title(label(recipe))
            for observations, marker, colour, text in (
                (known, "o", "0.45", "known"),
                (test, "D", "C3", "measured after the seal"),
            ):
                table = observations.tables[target]
                own = table[table["recipe"] == recipe]
                means = own.groupby(["width", "depth"])["value"].agg(["mean", "std", "size"]).reset_index()
                reach = 2 * means["std"] / np.sqrt(means["size"])
                panel.errorbar(
                    10 ** log_parameters(means),
                    means["mean"],
                    reach,
                    fmt=marker,
                    color=colour,
                    markersize=4,
                    capsize=2,
                    label=text,
                )
            is_own = (units["recipe"] == recipe).to_numpy()
            x = 10 ** (log_parameters(units[is_own]) - DODGE)
            middle, low, high = (values[is_own][:, level] for level in (MIDDLE, LOW, HIGH))
            panel.errorbar(
                x,
                middle,
                [middle - low, high - middle],
                fmt="_",
                color="C0",
                elinewidth=5,
                alpha=0.5,
                label="forecast, 80% interval",
            )
            panel.set_xscale("log")
        if target == "edge":
            low_end, high_end = panels[0].get_ylim()
            rates = [digit * 10.0**power for power in range(-8, 5) for digit in (1, 2, 5)]
            shown = [rate for rate in rates if low_end <= np.log10(rate) <= high_end]
            panels[0].set_yticks(np.log10(shown), [f"{rate:g}" for rate in shown])
        legend_below(figure, panels[0].get_legend_handles_labels()[0])
    caption = (
        f"{by}: forecasts sealed before the diamonds were trained, for the mean over many seeds. Bars of points: two "
        "standard errors over seeds."
    )
    return Drawing(figure, caption)


def reliability(truth: Truth, said: Mapping[str, np.ndarray]) -> Drawing:
    """How often runs diverged, of those that were said to with a probability in each bin."""
    names = [name for name in said if name != FLOOR]
    with page(6.4, 5.2) as figure:
        panel = figure.subplots()
        panel.plot([0, 1], [0, 1], color="0.6", linewidth=1, linestyle="--")
        n = np.isfinite(truth.values).sum(axis=1)
        for name, look in looks(names).items():
            p = said[name][:, 0]
            bins = np.clip(np.digitize(p, BINS) - 1, 0, len(BINS) - 2)
            x, y, ends = [], [], []
            for number in range(len(BINS) - 1):
                inside = (bins == number) & np.isfinite(p)
                if inside.any():
                    x.append(np.average(p[inside], weights=n[inside]))
                    y.append(np.nansum(truth.values[inside]) / n[inside].sum())
                    ends.append(wilson_interval(np.nansum(truth.values[inside]), n[inside].sum()))
            reach = np.abs(np.array(ends, float).T - np.array(y))
            panel.errorbar(x, y, reach, capsize=2, linewidth=1.2, markersize=5, label=name, **look)
        panel.set(xlabel="forecast probability that a run does not train", ylabel="share of runs that did not train")
        legend_below(figure, panel.get_legend_handles_labels()[0])
    return Drawing(
        figure, "On the dashed line forecasts are reliable. Bars: 95% Wilson intervals, as if runs were independent."
    )


def accuracy_against_cost(small: Sequence[tuple[str, float, Decision]]) -> Drawing:
    """How often one small size says rightly which of two recipes is better at the sizes forecast, by its cost."""
    kinds: list[tuple[str, str, dict[str, Any]]] = [
        ("all pairs", "accuracy", {"color": "0.5", "marker": "o"}),
        ("resolved pairs", "on_resolved", {"color": "C0", "marker": "D"}),
    ]
    with page(6.6, 4.6) as figure:
        panel = figure.subplots()
        for text, field, look in kinds:
            values = np.array([getattr(one, field) for _, _, one in small])
            reach = np.abs(values[:, 1:].T - values[:, 0])
            panel.errorbar(
                [cost for _, cost, _ in small], values[:, 0], reach, linestyle="none", capsize=3, label=text, **look
            )
        for name, cost, one in small:
            panel.annotate(name, (cost, one.on_resolved[0]), xytext=(4, 4), textcoords="offset points", size=7)
        panel.axhline(0.5, color="0.6", linestyle="--", linewidth=1)
        panel.margins(x=0.1)
        panel.set(
            xscale="log", xlabel="parameters, as a share of the largest size forecast", ylabel="pairs told rightly"
        )
        legend_below(figure, panel.get_legend_handles_labels()[0])
    return Drawing(
        figure, "Names: width x depth. Bars: 95% bootstrap intervals over recipes and seeds. Dashed: a guess."
    )


def turning_pairs(turned: Sequence[Reversal], observations: Observations) -> Drawing:
    """A panel a pair that turns around: the difference of both recipes over sizes, seed by seed."""
    shown = sorted(turned, key=lambda one: one.p)[:MOST_PAIRS]
    if not shown:
        return Drawing(None, "No pair of recipes turns around.")
    columns = min(3, len(shown))
    with page(3.4 * columns + 0.6, 2.6 * -(-len(shown) // columns) + 0.8) as figure:
        panels = panels_in_grid(figure, len(shown), columns, "parameters", "difference")
        for panel, one in zip(panels, shown, strict=True):
            table = observations.tables[one.target]
            wide = table.pivot_table(index=["width", "depth", "seed"], columns="recipe", values="value")
            apart = (wide[one.one] - wide[one.other]).dropna().groupby(["width", "depth"]).agg(["mean", "sem"])
            sizes = apart.reset_index()
            panel.axhline(0, color="0.6", linestyle="--", linewidth=1)
            x = 10 ** log_parameters(sizes)
            panel.errorbar(x, sizes["mean"], 2 * sizes["sem"], fmt="o", color="C0", markersize=4, capsize=2)
            panel.set_title(f"{one.target}: {label(one.one)} - {label(one.other)}", fontsize=8)
            panel.set_xscale("log")
    left_out = f" Not shown: {len(turned) - len(shown)} more." if len(turned) > len(shown) else ""
    return Drawing(figure, f"Differences seed by seed, with two standard errors.{left_out}")
