"""A policy that gets worse."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from harness.config.fields import PER_TRIAL, number
from harness.detectors.base import Values, Windowed
from harness.detectors.options import length


@dataclass(frozen=True)
class Options:
    """`detect.policy_reward.*`."""

    lost: float = number(PER_TRIAL, 0.5, "share of the gain since the start whose loss is an alarm", above=0)
    noise: float = number(PER_TRIAL, 6.0, "standard errors of a window's mean that a gain and a loss have", above=0)
    window: int = length(20, "steps over which a mean is taken", low=4)


class PolicyReward(Windowed):
    """Half of what a policy has gained in quality is lost again.

    Means over the last 20 steps: of the first window, the best one, and now. The score is (best - now) / (best -
    first) over 0.5, with its limit at 1; 0 where one of both differences is below six standard errors of such a mean.
    A reward that is stuck or has the wrong sign shows itself by it, later than by anything else.
    """

    watches = ("loss", "quality")
    windowed = ("quality",)
    learns_alarms = True
    keeps = "what was gained since the start is what may be lost"
    blind = "a quality that rises is no loss"
    source = "ours: the rule by which a run's outcome is collapsed, while it runs"

    def remember(self) -> None:
        super().remember()
        self._first, self._best = self.number("first", torch.nan), self.number("best", torch.nan)

    def score(self, values: Values) -> tuple[Tensor, Tensor]:
        now, noise = self._now()
        gain, lost = self._best.used - self._first.used, self._best.used - now
        is_sure = torch.minimum(gain, lost) > self.numbers["noise"] * noise
        score = self.heard(self.options.window, torch.where(is_sure, lost / gain / self.numbers["lost"], 0.0))
        return score, torch.ones_like(score)

    def learn(self, values: Values, where_R: Tensor) -> None:
        super().learn(values, where_R)
        now, _ = self._now()
        is_full = where_R & (self.windows["quality"].count == self.options.window)
        first, best = self._first.used, self._best.used
        first.copy_(torch.where(is_full & first.isnan(), now, first))
        best.copy_(torch.where(is_full, torch.fmax(best, now), best))

    def _now(self) -> tuple[Tensor, Tensor]:
        mean, deviation = self.windows["quality"].mean_std()
        return mean, deviation / self.options.window**0.5
