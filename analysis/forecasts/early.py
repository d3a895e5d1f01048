"""Divergence from the first tenth of the run itself, which has to be trained for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import pandas as pd
from scipy.special import expit

from analysis.forecasts.base import Known, Rule
from analysis.forecasts.fitting import logistic
from analysis.measures.forecast_targets import UNIT

STRENGTH = 10.0


class Early(Rule):
    """Logistic in log rate, in signals of the first step and in those a tenth of the run later, over all recipes.

    It costs a tenth of every run that is forecast.
    """

    about = "logistic in signals of the run's first tenth, which has to be trained"
    targets = ("divergent",)
    prefixes: ClassVar[Sequence[str]] = ("initial_", "early_")

    def learned(self, known: Known) -> dict[str, Any] | None:
        features = known.observations.features
        if features.empty:
            return None
        table = features.merge(known.table("divergent"), on=[*UNIT, "seed"])
        names = [name for name in features if str(name).startswith(tuple(self.prefixes))]
        x = self._design(table, names)
        middle, spread = np.nanmean(x, axis=0), np.nanstd(x, axis=0)
        scaled = _filled(x, middle, spread)
        model = logistic(scaled, table["value"].to_numpy(), STRENGTH)
        if model is None:
            return None
        return {
            "signals": names,
            "middle": middle.tolist(),
            "spread": spread.tolist(),
            "weights": model.coef_[0].tolist(),
            "intercept": float(model.intercept_[0]),
        }

    def says(self, rule: Mapping[str, Any], features: pd.DataFrame) -> np.ndarray:
        if any(name not in features for name in rule["signals"]):
            return np.full(len(features), np.nan)
        x = _filled(self._design(features, rule["signals"]), np.array(rule["middle"]), np.array(rule["spread"]))
        return np.asarray(expit(x @ np.array(rule["weights"]) + rule["intercept"]))

    def _design(self, table: pd.DataFrame, names: Sequence[str]) -> np.ndarray:
        """log10 of the rate and of the signals, [runs, k], and whether each signal was not finite."""
        signals = table[list(names)].to_numpy(float)
        return np.column_stack([np.log10(table["lr"]), signals, np.isnan(signals).astype(float)])


def _filled(x: np.ndarray, middle: np.ndarray, spread: np.ndarray) -> np.ndarray:
    """Standardised; the middle for what was not finite."""
    scaled = (np.where(np.isnan(x), middle, x) - middle) / np.where(spread > 0, spread, 1.0)
    return np.asarray(np.nan_to_num(scaled))
