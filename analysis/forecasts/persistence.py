"""Nothing changes: the largest model that was trained, of those that are no wider and no deeper."""

from __future__ import annotations

import numpy as np
import pandas as pd

from analysis.forecasts.base import Forecaster, Known, log_parameters, nothing, of_unit, student, units
from analysis.measures.forecast_targets import TARGETS


class Persistence(Forecaster):
    """The mean over seeds of that size, with a t interval; of a share (k + 1/2) / (n + 1), which is never 0 or 1."""

    about = "the largest trained size that is no wider and no deeper"
    targets = tuple(TARGETS)

    def forecast(self, target: str, known: Known, wanted: pd.DataFrame) -> np.ndarray:
        is_share = TARGETS[target].is_share
        found = nothing(wanted, is_share)
        for (recipe, rate), part in units(known.table(target)):
            for place in of_unit(wanted, recipe, rate):
                row = wanted.iloc[place]
                inside = part[(part["width"] <= row["width"]) & (part["depth"] <= row["depth"])]
                sizes = log_parameters(inside)
                values = inside["value"].to_numpy()[sizes == sizes.max()] if len(sizes) else np.array([])
                if is_share and len(values):
                    found[place] = (values.sum() + 0.5) / (len(values) + 1)
                elif len(values) > 1:
                    scale = values.std(ddof=1) / len(values) ** 0.5
                    found[place] = student(values.mean(keepdims=True), scale, len(values) - 1)[0]
        return found
