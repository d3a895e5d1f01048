"""A power law with an offset: c + a N^-b."""

from __future__ import annotations

import numpy as np
import pandas as pd

from analysis.forecasts.base import Forecaster, Known, drawn_means, log_parameters, nothing, of_draws, of_unit, units
from analysis.measures.scaling import offset_law

FEWEST = 4  # sizes


class Power(Forecaster):
    """Least squares over the means of sizes (`analysis.measures.scaling.offset_law`), with a bootstrap over seeds.

    The interval says how far other seeds would move the law, and not whether it holds.
    """

    about = "c + a N^-b for each recipe"
    targets = ("sensitivity", "loss")

    def forecast(self, target: str, known: Known, wanted: pd.DataFrame) -> np.ndarray:
        found = nothing(wanted, is_share=False)
        for (recipe, rate), part in units(known.table(target)):
            places = of_unit(wanted, recipe, rate)
            sizes, means, seeds = drawn_means(part)
            if len(sizes) < FEWEST or not len(places):
                continue
            x = 10 ** log_parameters(sizes)
            smallest = x.min()
            c, a, b = offset_law(x / smallest, means)
            at = 10 ** log_parameters(wanted.iloc[places]) / smallest
            found[places] = of_draws(c + a * at[:, None] ** -b, seeds)
        return found
