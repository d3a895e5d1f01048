"""Learning rates of every step, per trial."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from harness.config import Trial

SHAPES = ("cosine", "linear", "constant", "wsd", "restarts")
DEFAULT_WARMUP = 0.05  # of all steps, as in Wortsman et al. 2023


def warmup_steps(trial: Trial) -> int:
    """How many steps the warm-up takes."""
    warmup = trial.schedule.warmup
    return round(DEFAULT_WARMUP * trial.steps) if warmup is None else warmup


def learning_rate(trial: Trial, step: int) -> float:
    """The rate of step 0, 1, ...: linear to the peak over `warmup` steps, then from the peak towards `final` x peak.

    The first step already learns (rate lr / warmup), and the last has reached the end of the decay.
    """
    schedule, peak, steps = trial.schedule, trial.optim.lr, trial.steps
    warmup = warmup_steps(trial)
    if step < warmup:
        return peak * (step + 1) / warmup
    if schedule.decay == "constant":
        return peak
    progress = (step + 1 - warmup) / max(1, steps - warmup)
    falling = 0.5 * (1 + math.cos(math.pi * progress)) if schedule.decay == "cosine" else 1 - progress
    return peak * (schedule.final + (1 - schedule.final) * falling)


def learning_rates(trials: Sequence[Trial], dtype: torch.dtype) -> Tensor:
    """[steps, R]."""
    steps = trials[0].steps
    return torch.tensor([[learning_rate(trial, step) for trial in trials] for step in range(steps)], dtype=dtype)
