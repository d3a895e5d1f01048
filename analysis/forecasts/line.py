"""A straight line in the logarithm of the number of parameters."""

from __future__ import annotations

import numpy as np
import pandas as pd

from analysis.forecasts.base import Forecaster, Known, log_parameters, nothing, of_unit, size_means, units
from analysis.forecasts.fitting import foretold
from analysis.measures.forecast_targets import TARGETS

FEWEST = 3  # sizes


class Line(Forecaster):
    """Least squares over the means of sizes, for each recipe and rate by itself; the t interval of one more size."""

    about = "least squares on log N"
    targets = tuple(name for name, target in TARGETS.items() if not target.is_share)

    def forecast(self, target: str, known: Known, wanted: pd.DataFrame) -> np.ndarray:
        found = nothing(wanted, is_share=False)
        for (recipe, rate), part in units(known.table(target)):
            means, places = size_means(part), of_unit(wanted, recipe, rate)
            if len(means) >= FEWEST and len(places):
                there = self._design(means)
                found[places] = foretold(
                    there, means["value"].to_numpy(), means["error"].to_numpy(), self._design(wanted.iloc[places])
                )
        return found

    def _design(self, table: pd.DataFrame) -> np.ndarray:
        """What the target is linear in, [rows, k]."""
        return log_parameters(table)[:, None]
