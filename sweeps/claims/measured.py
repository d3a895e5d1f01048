"""What a claim compares: a number of each seed, from the finished trials of one arm in one cell."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pandas as pd

from harness.objectives.outcome import TRAINED


@dataclass(frozen=True)
class SeedMetric:
    """`values` of the rows of `analysis.measures.metrics.trial_table`, by seed; a ratio is of logarithms.

    A difference of two is not known better than its `resolution`, which is added to both ends of its interval.
    """

    unit: str
    values: Callable[[pd.DataFrame], pd.Series]
    is_ratio: bool = False
    resolution: Callable[[pd.DataFrame], float] = lambda table: 0.0


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


def _stable_rate(table: pd.DataFrame) -> pd.Series:
    """Logarithm of the largest rate at which a seed trained, with all smaller ones.

    Where all did it is that of the last rate, which the edge lies above; where none did, one step below the first.
    """
    trained = _by_rate(table.assign(is_trained=(table["outcome"] == TRAINED).astype(float)), "is_trained")
    if not trained.size:
        return trained.sum(axis=1)
    rates = np.log(np.array(trained.columns, float))
    stable = np.minimum.accumulate(trained.to_numpy(), axis=1).sum(axis=1).astype(int)
    steps = np.concatenate([[rates[0] - _step(table)], rates])
    return pd.Series(steps[stable], index=trained.index)


def _step(table: pd.DataFrame) -> float:
    """By how much neighbouring rates differ, at most, in logarithms: an edge is not known better than that."""
    rates = np.log(np.unique(table["lr"].to_numpy(float)))
    return float(np.diff(rates).max()) if len(rates) > 1 else np.inf


def _lost(table: pd.DataFrame) -> pd.Series:
    """Share of the rates at which a seed did not train."""
    return _by_rate(table.assign(lost=(table["outcome"] != TRAINED).astype(float)), "lost").mean(axis=1)


METRICS = {
    "best_loss": SeedMetric("nat/token", _best_loss),
    "sensitivity": SeedMetric("nat/token", _sensitivity),
    "stable_rate": SeedMetric("ratio", _stable_rate, is_ratio=True, resolution=_step),
    "lost": SeedMetric("share", _lost),
}
"""By name: what is compared between two arms, seed by seed."""
