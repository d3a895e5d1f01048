"""What forecasters that pool recipes are linear in. No forecaster."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd


@dataclass(frozen=True)
class Design:
    """Columns of standardised log width, log depth and log rate, and of each recipe its own level.

    With `has_own_slopes` each recipe has slopes of its own beside the common ones, too. A shrinking fit holds what is a
    recipe's own near zero, so recipes lend each other what few sizes do not tell.
    """

    recipes: tuple[str, ...]
    middle: np.ndarray  # [axes]
    spread: np.ndarray  # [axes]; 0 for what does not vary, which is left out
    has_own_slopes: bool

    @classmethod
    def of(cls, table: pd.DataFrame, has_own_slopes: bool) -> Design:
        """For the recipes, sizes and rates of a table."""
        x = _axes(table)
        recipes = tuple(sorted(table["recipe"].unique()))
        return cls(recipes, x.mean(axis=0), np.where(np.ptp(x, axis=0) > 0, x.std(axis=0), 0.0), has_own_slopes)

    def knows(self, table: pd.DataFrame) -> np.ndarray:
        """Whether each row is of one of the recipes."""
        return np.asarray(table["recipe"].isin(self.recipes))

    def __call__(self, table: pd.DataFrame) -> np.ndarray:
        """[rows, columns]."""
        varies = self.spread > 0
        x = (_axes(table)[:, varies] - self.middle[varies]) / self.spread[varies]
        columns = [x]
        if len(self.recipes) > 1:
            own = (table["recipe"].to_numpy()[:, None] == np.array(self.recipes)).astype(float)
            columns.append(own)
            if self.has_own_slopes:
                columns += [own * x[:, axis : axis + 1] for axis in range(x.shape[1])]
        return np.concatenate(columns, axis=1)


def _axes(table: pd.DataFrame) -> np.ndarray:
    """log10 of width, depth and rate, [rows, 3]; 0 for a rate that is not one of the unit."""
    with np.errstate(divide="ignore"):
        return np.asarray(np.nan_to_num(np.log10(table[["width", "depth", "lr"]].to_numpy(float)), nan=0.0))
