"""Trials whose loss or gradients are not finite freeze."""

from __future__ import annotations

import torch
from torch import Tensor

from harness.config import Trial
from harness.guards.base import FREEZE, GO, Guard, GuardInput, answers


class FreezeNonFinite(Guard):
    """Freezes what is not finite, without a look from the host.

    An infinite element of a gradient that is repaired by what acts on it first (`clip_value`, SPAM, Lion) is none of
    that, and where the loss's scale is dynamic an overflow of the gradients alone is that guard's to judge.
    """

    @classmethod
    def is_on(cls, trial: Trial) -> bool:
        return True

    def judge(self, seen: GuardInput) -> Tensor:
        is_finite = seen.loss.abs() < torch.inf  # which NaN is not; torch.isfinite is four operations
        is_fine = is_finite & (seen.usable | self.parts.loss_scale.dynamic)
        return answers(seen.trains & ~is_fine, FREEZE if seen.detects else GO)
