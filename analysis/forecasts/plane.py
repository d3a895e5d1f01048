"""A plane in the logarithms of width and depth."""

from __future__ import annotations

import numpy as np
import pandas as pd

from analysis.forecasts.line import Line


class Plane(Line):
    """As `Line`, with a slope for width and one for depth."""

    about = "least squares on log width and log depth"

    def _design(self, table: pd.DataFrame) -> np.ndarray:
        return np.asarray(np.log10(table[["width", "depth"]].to_numpy(float)))
