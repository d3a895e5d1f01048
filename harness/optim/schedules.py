"""Learning rates of every step, per trial: linear warm-up to the peak, then one of the shapes in `SHAPES`.

Warm-up counts steps. What comes after it counts tokens, which is the same unless sequences or batches grow: then the
rate of a step is that of a run without growth which has trained on as many tokens. So do Li, Zhang & He 2021 (arXiv
2108.06084, appendix A.2, and the tutorial of their code): counted in steps, the rate would fall before the tokens came.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from harness.config import Schedule, Trial, steps_of
from harness.config.curriculum import Curriculum

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class AfterWarmup:
    """The steps after the warm-up: tokens `done` since then, up to and including each step, [n].

    `span` of them come in all, and `whole` in the entire run, warm-up included. All are whole numbers.
    """

    done: Floats
    span: float
    whole: float


def _restarts(schedule: Schedule, after: AfterWarmup) -> Floats:
    """SGDR (Loshchilov & Hutter 2017, arXiv 1608.03983, equation 5) with cycles of equal length.

    A cycle begins at the peak, and the last step ends the last of them.
    """
    inside = np.where(after.done < after.span, (after.done * schedule.cycles) % after.span, after.span)
    return _half_turn(inside / after.span)


def _half_turn(progress: Floats) -> Floats:
    return 0.5 * (1 + np.cos(np.pi * progress))


def _cooled(schedule: Schedule, after: AfterWarmup) -> Floats:
    """How much of the cooldown is over. It takes a share of the entire run, as far as the warm-up leaves that."""
    cooldown = min(schedule.cooldown * after.whole, after.span)
    return np.clip(1 - (after.span - after.done) / cooldown, 0, 1)


SHAPES: dict[str, Callable[[Schedule, AfterWarmup], Floats]] = {
    "cosine": lambda schedule, after: _half_turn(after.done / after.span),
    "linear": lambda schedule, after: 1 - after.done / after.span,
    "constant": lambda schedule, after: np.ones_like(after.done),
    # Warm-up, stable, decay: 1 - sqrt(x), the best cooldown of Haegele et al. 2024 (arXiv 2405.18392, equation 2).
    # Hu et al. 2024 (arXiv 2404.06395), who named the schedule, decay exponentially, over the last tenth.
    "wsd": lambda schedule, after: 1 - np.sqrt(_cooled(schedule, after)),
    # The same with the linear cooldown that Haegele et al. compare with.
    "wsd_linear": lambda schedule, after: 1 - _cooled(schedule, after),
    "restarts": _restarts,
}
"""Name of a decay -> what is left of the way from the final rate up to the peak, 1 to 0, at each step after warm-up."""


def warmup_steps(trial: Trial) -> int:
    """How many steps the warm-up takes."""
    return steps_of(trial.schedule.warmup, trial.schedule.warmup_share, trial.train.steps)


def idle(trial: Trial) -> Iterator[tuple[str, str]]:
    """(key, why) of a decay that never comes."""
    warmup = warmup_steps(trial)
    if warmup >= trial.steps and trial.schedule.decay != "constant":
        yield "schedule.decay", f"schedule.decay={trial.schedule.decay}: the warm-up takes all {trial.steps} steps"


def refused(trial: Trial) -> Iterator[str]:
    """A warm-up that is longer than the run."""
    warmup, steps = trial.schedule.warmup, trial.steps
    if warmup is not None and warmup > steps:
        why = f"longer than train.steps={trial.train.steps}"
        yield f"schedule.warmup={warmup}: {why}; allowed: 0 to {steps}"


def rates_of(trial: Trial) -> Floats:
    """The rate of every step, [steps]: linear to the peak over the warm-up, then from there towards the final rate.

    The first step already learns (rate lr / warmup), and the last has reached the end of the decay.
    """
    schedule, peak = trial.schedule, trial.optim.lr
    rising, left = _shares(schedule, warmup_steps(trial), trial.curriculum)
    final = schedule.final  # of the peak rate
    if final is None:
        final = schedule.final_rate / peak if peak > schedule.final_rate else 1.0
    return peak * np.concatenate([rising, left + final * (1 - left)])


@lru_cache(maxsize=64)
def _shares(schedule: Schedule, warmup: int, curriculum: Curriculum) -> tuple[Floats, Floats]:
    """The rates of the warm-up as shares of the peak, and what `SHAPES` has for the steps after it."""
    rising = np.arange(1, min(warmup, curriculum.steps) + 1) / max(1, warmup)
    if warmup >= curriculum.steps:
        return rising, np.empty(0)
    tokens = curriculum.tokens.astype(np.float64)
    before = tokens[warmup - 1] if warmup else 0.0
    after = AfterWarmup(tokens[warmup:] - before, tokens[-1] - before, tokens[-1])
    return rising, SHAPES[schedule.decay](schedule, after)


def learning_rates(trials: Sequence[Trial], dtype: torch.dtype) -> Tensor:
    """[steps, R]."""
    return torch.tensor(np.stack([rates_of(trial) for trial in trials], axis=1), dtype=dtype)
