"""What a forecaster is: from observations of small models it says what larger ones will do, and how sure it is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import numpy as np
import pandas as pd
from scipy.stats import norm, t

from analysis.measures.forecast_targets import Observations, parameters
from analysis.measures.statistics import RESAMPLES, draws
from harness.basics import plugins

LEVELS = (0.025, 0.1, 0.25, 0.5, 0.75, 0.9, 0.975)
"""Of the quantiles that a forecast consists of: the median, and the ends of intervals of 50, 80 and 95%."""
MIDDLE = LEVELS.index(0.5)
Size = tuple[float, float]  # width, depth


@dataclass(frozen=True)
class Known:
    """What a forecaster may know: observations, and the sizes that are held back to choose constants by."""

    observations: Observations
    tune: tuple[Size, ...] = ()

    def table(self, target: str) -> pd.DataFrame:
        """All observations of a target."""
        return self.observations.tables[target]


class Forecaster(ABC):
    """Says for each unit of a target, a cell or a cell at a rate, where the mean over many seeds will be."""

    about: ClassVar[str]
    targets: ClassVar[tuple[str, ...]]

    @abstractmethod
    def forecast(self, target: str, known: Known, wanted: pd.DataFrame) -> np.ndarray:
        """Forecast one of `targets`.

        Args:
            target: A name in `analysis.measures.forecast_targets.TARGETS`.
            known: What was observed of other sizes.
            wanted: A row for each unit, with recipe, width, depth and lr.

        Returns:
            Quantiles at `LEVELS` [units, 7]; of a share the probability [units, 1]. NaN for what it cannot tell.
        """


class Rule(ABC):
    """Says of each run what will become of it, from what was seen at its beginning: its own numbers are sealed."""

    about: ClassVar[str]
    targets: ClassVar[tuple[str, ...]]

    @abstractmethod
    def learned(self, known: Known) -> dict[str, Any] | None:
        """The numbers of the rule, as JSON holds them; None where it cannot be learned."""

    @abstractmethod
    def says(self, rule: Mapping[str, Any], features: pd.DataFrame) -> np.ndarray:
        """The probability of each run, [runs]; NaN for what it cannot tell."""


@cache
def forecasters() -> dict[str, Forecaster]:
    """By name."""
    return {name: cls() for name, cls in plugins.subclasses("forecasters", Forecaster).items()}  # type: ignore[type-abstract]


@cache
def rules() -> dict[str, Rule]:
    """By name."""
    return {name: cls() for name, cls in plugins.subclasses("forecasters", Rule).items()}  # type: ignore[type-abstract]


def units(table: pd.DataFrame) -> Iterator[tuple[tuple[str, float], pd.DataFrame]]:
    """The observations of each recipe, at each rate where there are some."""
    yield from table.groupby(["recipe", "lr"], dropna=False)


def of_unit(wanted: pd.DataFrame, recipe: str, rate: float) -> np.ndarray:
    """The places in `wanted` of a recipe at a rate, which may be NaN."""
    is_rate = wanted["lr"].isna() if np.isnan(rate) else np.isclose(wanted["lr"], rate, rtol=1e-9)
    return np.flatnonzero((wanted["recipe"] == recipe) & is_rate)


def size_means(part: pd.DataFrame) -> pd.DataFrame:
    """Mean over seeds at each width and depth, `value`, and its standard `error`."""
    means = part.groupby(["width", "depth"])["value"].agg(value="mean", deviation="std", n="size").reset_index()
    return means.assign(error=(means["deviation"] / np.sqrt(means["n"])).fillna(0.0))


def drawn_means(part: pd.DataFrame) -> tuple[pd.DataFrame, np.ndarray, int]:
    """Means over bootstrap samples of the seeds at each width and depth with two seeds or more.

    Sizes that have the same seeds are drawn together, others by themselves.

    Returns:
        The sizes, their means [sizes, draws], and the fewest seeds that one of them has.
    """
    values = part.pivot_table(index=["width", "depth"], columns="seed", values="value")
    values = values[values.notna().sum(axis=1) >= 2]
    groups: dict[bytes, list[int]] = {}
    for place, is_known in enumerate(values.notna().to_numpy()):
        groups.setdefault(is_known.tobytes(), []).append(place)
    own = [values.iloc[places].dropna(axis=1).to_numpy() for places in groups.values()]
    seeds = tuple(one.shape[1] for one in own)
    means = np.empty((len(values), RESAMPLES))
    for places, one, which in zip(groups.values(), own, draws(seeds), strict=True):
        means[places] = one[:, which].mean(axis=2)
    return values.index.to_frame(index=False), means, min(seeds, default=0)


def log_parameters(table: pd.DataFrame) -> np.ndarray:
    """log10 of the parameters of each row."""
    return np.asarray(np.log10(parameters(table["width"].to_numpy(float), table["depth"].to_numpy(float))))


def student(mean: np.ndarray, scale: np.ndarray | float, freedom: float) -> np.ndarray:
    """Quantiles at `LEVELS` of Student's t, [units, 7]."""
    mean, scale = np.broadcast_arrays(np.asarray(mean, float), np.asarray(scale, float))
    z = norm.ppf(LEVELS) if np.isinf(freedom) else t.ppf(LEVELS, freedom)
    return np.asarray(mean[:, None] + scale[:, None] * z)


def of_draws(drawn: np.ndarray, seeds: int) -> np.ndarray:
    """Quantiles at `LEVELS` [units, 7] of what bootstrap samples of so many seeds gave, [units, draws].

    A bootstrap of n values is too narrow by sqrt((n - 1) / n), and takes the normal distribution for Student's t: both
    are made good.
    """
    quantiles = np.quantile(drawn, LEVELS, axis=1).T
    middle = quantiles[:, MIDDLE : MIDDLE + 1]
    wider = np.ones(len(LEVELS))
    ends = np.array([level != 0.5 for level in LEVELS])
    levels = np.array(LEVELS)[ends]
    wider[ends] = np.sqrt(seeds / (seeds - 1)) * t.ppf(levels, seeds - 1) / norm.ppf(levels)
    return np.asarray(middle + wider * (quantiles - middle))


def nothing(wanted: pd.DataFrame, is_share: bool) -> np.ndarray:
    """The forecast of somebody who knows nothing."""
    return np.full((len(wanted), 1 if is_share else len(LEVELS)), np.nan)
