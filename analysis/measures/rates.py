"""Losses of seeds at learning rates, and LR sensitivity: how far the loss rises above its best over the rates."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import pandas as pd
import xarray as xr

BEST = ("seed", "mean")
"""Whose lowest loss LR sensitivity is above: each seed's own, or that at the rate at which their mean is lowest."""


def segment_losses(ds: xr.Dataset, validation: npt.ArrayLike) -> np.ndarray:
    """Final validation losses by segment of the held-out text, [trial, segment]; infinite where `validation` is.

    A store of an older version has one for all: [trial, 1], `validation` itself.
    """
    whole = np.asarray(validation, dtype=float)
    losses = ds["final_segment_loss"].values.astype(float)
    losses = losses[:, np.isfinite(losses).any(axis=0)]
    return np.where(np.isinf(whole)[:, None], np.inf, losses) if losses.shape[1] else whole[:, None]


@dataclass(frozen=True)
class RateGrid:
    """The losses in nat/token of the seeds that have one at each learning rate."""

    seeds: np.ndarray  # [s], numbers
    rates: np.ndarray  # [r], rising
    final: np.ndarray  # [s, r, segment]; infinite for a run that was lost, NaN for a segment that no trial has
    initial: np.ndarray  # [s, r], before the first step

    @classmethod
    def of(cls, who: npt.ArrayLike, rate: npt.ArrayLike, final: np.ndarray, initial: npt.ArrayLike) -> RateGrid:
        """From trials: whose they are (a number for each set of seeds) and their rates [n], `final` [n, segment].

        Several trials of one seed at one rate count with their mean, and what is NaN throughout does not count.
        """
        seeds, row = np.unique(np.asarray(who), return_inverse=True)
        rates, column = np.unique(np.asarray(rate), return_inverse=True)
        values = np.column_stack([np.asarray(initial, dtype=float), final])
        total = np.zeros((len(seeds), len(rates), values.shape[1]))
        number = np.zeros((len(seeds), len(rates), 1))
        np.add.at(total, (row, column), values)
        np.add.at(number, (row, column), 1)
        with np.errstate(invalid="ignore", divide="ignore"):
            means: np.ndarray = total / number
        is_missing: np.ndarray = np.isnan(means[:, :, 1:]).all(axis=2)
        is_whole = ~is_missing.any(axis=1)
        kept, first = means[is_whole, :, 1:], means[is_whole, :, 0]
        # A run that was lost is so in every segment, also in those that a short text has not.
        return cls(seeds[is_whole], rates, np.where(np.isnan(kept).any(axis=(0, 1)), np.nan, kept), first)

    def at(self, rate: float) -> pd.DataFrame:
        """Final losses at one rate, [seed, segment]; NaN where the rate was not swept."""
        where = np.flatnonzero(self.rates == rate)
        values = self.final[:, where[0]] if len(where) else np.full((len(self.seeds), self.final.shape[2]), np.nan)
        return pd.DataFrame(values, index=self.seeds)

    @property
    def best_rate(self) -> float:
        """The rate at which the mean over seeds is lowest, of equal ones the smallest; NaN without seeds."""
        means = np.nanmean(self.final, axis=2).mean(axis=0) if len(self.seeds) else np.array([])
        return float(self.rates[np.argmin(means)]) if len(means) else np.nan

    def sensitivity(self, capped: bool = True, best: str = "seed") -> pd.DataFrame:
        """Each seed's LR sensitivity, [seed, segment], as a difference within each segment.

            mean over rates of min(final loss, loss at initialisation) - the lowest such loss

        Not `capped`: of the final losses as they are, which is infinite where a run was lost and the mitigations' own
        losses at initialisation play no part in. `best`: one of `BEST`. NaN where no run was finite.
        """
        if best not in BEST:
            raise ValueError(f"best={best}: expected one of {', '.join(BEST)}")
        if not len(self.seeds):
            return pd.DataFrame(np.empty((0, self.final.shape[2])))
        values = self.capped if capped else self.final
        means = np.nanmean(values, axis=2)
        lowest = np.argmin(means, axis=1) if best == "seed" else np.full(len(means), np.argmin(means.mean(axis=0)))
        with np.errstate(invalid="ignore"):
            above = values.mean(axis=1) - values[np.arange(len(values)), lowest]
        return pd.DataFrame(above, index=self.seeds)

    @cached_property
    def capped(self) -> np.ndarray:
        """What is not below the loss at initialisation, as a whole, is that in every segment: [s, r, segment]."""
        is_above = ~(np.nanmean(self.final, axis=2) < self.initial)
        return np.where(is_above[..., None] & ~np.isnan(self.final), self.initial[..., None], self.final)
