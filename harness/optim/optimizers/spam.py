"""SPAM: Adam whose gradients are clipped where they are spikes, and whose moments start anew every so often."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from harness.basics.devices import on_cpu
from harness.config import PER_TRIAL, Trial, anything, number, steps_of
from harness.optim.optimizers.adamw import Adam
from harness.optim.optimizers.base import Numbers, Piece, each

FIRST_SHARE = 0.01  # of the rate, at a reset
GRACE_SHARE = 20 / 500  # of the interval, in the authors' code


def interval(authors: int) -> Any:
    """The field `interval` of an optimizer whose moments start anew; with what its authors' code has."""
    text = f"steps from one reset of the moments to the next; null: as interval_share says (the authors: {authors})"
    return number(PER_TRIAL, None, text, low=2)


def interval_share(share: float) -> Any:
    """The field `interval_share` of such an optimizer."""
    return number(PER_TRIAL, share, "share of train.steps between resets, where interval is null", above=0, high=1)


def reset_count(is_on: bool) -> Any:
    """The field `reset_count` of such an optimizer."""
    return anything(PER_TRIAL, is_on, "a reset also starts the step count anew by which Adam corrects its moments")


@dataclass(frozen=True)
class Options:
    """`spam.*`, with the defaults of the authors' code, but for times, which follow the length of the run.

    The code's are of runs of 10,000 steps and more: interval 500, warmup 150, grace 20.
    """

    threshold: float = number(
        PER_TRIAL, 5000.0, "theta: an element whose square is above theta v is clipped to that", above=0
    )
    interval: int | None = interval(500)
    interval_share: float = interval_share(0.2)
    warmup: int | None = number(
        PER_TRIAL,
        None,
        "steps after a reset over which the rate grows from 1% to its own; null: as warmup_share says (authors: 150)",
        low=0,
    )
    warmup_share: float = number(
        PER_TRIAL, 0.3, "share of the interval that this warm-up takes, where warmup is null", low=0, high=1
    )
    grace: int | None = number(
        PER_TRIAL,
        None,
        "first steps, and first after a reset, in which nothing is clipped; null: 0.04 of the interval, at least 2 "
        "(the authors: 20)",
        low=2,
    )
    reset_count: bool = reset_count(False)


class Resetting(Adam):
    """Adam whose moments start at zero at every `interval`-th step, as the options of its `section` say."""

    section: ClassVar[str]

    def __init_subclass__(cls) -> None:
        cls.hyperparameters = {
            **Adam.hyperparameters,
            **cls.hyperparameters,
            "interval": cls.interval_of,
            "reset_count": lambda trial: trial.section(cls.section).reset_count,
        }

    @classmethod
    def interval_of(cls, trial: Trial) -> int:
        """Steps from one reset to the next."""
        options = trial.section(cls.section)
        return steps_of(options.interval, options.interval_share, trial.train.steps, low=2)

    @classmethod
    def idle(cls, trial: Trial) -> Iterator[tuple[str, str]]:
        yield from super().idle(trial)
        key = f"{cls.section}.interval"
        if (interval := cls.interval_of(trial)) >= trial.steps:
            yield key, f"{key}={interval}: nothing is reset in {trial.steps} steps"

    def numbers(self, h: Numbers) -> Numbers:
        """Adam's, steps `since` the last reset, whether there `was_reset`, and whether this step `resets`."""
        since = torch.remainder(h["count"], h["interval"])
        was_reset = h["count"] >= h["interval"]
        count = torch.where(was_reset & (h["reset_count"] > 0), since + 1, h["count"])
        resets = was_reset & (since == 0)
        return {**super().numbers({**h, "count": count}), "since": since, "was_reset": was_reset, "resets": resets}

    def update(self, piece: Piece, h: Numbers) -> Tensor:
        resets = h["resets"]
        if not on_cpu(resets) or bool(resets.any()):
            for name in ("moment_1", "moment_2"):
                piece.slots[name].masked_fill_(resets, 0.0)
        self.mark(f"{self.section}.interval", piece.rows, resets)
        return self.direction(piece, h, *self.moments(piece, h, self.held(piece, h)))

    def held(self, piece: Piece, h: Numbers) -> Tensor:
        """The gradients [r, n] without their spikes."""
        raise NotImplementedError


class Spam(Resetting):
    """Huang et al. 2025 (arXiv 2501.06842), algorithm 1, as in the authors' code (galore_torch/SPAM.py).

    Before Adam's step, where g^2 > threshold v, g becomes sign(g) sqrt(threshold v), v being the second moment as it is
    then; an infinite element is clipped like any other. At every `interval`-th step both moments start at zero, and
    from there the rate, not weight decay, grows along a cosine. As in the code, nothing is clipped while v is young
    (`grace`), when an infinite gradient is not repaired; after that an element that never had a gradient, such as the
    embedding of a rare token, has v = 0, and what comes is clipped to zero until the next reset. The code goes on with
    Adam's step count at a reset, so that the moments are not corrected for it; `reset_count` starts it anew.

    Epsilon is added to the corrected root, as in Adam; the code adds it before the correction, and takes weight decay
    off after the step. Sparse momentum is left out.
    """

    section = "spam"
    parts = ("spam.threshold", "spam.interval")
    repairs_infinity = True
    hyperparameters = {
        "warmup": lambda trial: warmup_of(trial),
        "grace": lambda trial: grace_of(trial),
        "root_threshold": lambda trial: math.sqrt(trial.section("spam").threshold),
    }

    @classmethod
    def idle(cls, trial: Trial) -> Iterator[tuple[str, str]]:
        yield from super().idle(trial)
        interval, grace, steps = cls.interval_of(trial), grace_of(trial), trial.steps
        if grace >= min(interval, steps):
            why = f"nothing is clipped in {steps} steps with a reset every {interval}"
            yield "spam.threshold", f"spam.grace={grace}: {why}"

    def numbers(self, h: Numbers) -> Numbers:
        numbers = super().numbers(h)
        since, growing = numbers["since"], numbers["was_reset"] & (numbers["since"] < h["warmup"])
        share = 1 - (1 - FIRST_SHARE) * (1 + each(torch.cos, math.pi * since / (h["warmup"] + 1))) / 2
        return {
            **numbers,
            "rate": h["rate"] * torch.where(growing, share, 1.0),
            "slack": torch.where(since >= h["grace"], 0.0, math.inf),
        }

    def held(self, piece: Piece, h: Numbers) -> Tensor:
        limit = piece.slots["moment_2"].sqrt().mul_(h["root_threshold"]).add_(h["slack"])
        gradients = torch.minimum(piece.gradients, limit)
        gradients = torch.maximum(gradients, limit.neg_())
        self.mark("spam.threshold", piece.rows, (gradients != piece.gradients).any(1, keepdim=True))
        return gradients

    def repairs(self) -> Tensor:
        since = torch.remainder(self.updates + 1, self._exact["interval"][:, 0])
        return since >= self._exact["grace"][:, 0]


def warmup_of(trial: Trial) -> int:
    """Steps after a reset over which the rate grows."""
    options = trial.section("spam")
    return steps_of(options.warmup, options.warmup_share, Spam.interval_of(trial))


def grace_of(trial: Trial) -> int:
    """First steps, and first after a reset, in which nothing is clipped."""
    return steps_of(trial.section("spam").grace, GRACE_SHARE, Spam.interval_of(trial), low=2)
