"""Attention logits by quadratics over sizes, and divergence where they pass a bound (Wortsman et al. 2023)."""

from __future__ import annotations

import numpy as np
import pandas as pd

from analysis.forecasts.base import Forecaster, Known, drawn_means, log_parameters, nothing, of_draws, of_unit, units
from analysis.measures.forecast_targets import CELL

BOUND = 4.0  # log10 of the logit from which on a run is said to diverge
FEWEST = 4  # sizes


class Wortsman(Forecaster):
    """For each recipe and rate one quadratic of the logit in log N; arXiv 2309.14322, section 3.4 and figure 9.

    As published it foretells one size and has no interval. Here a bootstrap over seeds gives one, the probability to
    diverge is the share of samples that pass the bound, and the edge is the middle, on a log scale, between the largest
    rate that stays below it and the next.
    """

    about = "a quadratic of the early attention logit in log N for each rate; diverges above 1e4"
    targets = ("early_logit", "divergent", "edge")

    def forecast(self, target: str, known: Known, wanted: pd.DataFrame) -> np.ndarray:
        found = nothing(wanted, target == "divergent")
        if "early_logit" not in known.observations.tables:
            return found
        table = known.table("early_logit")
        if target == "edge":
            return self._edges(table, wanted, found)
        for (recipe, rate), part in units(table):
            places = of_unit(wanted, recipe, rate)
            said = self._drawn(part, wanted.iloc[places])
            if said is None:
                continue
            drawn, seeds = said
            if target == "divergent":
                found[places, 0] = (drawn > BOUND).mean(axis=1)
            else:
                found[places] = of_draws(drawn, seeds)
        return found

    def _drawn(self, part: pd.DataFrame, wanted: pd.DataFrame) -> tuple[np.ndarray, int] | None:
        """What quadratics through bootstrap samples of the seeds say, [units, draws], and of how many seeds."""
        sizes, means, seeds = drawn_means(part)
        if len(sizes) < FEWEST or not len(wanted):
            return None
        x = log_parameters(sizes)
        middle = x.mean()
        coefficients = np.polyfit(x - middle, means, 2)
        at = log_parameters(wanted) - middle
        return np.asarray(np.vander(at, 3) @ coefficients), seeds

    def _edges(self, table: pd.DataFrame, wanted: pd.DataFrame, found: np.ndarray) -> np.ndarray:
        for recipe, part in table.groupby("recipe"):
            places = np.flatnonzero(wanted["recipe"] == recipe)
            cells = wanted.iloc[places][CELL]
            said = {float(rate): self._drawn(own, cells) for rate, own in part.groupby("lr")}
            by_rate = {rate: one for rate, one in sorted(said.items()) if one is not None}
            if len(by_rate) < 2 or not len(places):
                continue
            is_below = np.stack([drawn <= BOUND for drawn, _ in by_rate.values()])  # [rates, units, draws]
            x = np.log10(list(by_rate))
            half = np.diff(x) / 2
            middles = np.concatenate([[x[0] - half[0]], x[:-1] + half, [x[-1] + half[-1]]])
            edges = middles[np.cumprod(is_below, axis=0).sum(axis=0)]
            found[places] = of_draws(edges, min(seeds for _, seeds in by_rate.values()))
        return found
