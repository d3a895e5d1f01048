"""An expert that takes nearly all tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from harness.config.fields import PER_TRIAL, number
from harness.detectors.base import Detector, Values


@dataclass(frozen=True)
class Options:
    """`detect.expert_share.*`."""

    share: float = number(PER_TRIAL, 0.85, "share of the tokens that counts", above=0, high=1)
    persist: int = number(PER_TRIAL, 3, "steps in a row for which it has to count", low=1)
    least: int = number(PER_TRIAL, 30, "steps before it says anything", low=0)


class ExpertShare(Detector):
    """The largest share of a layer's tokens that one expert takes, at 0.85 or more for three steps in a row.

    Silent in the first 30 steps; an alarm begins the count of steps anew, as published. More than 1 is no share. The
    score is 0 while it does not persist.
    """

    watches = ("loss", "expert_share")
    is_at_limit = True
    blind = "a share is 1 at most"
    source = "trainscope 1.8.1, detectors/expert_utilization.py"

    def remember(self) -> None:
        self._count, self._streak = self.number("count"), self.number("streak")

    def score(self, values: Values) -> tuple[Tensor, Tensor]:
        share = values["expert_share"]
        self._share = share.reshape(len(share), -1).amax(1)
        self._share = torch.where(self._share <= 1, self._share, torch.nan)
        persists = (self._streak.used + 1 >= self.numbers["persist"]) & self._is_heard()
        score = torch.where(persists, self._share, self._share * 0)
        return torch.where(self._is_heard(), score, torch.nan), self.numbers["share"]

    def _is_heard(self) -> Tensor:
        return self._count.used >= self.numbers["least"]

    def note(self, values: Values, where_R: Tensor, is_alarm: Tensor) -> None:
        counts = (self._share >= self.numbers["share"]) & self._is_heard() & ~is_alarm
        self._streak.used.copy_(
            torch.where(where_R, torch.where(counts, self._streak.used + 1, 0.0), self._streak.used)
        )
        self._count.used.add_(where_R)

    def restart(self, where_R: Tensor) -> None:
        for kept in (self._count.used, self._streak.used):
            kept.masked_fill_(where_R, 0)
