"""The quality of what policies sample, over the steps."""

from __future__ import annotations

import math
import warnings

import numpy as np
import xarray as xr

from analysis.figures.drawing import Drawing, looks, page
from analysis.figures.legends import LINE, legend_below
from analysis.figures.registry import Needs, Results, drawn_from
from analysis.figures.series import MOST_SERIES
from analysis.measures.quality import QUALITY, by_varied, final_quality
from analysis.measures.statistics import mean_interval
from harness.basics.printing import count

POINTS = 200  # of a line


@drawn_from(Needs.POLICIES, place=1, points="y=final_loss")
def quality_over_steps(results: Results) -> Drawing:
    """Mean quality over steps, a line for whatever the sweep varied, with 95% intervals over seeds.

    A point is the mean over a stretch of steps, so that there are at most `POINTS` of them. A line ends where one of
    its trials does.
    """
    groups = {words: trials for words, _, trials in by_varied(results.sweep)}
    if not groups:
        return Drawing(None, "No figure: no trial is a policy (objective.name=policy).")
    ended = final_quality(results.sweep).set_index("under")["quality"]
    best = ended.sort_values(ascending=False, kind="stable", na_position="last").index[:MOST_SERIES]
    shown = [words for words in groups if words in best]
    with page(6.8, 4.4 + LINE * math.ceil(len(shown) / 2), "Quality of the completions") as figure:
        panel = figure.subplots()
        for words, look in looks(shown).items():
            steps, mean, low, high = curve(groups[words])
            panel.plot(steps, mean, color=look["color"], linewidth=1.8, label=words)
            panel.fill_between(steps, low, high, color=look["color"], alpha=0.2, linewidth=0)
        panel.set(xlabel="step", ylabel="mean quality")
        legend_below(figure, panel.get_legend_handles_labels()[0])
    left_out = len(groups) - len(shown)
    most = max(groups[words].sizes["trial"] for words in shown)
    bands = "bands are 95% intervals over seeds (Student's t)" if most > 1 else "one seed, so no intervals"
    caption = f"Mean quality of what the policy samples, before sharpness, penalty and faults; {bands}."
    caption += f" Not shown: {count(left_out, 'combination')} with a lower quality at the end." if left_out else ""
    return Drawing(figure, caption)


def curve(trials: xr.Dataset) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Steps, means over trials and their 95% intervals: up to `POINTS` of each; NaN where a trial has no value."""
    values = trials[QUALITY].transpose("trial", "step").values.astype(float)
    size = max(1, math.ceil(values.shape[1] / POINTS))
    begins = np.arange(0, values.shape[1], size)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of stretches without a value
        parts = np.array([np.nanmean(values[:, begin : begin + size], axis=1) for begin in begins])
    middles = begins + (np.minimum(begins + size, values.shape[1]) - 1 - begins) / 2
    low, high = np.array([mean_interval(part[:, None]) for part in parts]).T
    return middles, parts.mean(axis=1), low, high
