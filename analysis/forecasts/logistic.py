"""Divergence by logistic regression in the logarithms of rate, width and depth."""

from __future__ import annotations

import numpy as np
import pandas as pd

from analysis.forecasts.base import Forecaster, Known
from analysis.forecasts.fitting import logistic, probabilities
from analysis.forecasts.pooled_design import Design

STRENGTH = 10.0  # of the data against the penalty


class Logistic(Forecaster):
    """One model for all recipes, whose own levels and slopes are held near the common ones by an L2 penalty."""

    about = "logistic in log rate, log width, log depth and recipe"
    targets = ("divergent",)

    def forecast(self, target: str, known: Known, wanted: pd.DataFrame) -> np.ndarray:
        table = known.table(target)
        design, values = Design.of(table, has_own_slopes=True), table["value"].to_numpy()
        model = logistic(design(table), values, STRENGTH)
        said = probabilities(model, design(wanted), values)
        return np.where(design.knows(wanted), said, np.nan)[:, None]
