"""The same trial with more steps, and up to which step the two are one run.

What follows the length of a run as a share of it, such as a warm-up, stays in the longer trial as many steps as it was.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from harness.config import Trial
from harness.model.placements import branch_steps
from harness.optim import schedules
from harness.optim.clippers import adagc
from harness.optim.optimizers import OPTIMIZERS
from harness.optim.optimizers.spam import Resetting


def _interval(trial: Trial) -> int:
    optimizer = OPTIMIZERS[trial.optim.name]
    assert issubclass(optimizer, Resetting)
    return optimizer.interval_of(trial)


SHARES: dict[str, Callable[[Trial], int]] = {
    "schedule.warmup": schedules.warmup_steps,
    "model.branch_steps": branch_steps,
    "adagc.warmup": adagc.warmup_steps,
    "spam.interval": _interval,
    "stable_spam.interval": _interval,
}
"""Keys that are null where a share of train.steps stands in their place -> how many steps that is."""


def longer(trial: Trial, steps: int) -> Trial:
    """The same with `train.steps=steps`; what was a share of the run is as many steps as in the shorter one."""
    parts = {name: values for name, values in trial.parts.items() if name != "fault"}
    parts["train"] = dataclasses.replace(trial.train, steps=steps)
    for key, count in SHARES.items():
        section, _, field = key.partition(".")
        is_used = section in parts or section == trial.optim.name
        is_grown = key != "model.branch_steps" or trial.model.placement == "branchnorm"
        if is_used and is_grown and getattr(trial.section(section), field) is None:
            before = parts.get(section, trial.section(section))
            parts[section] = dataclasses.replace(before, **{field: count(trial)})
    others = {name: getattr(trial, name) for name in ("fault", "recipe", "mitigation", "seed")}
    return Trial.of(parts, **others)


def shared_steps(one: Trial, other: Trial) -> int:
    """How many first steps have the same learning rate and the same batch in both, bit for bit."""
    length = min(one.steps, other.steps)
    is_same = schedules.rates_of(one)[:length] == schedules.rates_of(other)[:length]
    is_same &= one.curriculum.tokens[:length] == other.curriculum.tokens[:length]
    return int(np.argmin(is_same)) if not is_same.all() else length


def goes_on_from(trial: Trial) -> int | None:
    """The last step before which a longer run is still the same; None where that is none after the warm-up.

    The last one of all is never shared: it is validated in another way.
    """
    step = min(shared_steps(trial, longer(trial, 2 * trial.train.steps)), trial.steps - 1)
    return step if step > schedules.warmup_steps(trial) else None


def follows(one: Trial, other: Trial) -> list[str]:
    """What of the optimizer is not the same number in both, as where one of a plug-in has a share of `train.steps`."""
    numbers = OPTIMIZERS[one.optim.name].hyperparameters
    return [name for name, of in numbers.items() if of(one) != of(other)]
