"""Ours: all recipes at once, each held near the others, with intervals that a rehearsal on held-back sizes has set."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd
from scipy.optimize import minimize_scalar
from scipy.special import expit, logit
from scipy.stats import norm

from analysis.forecasts.base import LEVELS, Forecaster, Known, Size, nothing, size_means
from analysis.forecasts.fitting import bayesian_ridge, logistic, probabilities
from analysis.forecasts.pooled_design import Design
from analysis.measures.forecast_targets import TARGETS, Observations

STRENGTHS = (0.1, 1.0, 10.0, 100.0)  # of the data against the penalty, one of which the rehearsal chooses
WIDEST = 10.0  # by how much the rehearsal may widen intervals, or narrow them
FEW_UNITS = 10.0  # in a rehearsal, beside which intervals are half as the fit has them
SURE = 1e-4  # probabilities are this far from 0 and 1
FEWEST = 2  # sizes


class Hierarchical(Forecaster):
    """Bayesian ridge regression over the means of sizes, of a share logistic regression over runs.

    Both are linear in log width and log depth, with a level and slopes of each recipe's own that are held near zero; a
    number for each rate is fitted at each rate by itself. A rehearsal forecasts the sizes that are held back from sizes
    that are as much narrower as the wanted ones are wider than all that was trained. It chooses whether recipes have
    slopes of their own, how strong the penalty is, and by what factor intervals are wider, or odds nearer to even.
    Depth is not rehearsed. Then all sizes are fitted. It costs two fits for each choice, seconds in all.
    """

    about = "ridge or logistic regression over all recipes, rehearsed on held-back sizes"
    targets = tuple(TARGETS)

    def forecast(self, target: str, known: Known, wanted: pd.DataFrame) -> np.ndarray:
        table = known.table(target)
        tried = _rehearsal(target, known, wanted)
        if TARGETS[target].is_share:
            return _shares(table, wanted, tried)
        found = nothing(wanted, is_share=False)
        has_own, factor = _chosen(tried) if tried else (True, 1.0)
        for places, mean, deviation in _means(table, wanted, has_own):
            found[places] = mean[:, None] + factor * deviation[:, None] * norm.ppf(LEVELS)
        return found


def _rehearsal(target: str, known: Known, wanted: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame] | None:
    """Observations of smaller sizes, and those of the sizes held back; None where too few are left."""
    sizes = known.observations.sizes
    tune = [size for size in known.tune if size in sizes]
    if not tune:
        return None
    widest = max(width for width, _ in sizes)
    ratio = max(1.0, wanted["width"].max() / widest)
    rest = [size for size in sizes if size not in tune and size[0] <= max(width for width, _ in tune) / ratio]
    if len(rest) < FEWEST:
        rest = [size for size in sizes if size not in tune]
    if len(rest) < FEWEST:
        return None
    return _of(known.observations, rest, target), _of(known.observations, tune, target)


def _of(observations: Observations, sizes: list[Size], target: str) -> pd.DataFrame:
    return observations.at(sizes).tables[target]


def _means(
    table: pd.DataFrame, wanted: pd.DataFrame, has_own: bool
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """At each rate: the places in `wanted`, and mean and standard deviation of another size there."""
    for rate, part in table.groupby("lr", dropna=False):
        means = pd.concat([size_means(own).assign(recipe=recipe) for recipe, own in part.groupby("recipe")]).assign(
            lr=rate
        )
        design = Design.of(means, has_own)
        is_rate = wanted["lr"].isna() if np.isnan(rate) else np.isclose(wanted["lr"], rate, rtol=1e-9)
        places = np.flatnonzero(is_rate & design.knows(wanted))
        if len(places) and len(means) > FEWEST:
            yield places, *bayesian_ridge(design(means), means["value"].to_numpy(), design(wanted.iloc[places]))


def _chosen(tried: tuple[pd.DataFrame, pd.DataFrame]) -> tuple[bool, float]:
    """Whether recipes have slopes of their own, and by what factor deviations are widened."""
    rest, held_back = tried
    keys = ["recipe", "width", "depth", "lr"]
    truth = held_back.groupby(keys, dropna=False)["value"].agg(value="mean", error="sem").reset_index()
    best = (np.inf, True, 1.0)
    for has_own in (False, True):
        missed, allowed, number = 0.0, 0.0, 0
        for places, mean, deviation in _means(rest, truth, has_own):
            off = truth["value"].to_numpy()[places] - mean
            missed += float((off**2 - truth["error"].fillna(0.0).to_numpy()[places] ** 2).sum())
            allowed += float((deviation**2).sum())
            number += len(places)
        if allowed:
            few = FEW_UNITS * allowed / number
            factor = np.sqrt((max(missed, 0.0) + few) / (allowed + few))
            best = min(best, (missed, has_own, float(np.clip(factor, 1 / WIDEST, WIDEST))))
    return best[1:]


def _shares(table: pd.DataFrame, wanted: pd.DataFrame, tried: tuple[pd.DataFrame, pd.DataFrame] | None) -> np.ndarray:
    """The probability of each unit, [units, 1]."""
    has_own, strength, factor = True, 1.0, 1.0
    if tried is not None:
        rest, held_back = tried
        truth = held_back["value"].to_numpy()
        best = (np.inf, has_own, strength, factor)
        for own in (False, True):
            for each in STRENGTHS:
                odds = logit(np.clip(_probability(rest, held_back, own, each), SURE, 1 - SURE))
                factor, score = _temperature(odds, truth)
                best = min(best, (score, own, each, factor))
        _, has_own, strength, factor = best
    said = np.clip(_probability(table, wanted, has_own, strength), SURE, 1 - SURE)
    is_known = wanted["recipe"].isin(table["recipe"]).to_numpy()
    return np.where(is_known, expit(factor * logit(said)), np.nan)[:, None]


def _probability(table: pd.DataFrame, wanted: pd.DataFrame, has_own: bool, strength: float) -> np.ndarray:
    design, values = Design.of(table, has_own), table["value"].to_numpy()
    return probabilities(logistic(design(table), values, strength), design(wanted), values)


def _temperature(odds: np.ndarray, truth: np.ndarray) -> tuple[float, float]:
    """By what factor of at most 1 log odds score best on what was held back, and that score: mean log loss.

    Guo et al. 2017 (arXiv 1706.04599), but never to be surer than the fit.
    """

    def loss(log_factor: float) -> float:
        p = np.clip(expit(np.exp(log_factor) * odds), SURE, 1 - SURE)
        return float(-(truth * np.log(p) + (1 - truth) * np.log(1 - p)).mean())

    found = minimize_scalar(loss, bounds=(-np.log(WIDEST), 0.0), method="bounded")
    return float(np.exp(found.x)), float(found.fun)
