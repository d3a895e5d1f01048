"""What a claim compares: a number of each seed, from the finished trials of one arm in one cell."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pandas as pd

from harness.objectives.outcome import TRAINED


@dataclass(frozen=True)
class SeedMetric:
    """`bounds` of the rows of `analysis.measures.metrics.trial_table`: `low` and `high`, by seed.

    A seed's number lies between them; they are one where it was measured itself. A ratio is of logarithms.
    """

    unit: str
    bounds: Callable[[pd.DataFrame], pd.DataFrame]
    is_ratio: bool = False


def _measured(values: Callable[[pd.DataFrame], pd.Series]) -> Callable[[pd.DataFrame], pd.DataFrame]:
    def bounds(table: pd.DataFrame) -> pd.DataFrame:
        found = values(table)
        return pd.DataFrame({"low": found, "high": found})

    return bounds


def _by_rate(table: pd.DataFrame, column: str) -> pd.DataFrame:
    """[seed, lr]; seeds that lack a rate are left out, because a mean over fewer rates is another number."""
    return table.pivot_table(index="seed", columns="lr", values=column, aggfunc="mean").dropna()


def _best_loss(table: pd.DataFrame) -> pd.Series:
    """Final validation loss at the arm's own best rate, which is that of the lowest mean over seeds."""
    losses = _by_rate(table, "capped_loss")
    return losses[losses.mean().idxmin()] if losses.size else losses.sum(axis=1)


def _sensitivity(table: pd.DataFrame) -> pd.Series:
    """Wortsman et al. 2023 (arXiv 2309.14322), section 2: mean over rates less the best, losses capped at the first."""
    losses = _by_rate(table, "capped_loss")
    return losses.mean(axis=1) - losses.min(axis=1)


def _stable_rate(table: pd.DataFrame) -> pd.DataFrame:
    """Logarithms of the largest rate at which a seed trained, with all smaller ones, and of the next of the sweep.

    The edge lies between both; above the last rate where the seed trained at all, and below the first where at none.
    """
    trained = _by_rate(table.assign(is_trained=(table["outcome"] == TRAINED).astype(float)), "is_trained")
    if not trained.size:
        return pd.DataFrame({"low": [], "high": []}, dtype=float)
    ends = np.concatenate([[-np.inf], np.log(np.array(trained.columns, float)), [np.inf]])
    stable = np.minimum.accumulate(trained.to_numpy(), axis=1).sum(axis=1).astype(int)
    return pd.DataFrame({"low": ends[stable], "high": ends[stable + 1]}, index=trained.index)


def _lost(table: pd.DataFrame) -> pd.Series:
    """Share of the rates at which a seed did not train."""
    return _by_rate(table.assign(lost=(table["outcome"] != TRAINED).astype(float)), "lost").mean(axis=1)


METRICS = {
    "best_loss": SeedMetric("nat/token", _measured(_best_loss)),
    "sensitivity": SeedMetric("nat/token", _measured(_sensitivity)),
    "stable_rate": SeedMetric("ratio", _stable_rate, is_ratio=True),
    "lost": SeedMetric("share", _measured(_lost)),
}
"""By name: what is compared between two arms, seed by seed."""
