"""When a fault struck, and how figures mark it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from analysis.reading.levels import numbers

STRIKE = "#e0a030"


def strikes(trial: pd.Series, events: pd.DataFrame | None) -> list[tuple[int, int]]:
    """(first, last) step of each stretch of strikes in a row; empty if events are given and the fault never fired.

    The store keeps only the first events of a fault that strikes often (`trial["strikes"]` counts them all); the rest
    is marked where the config has it, as far as the trial got.
    """
    # A sweep in which no trial has a value of a field has no such coordinate.
    named = trial["fault_start"], trial.get("fault_duration", np.nan), trial.get("fault_period", 1)
    start, duration, period = numbers([*named])
    end = np.nanmin([trial["steps"], trial["nonfinite_step"] + 1, start + duration])  # permanent without a duration
    planned = np.arange(start, end, 1 if np.isnan(period) else period, dtype=int)
    if events is None:
        steps = planned
    else:
        kept = events[events["trial"] == trial["trial"]]
        steps = np.unique(kept["step"].dropna().astype(int))
        if 0 < len(kept) < trial["strikes"]:
            steps = np.union1d(steps, planned[planned > steps[-1]])
    groups = np.split(steps, np.flatnonzero(np.diff(steps) > 1) + 1) if len(steps) else []
    return [(int(group[0]), int(group[-1])) for group in groups]


def mark_strikes(panel: Axes, spans: Sequence[tuple[int, int]], colour: str = STRIKE) -> None:
    """A band over each stretch of `strikes`, with a line at its first step."""
    for first, last in spans:
        panel.axvspan(first, last, color=colour, alpha=0.35, linewidth=0)
        panel.axvline(first, color=colour, linewidth=1.4, zorder=1)


def strike_patch(colour: str = STRIKE) -> Patch:
    """The legend's."""
    return Patch(color=colour, alpha=0.6, label="strike")
