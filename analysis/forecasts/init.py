"""Divergence from the first step alone: rate, gradient norm, attention logit and loss at initialisation."""

from __future__ import annotations

from analysis.forecasts.early import Early


class Init(Early):
    """As `Early`, from signals of the first step. It costs one step of every run that is forecast.

    A baseline for predictors from the state at initialisation, such as the near-unit spectral mass of arXiv 2602.22988,
    whose own feature it has not.
    """

    about = "logistic in signals of the run's first step"
    prefixes = ("initial_",)
