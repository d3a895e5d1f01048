"""Where the loss's scale is dynamic, gradients that overflow cost a step and half of the scale, and no more."""

from __future__ import annotations

from torch import Tensor

from harness.config import Trial
from harness.guards.base import FREEZE, SKIP, Guard, GuardInput, answers


class Overflow(Guard):
    """What torch.amp.GradScaler decides: skip the step and halve the scale, or, after enough clean steps, double it.

    A trial whose scale would fall below the smallest that is of use, or is not finite itself, freezes.
    """

    order = 10

    @classmethod
    def is_on(cls, trial: Trial) -> bool:
        return trial.train.loss_scaling == "dynamic"

    def judge(self, seen: GuardInput) -> Tensor:
        scale = self.parts.loss_scale
        can_go_on = scale.adapt(seen.usable, seen.trains)
        overflown = scale.dynamic & seen.trains & ~seen.usable
        skipped = answers(overflown, SKIP)
        return answers(overflown & ~can_go_on, FREEZE).maximum(skipped) if seen.detects else skipped
