"""A metric against the size of the model, with the law that was fitted, dashed where nothing was measured."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from analysis.figures.drawing import Drawing, looks, page
from analysis.figures.legends import legend_below
from analysis.figures.series import MOST_SERIES
from analysis.measures.paired import Estimate
from analysis.measures.scaling import Scaling, arm_words, curve
from analysis.measures.statistics import mean_interval


def scaling_curves(found: Sequence[Scaling], largest: float) -> Drawing:
    """Means over seeds with t intervals, and each arm's law with its interval up to the size `largest`."""
    shown, first = list(found)[:MOST_SERIES], found[0]
    names = [arm_words(one.arm) for one in shown]
    with page(7.0, 5.0) as figure:
        panel = figure.subplots()
        for one, (name, look) in zip(shown, looks(names).items(), strict=True):
            means = [_mean(one, values) for values in one.values]
            value, low, high = (np.array([getattr(mean, end) for mean in means]) for end in ("value", "low", "high"))
            reach = np.nan_to_num(np.abs(np.array([low, high]) - value))
            points = {key: kind for key, kind in look.items() if key != "linestyle"}
            panel.errorbar(one.sizes, value, reach, **points, linestyle="none", capsize=3, label=f"mitigation: {name}")
            sizes, laws = zip(*curve(one, largest), strict=True)
            x, y = np.array(sizes), np.array([law.value for law in laws])
            is_measured = x <= one.sizes[-1] * (1 + 1e-9)
            panel.plot(x[is_measured], y[is_measured], color=look["color"], linewidth=1.4)
            beyond = ~is_measured
            beyond[int(is_measured.sum()) - 1] = True  # from the last point on
            panel.plot(x[beyond], y[beyond], color=look["color"], linewidth=1.4, linestyle="--")
            panel.fill_between(
                x, [law.low for law in laws], [law.high for law in laws], color=look["color"], alpha=0.15
            )
        panel.set(xscale="log", xlabel=first.against, title=f"{first.metric} against {first.against}")
        panel.set_ylabel(f"{first.metric} [{first.kind.units}]" if first.kind.units else first.metric)
        if first.kind.is_log:
            panel.set_yscale("log")
        ticks = sorted({*first.sizes.tolist(), largest})
        panel.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        panel.minorticks_off()
        legend_below(figure, panel.get_legend_handles_labels()[0])
    left_out = f" Not shown: {len(found) - len(shown)} more arms." if len(found) > len(shown) else ""
    dashed = (
        f" Dashed: beyond the largest size that was trained, {first.sizes[-1]:g}." if largest > first.sizes[-1] else ""
    )
    caption = (
        f"Means over {first.values.shape[1]} seeds with 95% t intervals, and the law {first.law} with its bootstrap "
        f"interval over seeds, which does not say whether the law holds.{dashed}{left_out}"
    )
    return Drawing(figure, caption)


def _mean(one: Scaling, values: np.ndarray) -> Estimate:
    known = values[~np.isnan(values)]
    mean = Estimate(float(known.mean()), *mean_interval(known[:, None]))
    return mean.exponential() if one.kind.is_log else mean
