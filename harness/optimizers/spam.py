"""SPAM: Adam whose gradients are clipped where they are spikes, and whose moments start anew every so often."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.fields import PER_TRIAL, anything, number
from harness.optimizers.adamw import ADAM, adam_direction, corrections, moments
from harness.optimizers.base import Numbers, Optimizer, Piece, each

FIRST_SHARE = 0.01  # of the rate, at a reset


@dataclass(frozen=True)
class Options:
    """`spam.*`, with the defaults of the authors' code."""

    threshold: float = number(
        PER_TRIAL, 5000.0, "theta: an element whose square is above theta v is clipped to that", above=0
    )
    interval: int = number(PER_TRIAL, 500, "steps from one reset of the moments to the next", low=2)
    warmup: int = number(PER_TRIAL, 150, "steps after a reset over which the rate grows from 1% to its own", low=0)
    grace: int = number(PER_TRIAL, 20, "first steps, and first after a reset, in which nothing is clipped", low=2)
    reset_count: bool = anything(
        PER_TRIAL, False, "a reset also starts the step count anew by which Adam corrects its moments"
    )


class Spam(Optimizer):
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

    slots = ("moment_1", "moment_2")
    repairs_infinity = True
    hyperparameters = {
        **ADAM,
        "interval": lambda trial: trial.section("spam").interval,
        "warmup": lambda trial: trial.section("spam").warmup,
        "grace": lambda trial: trial.section("spam").grace,
        "root_threshold": lambda trial: math.sqrt(trial.section("spam").threshold),
        "resets_count": lambda trial: trial.section("spam").reset_count,
    }

    def numbers(self, h: Numbers) -> Numbers:
        since = torch.remainder(h["count"], h["interval"])
        was_reset = h["count"] >= h["interval"]
        growing = was_reset & (since < h["warmup"])
        share = 1 - (1 - FIRST_SHARE) * (1 + each(torch.cos, math.pi * since / (h["warmup"] + 1))) / 2
        count = torch.where(was_reset & (h["resets_count"] > 0), since + 1, h["count"])
        return {
            **corrections(h, count),
            "rate": h["rate"] * torch.where(growing, share, 1.0),
            "resets": was_reset & (since == 0),
            "slack": torch.where(since >= h["grace"], 0.0, math.inf),
        }

    def update(self, piece: Piece, h: Numbers) -> Tensor:
        forget(piece, h["resets"])
        limit = piece.slots["moment_2"].sqrt().mul_(h["root_threshold"]).add_(h["slack"])
        gradients = torch.minimum(piece.gradients, limit)
        gradients = torch.maximum(gradients, limit.neg_())
        return adam_direction(piece, h, *moments(piece, h, gradients))

    def repairs(self) -> Tensor:
        since = torch.remainder(self.updates + 1, self._exact["interval"][:, 0])
        return since >= self._exact["grace"][:, 0]


def forget(piece: Piece, resets: Tensor) -> None:
    """Let both moments start anew in these rows, [r, 1]."""
    if not resets.is_cpu or bool(resets.any()):
        for name in ("moment_1", "moment_2"):
            piece.slots[name].masked_fill_(resets, 0.0)
