"""Fits by statsmodels and scikit-learn, which the extra `forecast` brings. No forecaster."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np

from analysis.forecasts.base import LEVELS, student
from harness.config import ConfigError

EXTRA = "forecast"


@contextlib.contextmanager
def needed() -> Iterator[None]:
    """Imports of a library that need not be there. Raises ConfigError if it is not."""
    try:
        yield
    except ImportError as error:
        allowed = f"pip install 'stability-harness[{EXTRA}]'"
        raise ConfigError(f"forecast: {error.name or error} is not installed; allowed: {allowed}") from None


def foretold(x: np.ndarray, y: np.ndarray, errors: np.ndarray, x_wanted: np.ndarray) -> np.ndarray:
    """Quantiles of what is true at `x_wanted` [units, k], by least squares of y [n] on x [n, k]; NaN: too few points.

    What y is off by beyond its standard errors [n] is the law's, and is expected of another point, too. Columns of x
    that are constant are left out.
    """
    with needed():
        from statsmodels.regression.linear_model import OLS
    is_used = np.ptp(x, axis=0) > 0
    design = np.column_stack([np.ones(len(x)), x[:, is_used]])
    freedom = len(x) - design.shape[1]
    if freedom < 1:
        return np.full((len(x_wanted), len(LEVELS)), np.nan)
    wanted = np.column_stack([np.ones(len(x_wanted)), x_wanted[:, is_used]])
    said = OLS(y, design).fit().get_prediction(wanted)
    misfit = max(float(said.var_resid) - float((errors**2).mean()), 0.0)
    return student(said.predicted_mean, np.sqrt(said.var_pred_mean + misfit), freedom)


def bayesian_ridge(x: np.ndarray, y: np.ndarray, x_wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of another point at `x_wanted`, [units] each (MacKay 1992; Tipping 2001)."""
    with needed():
        from sklearn.linear_model import BayesianRidge
    if np.ptp(y) == 0:
        return np.full(len(x_wanted), y[0]), np.zeros(len(x_wanted))
    centre, scale = y.mean(), y.std()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mean, deviation = BayesianRidge().fit(x, (y - centre) / scale).predict(x_wanted, return_std=True)
    return centre + scale * mean, scale * deviation


def logistic(x: np.ndarray, y: np.ndarray, strength: float) -> Any:
    """A fitted logistic regression with an L2 penalty of 1 / `strength`; None where all y are alike."""
    with needed():
        from sklearn.linear_model import LogisticRegression
    if len(np.unique(y)) < 2:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return LogisticRegression(C=strength, max_iter=2000).fit(x, y)


def probabilities(model: Any, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Of 1, [units]; of a model that had no two kinds to learn from, the smoothed share of y."""
    if model is None:
        return np.full(len(x), (y.sum() + 0.5) / (len(y) + 1))
    return np.asarray(model.predict_proba(x)[:, 1])
