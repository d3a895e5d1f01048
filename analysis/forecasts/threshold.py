"""Divergence from the early attention logit, which is foretold by a line."""

from __future__ import annotations

import numpy as np
import pandas as pd

from analysis.forecasts.base import MIDDLE, Forecaster, Known, nothing
from analysis.forecasts.fitting import logistic
from analysis.forecasts.plane import Plane
from analysis.measures.forecast_targets import UNIT

WEAK = 1e3  # next to no penalty


class Threshold(Forecaster):
    """Logistic in log10 logit - c, with c and its slope fitted to all runs; the logit of a larger size by `Plane`."""

    about = "logistic in the early attention logit, which a plane foretells"
    targets = ("divergent",)

    def forecast(self, target: str, known: Known, wanted: pd.DataFrame) -> np.ndarray:
        found = nothing(wanted, is_share=True)
        tables = known.observations.tables
        if "early_logit" not in tables:
            return found
        both = tables["divergent"].merge(tables["early_logit"], on=[*UNIT, "seed"], suffixes=("", "_logit"))
        model = logistic(both[["value_logit"]].to_numpy(), both["value"].to_numpy(), WEAK) if len(both) else None
        logits = Plane().forecast("early_logit", known, wanted)[:, MIDDLE]
        is_known = np.isfinite(logits)
        if model is not None and is_known.any():
            found[is_known, 0] = model.predict_proba(logits[is_known, None])[:, 1]
        return found
