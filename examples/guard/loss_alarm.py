"""A guard of one file: a trial whose loss jumps goes back to a snapshot, and trains on from there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.config import SWITCHED, Trial, number
from harness.guards import ROLL_BACK, Guard, GuardInput, GuardSignal, Parts
from harness.guards.base import answers

DECAY = 0.9  # of the running mean


@dataclass(frozen=True)
class Options:
    """`loss_alarm.*`."""

    nats: float | None = number(SWITCHED, None, "rise of the loss above its running mean; null: any", above=0)


class LossAlarm(Guard):
    """Rolls back where the loss is not finite, or `nats` above its running mean, which takes in no such loss."""

    signals = {"loss_above_mean": GuardSignal("nat/token", "training loss over its running mean")}
    every, kept = 5, 3

    def __init__(self, parts: Parts):
        super().__init__(parts)
        rows = torch.full((parts.rows,), torch.nan, dtype=torch.float64, device=parts.device)
        self._mean = parts.state.add("loss_alarm_mean", rows)

    @classmethod
    def is_on(cls, trial: Trial) -> bool:
        return trial.section("loss_alarm").nats is not None

    def bind(self, trials: Sequence[Trial]) -> None:
        limits = [trial.section("loss_alarm").nats or torch.inf for trial in trials]
        self._limit = torch.tensor(limits, dtype=torch.float64, device=self.device)

    def judge(self, seen: GuardInput) -> Tensor:
        mean, loss = self._mean.used, seen.loss.double()
        self._above = loss - mean
        is_alarm = seen.trains & ~(self._above < self._limit) & ~mean.isnan()
        moved = torch.where(mean.isnan(), loss, DECAY * mean + (1 - DECAY) * loss)
        mean.copy_(torch.where(seen.trains & ~is_alarm & loss.isfinite(), moved, mean))
        return answers(is_alarm, ROLL_BACK)

    def shown(self) -> Mapping[str, Tensor]:
        return {"loss_above_mean": self._above}
