"""Gold and learned reward of policies against how far they are from their start."""

from __future__ import annotations

import math

import numpy as np
from matplotlib.lines import Line2D

from analysis.figures.drawing import Drawing, looks, page
from analysis.figures.legends import LINE, legend_below
from analysis.figures.registry import Needs, Results, drawn_from
from analysis.figures.series import MOST_SERIES
from analysis.measures.overoptimisation import DistanceCurve, distance_curves

LEAST = 0.5  # of R^2, below which a fit is not drawn


@drawn_from(Needs.POLICIES, place=2, points="x=lr&y=final_loss&colour=mitigation")
def gold_against_distance(results: Results) -> Drawing:
    """Gain in gold reward against sqrt(KL), a line an arm; the learned reward dashed, the law of Gao et al. dotted."""
    curves = distance_curves(results.sweep)
    if not curves:
        return Drawing(None, "No figure: no finished policy without a fault has read its rewards and its distance.")
    shown = curves[:MOST_SERIES]
    has_proxy = any(curve.proxy is not None for curve in shown)
    laws = [curve for curve in shown if curve.law is not None and curve.law.r_squared >= LEAST]
    with page(7.0, 4.8 + LINE * math.ceil(len(shown) / 2)) as figure:
        panel = figure.subplots()
        for curve, look in zip(shown, looks([curve.name for curve in shown]).values(), strict=True):
            value, low, high = curve.gold.T
            reach = np.nan_to_num(np.abs(np.array([low, high]) - value))
            panel.errorbar(curve.distance, value, reach, **look, capsize=2, markersize=4, label=curve.name)
            if curve.proxy is not None:
                panel.plot(curve.distance, curve.proxy[:, 0], color=look["color"], linestyle="--", linewidth=1.2)
            if curve in laws and curve.law is not None:
                d = np.linspace(0, curve.distance[-1], 200)
                panel.plot(d, curve.law.at(d), color=look["color"], linestyle=":", linewidth=1.4)
        panel.axhline(0, color="0.4", linewidth=0.8, zorder=1)
        panel.set(title="Gold reward against the distance from the start", ylabel="gain in reward over the start")
        panel.set_xlabel("sqrt(KL to the start) of a completion [sqrt(nat)]")
        handles = list(panel.get_legend_handles_labels()[0])
        if has_proxy:
            handles.append(Line2D([], [], color="0.3", linestyle="--", label="learned reward"))
        if laws:
            handles.append(Line2D([], [], color="0.3", linestyle=":", label="fit d (alpha - beta log d)"))
        legend_below(figure, handles)
    return Drawing(figure, _caption(shown, laws, len(curves) - len(shown)))


def _caption(shown: list[DistanceCurve], laws: list[DistanceCurve], left_out: int) -> str:
    runs = sorted({curve.runs for curve in shown})
    span = f"{runs[0]}" if len(runs) == 1 else f"{runs[0]} to {runs[-1]}"
    said = [
        f"{curve.name}: alpha {_told(curve.law.alpha)}, beta {_told(curve.law.beta)}, R^2 {curve.law.r_squared:.2f}"
        for curve in laws
        if curve.law is not None
    ]
    fits = f" Fits of the gold reward by run, mean over runs: {'; '.join(said)}." if said else ""
    unfit = len(shown) - len(laws)
    fits += f" {unfit} without a fit, of R^2 below {LEAST:g} or of one run." if unfit else ""
    others = f" Not shown: {left_out} more arms." if left_out else ""
    return (
        f"Means over {span} runs of the rollouts at a distance, with 95% t intervals; places that fewer than half of "
        f"the runs came through are left out.{fits}{others}"
    )


def _told(numbers: tuple[float, float, float]) -> str:
    return "{:.3g} [{:.3g}, {:.3g}]".format(*numbers)
