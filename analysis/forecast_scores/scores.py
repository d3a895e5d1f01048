"""How right sealed forecasts were: scores, coverage and skill, with intervals over recipes and seeds.

Quantiles get the interval score (Gneiting and Raftery 2007, doi 10.1198/016214506000001437, equation 43), averaged over
the central intervals of 50, 80 and 95%, each in its weight, with the median's error (weighted interval score, Bracher
et al. 2021, doi 10.1371/journal.pcbi.1008618). Probabilities get the Brier score and the log score.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import norm

from analysis.forecast_scores.sealing import Sealed, units_of
from analysis.forecasts.base import LEVELS, MIDDLE, Size, rules, student
from analysis.measures.forecast_targets import TARGETS, UNIT, Observations
from analysis.measures.statistics import wilson_interval

REFERENCES = ("persistence", "wortsman")  # over which skill is told
FLOOR = "floor"
COVERED = {0.5: (2, 4), 0.8: (1, 5), 0.95: (0, 6)}  # places of the ends among `LEVELS`
SAFE = (0.005, 0.995)  # to which a probability is clipped for the log score
DRAWS = 400
FEWEST = 2  # seeds with a value


@dataclass(frozen=True)
class Truth:
    """What a target was: `values` [units, seeds], NaN where a seed has none; and the places of its units in a seal."""

    target: str
    places: np.ndarray
    units: pd.DataFrame
    values: np.ndarray

    @property
    def is_share(self) -> bool:
        """Whether each run has it as 0 or 1."""
        return TARGETS[self.target].is_share

    @cached_property
    def means(self) -> np.ndarray:
        """Over seeds, [units]."""
        return np.asarray(np.nanmean(self.values, axis=1))


def _errors(values: np.ndarray) -> np.ndarray:
    """Standard errors of means over seeds, [units], of values [units, seeds]; NaN for a single one."""
    n = np.isfinite(values).sum(axis=1)
    found = np.full(len(values), np.nan)
    found[n > 1] = np.nanstd(values[n > 1], axis=1, ddof=1) / np.sqrt(n[n > 1])
    return found


def truths(sealed: Sealed, observations: Observations, sizes: Sequence[Size] | None = None) -> dict[str, Truth]:
    """What was observed of the units of a seal, by target; of these sizes alone. Units without values are left out.

    A target that is the same in all units tells nothing, and is left out.
    """
    found = {}
    for target, table in observations.tables.items():
        places = units_of(sealed.units, target)
        units = sealed.units.iloc[places].assign(place=places, key=_keys(sealed.units.iloc[places]))
        if sizes is not None:
            wanted = set(sizes)
            units = units[[pair in wanted for pair in zip(units["width"], units["depth"], strict=True)]]
        wide = table.assign(key=_keys(table)).pivot_table(index="key", columns="seed", values="value")
        units = units[units["key"].isin(wide.index)]
        values = wide.loc[units["key"]].to_numpy(float)
        is_known = np.isfinite(values).sum(axis=1) >= FEWEST
        units, values = units[is_known], values[is_known]
        if len(units) > 1 and np.nanmax(values) > np.nanmin(values):
            found[target] = Truth(target, units["place"].to_numpy(), units[UNIT].reset_index(drop=True), values)
    return found


def _keys(table: pd.DataFrame) -> list[tuple[str, float, float, str]]:
    """One for each unit, in which rates are as they are printed."""
    columns = zip(table["recipe"], table["width"], table["depth"], table["lr"], strict=True)
    return [(recipe, float(width), float(depth), f"{rate:.6g}") for recipe, width, depth, rate in columns]


def said_of(sealed: Sealed, truth: Truth, features: pd.DataFrame) -> dict[str, np.ndarray]:
    """What each forecaster has said of these units, [units, levels] or [units, 1], with rules applied to `features`."""
    found: dict[str, np.ndarray] = {}
    for name in sealed.names:
        if (quantiles := sealed.quantiles(name, truth.target)) is not None:
            found[name] = quantiles[truth.places]
    for name, rule in sealed.tree["rules"].items():
        if name in rules() and truth.target in rules()[name].targets and len(features):
            found[name] = _by_rule(name, rule, truth, features)
    found[FLOOR] = _floor(truth)
    return found


def _by_rule(name: str, rule: Mapping[str, Any], truth: Truth, features: pd.DataFrame) -> np.ndarray:
    """The mean over the runs of each unit."""
    said = pd.Series(rules()[name].says(rule, features)).groupby(pd.Series(_keys(features))).mean()
    return np.array([[said.get(key, np.nan)] for key in _keys(truth.units)])


def _floor(truth: Truth) -> np.ndarray:
    """What half of the test seeds say of the other half. It is scored against that half (`_scored_values`)."""
    half, _ = _halves(truth)
    n = np.isfinite(half).sum(axis=1)
    mean = np.nanmean(np.where(n[:, None] > 0, half, 0.0), axis=1)
    if truth.is_share:
        return np.asarray((np.nansum(half, axis=1) + 0.5) / (n + 1))[:, None]
    scale = np.full(len(half), np.nan)
    scale[n > 1] = np.nanstd(half[n > 1], axis=1, ddof=1) / np.sqrt(n[n > 1])
    return student(mean, scale, max(1, int(n.min()) - 1))


def _halves(truth: Truth) -> tuple[np.ndarray, np.ndarray]:
    """Every other seed, and the others."""
    return truth.values[:, ::2], truth.values[:, 1::2]


@dataclass(frozen=True)
class Scored:
    """One forecaster and one target: `score` is the weighted interval score or the Brier score, lower is better."""

    forecaster: str
    target: str
    units: int
    score: float
    log_score: float
    coverage: Mapping[float, tuple[float, float, float]]  # by nominal one: share, low, high (Wilson)
    skill: Mapping[str, tuple[float, float, float]]  # over a reference: 1 - score / its score, low, high


def scored(sealed: Sealed, truth: Truth, features: pd.DataFrame) -> list[Scored]:
    """Of each forecaster that has said something of these units, the floor last."""
    said = said_of(sealed, truth, features)
    weights, seeds = _drawn(truth)
    tables = {name: _score_table(truth, name, forecast, seeds) for name, forecast in said.items()}
    found = []
    for name, forecast in said.items():
        is_known = np.isfinite(forecast).all(axis=1) & np.isfinite(tables[name][:, 0])
        if not is_known.any():
            continue
        skill = {
            reference: _skill(tables[name], tables[reference], weights)
            for reference in REFERENCES
            if reference in tables and reference != name and np.isfinite(tables[reference]).any()
        }
        found.append(
            Scored(
                name,
                truth.target,
                int(is_known.sum()),
                float(tables[name][is_known, 0].mean()),
                _log_score(truth, forecast, is_known) if truth.is_share else np.nan,
                {} if truth.is_share else _coverage(truth, name, forecast, is_known),
                skill,
            )
        )
    return found


def _drawn(truth: Truth) -> tuple[np.ndarray, np.ndarray]:
    """Bootstrap samples of recipes, as weights of units [draws, units], and of seeds [draws, seeds]; the data first."""
    generator = np.random.default_rng(0)
    recipes, number = np.unique(truth.units["recipe"], return_inverse=True)
    seeds = truth.values.shape[1]
    times = generator.multinomial(len(recipes), np.full(len(recipes), 1 / len(recipes)), DRAWS)
    which = generator.integers(seeds, size=(DRAWS, seeds))
    weights = np.concatenate([np.ones((1, len(number))), times[:, number]])
    return weights, np.concatenate([np.arange(seeds)[None], which])


def _scored_values(truth: Truth, name: str) -> np.ndarray:
    """What a forecaster is held against, [units, seeds]: the floor has seen half of it."""
    if name != FLOOR:
        return truth.values
    values = truth.values.copy()
    values[:, ::2] = np.nan
    return values


def _score_table(truth: Truth, name: str, forecast: np.ndarray, seeds: np.ndarray) -> np.ndarray:
    """The score of each unit in each sample of seeds, [units, 1 + draws]; NaN where nothing is said or known."""
    values = _scored_values(truth, name)
    errors, table = _errors(values), np.full((len(values), len(seeds)), np.nan)
    for draw, which in enumerate(seeds):
        picked = values[:, which]
        n = np.isfinite(picked).sum(axis=1)
        sums = np.nansum(picked, axis=1)
        with np.errstate(invalid="ignore", divide="ignore"):
            y = sums / n
            if truth.is_share:  # mean over runs of (p - outcome)^2
                table[:, draw] = forecast[:, 0] ** 2 - 2 * forecast[:, 0] * y + y
            else:
                table[:, draw] = weighted_interval_score(widened(forecast, errors), y)
    return table


def widened(quantiles: np.ndarray, errors: np.ndarray) -> np.ndarray:
    """Quantiles [units, levels] of a mean over few seeds, from those of a mean over many and its standard error."""
    middle = quantiles[:, MIDDLE : MIDDLE + 1]
    reach = np.hypot(quantiles - middle, np.nan_to_num(errors)[:, None] * norm.ppf(LEVELS))
    return np.asarray(middle + np.sign(np.array(LEVELS) - 0.5) * reach)


def weighted_interval_score(quantiles: np.ndarray, y: np.ndarray) -> np.ndarray:
    """[units], in the units of y: the mean over levels of twice the pinball loss (Bracher et al. 2021, equation 2)."""
    off = y[:, None] - quantiles
    levels = np.array(LEVELS)
    return np.asarray(2 * np.maximum(levels * off, (levels - 1) * off).mean(axis=1))


def _skill(own: np.ndarray, reference: np.ndarray, weights: np.ndarray) -> tuple[float, float, float]:
    """1 - mean score / mean score of the reference, over units of which both have said something; with its interval."""
    both = np.isfinite(own) & np.isfinite(reference)
    share = weights.T * both
    with np.errstate(invalid="ignore", divide="ignore"):
        ours = (np.where(both, own, 0) * share).sum(axis=0) / share.sum(axis=0)
        theirs = (np.where(both, reference, 0) * share).sum(axis=0) / share.sum(axis=0)
        skill = 1 - ours / theirs
    drawn = skill[1:][np.isfinite(skill[1:])]
    if not len(drawn) or not np.isfinite(skill[0]):
        return np.nan, np.nan, np.nan
    low, high = np.quantile(drawn, [0.025, 0.975])
    return float(skill[0]), float(low), float(high)


def _log_score(truth: Truth, forecast: np.ndarray, is_known: np.ndarray) -> float:
    """Mean of -log p of what happened, over runs."""
    p = np.clip(forecast[is_known, 0], *SAFE)
    y = truth.means[is_known]
    return float(-(y * np.log(p) + (1 - y) * np.log(1 - p)).mean())


def _coverage(
    truth: Truth, name: str, forecast: np.ndarray, is_known: np.ndarray
) -> dict[float, tuple[float, float, float]]:
    """How often the central intervals hold the mean over test seeds, each with Wilson's interval over units."""
    values = _scored_values(truth, name)[is_known]
    n = np.isfinite(values).sum(axis=1)
    y = np.nansum(values, axis=1) / np.maximum(n, 1)
    ends = widened(forecast[is_known], _errors(values))
    found = {}
    for nominal, (low, high) in COVERED.items():
        inside = (ends[:, low] <= y + 1e-12) & (y <= ends[:, high] + 1e-12)
        ends_of_share = wilson_interval(inside.sum(), len(inside))
        found[nominal] = float(inside.mean()), float(ends_of_share[0]), float(ends_of_share[1])
    return found
