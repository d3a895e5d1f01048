"""What was seen of each step of a run, to which the same steps are compared when they are run again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from harness.user_loop.inputs import Call, checksum
from harness.user_loop.named_tensors import NamedTensors
from harness.user_loop.strikes import LoopStrikes


class StepRecords:
    """Of each step: the calls of the model by position, the scheduled rates, and checksums of weights and buffers."""

    def __init__(self) -> None:
        self.calls: dict[int, list[Call]] = {}
        self.rates: dict[int, list[float]] = {}
        self.keeps_weights = False
        self._weights: dict[int, np.ndarray] = {}

    def saw(self, step: int, position: int, calls: list[Call], rates: list[float]) -> None:
        """A step is over, which read the batches of this position."""
        self.calls[position], self.rates[step] = calls, rates

    def forget(self, step: int) -> None:
        """No step before this one is run again."""
        for kept in (self.calls, self.rates):
            for old in [old for old in kept if old < step]:
                del kept[old]

    def keep_weights(self, step: int, places: NamedTensors) -> None:
        """Weights and buffers as this step has left them."""
        _, self._weights[step] = fingerprint(places)

    def differing_weight(self, step: int, places: NamedTensors) -> str | None:
        """The first weight or buffer that is another one after this step; None: all are the same, or none were kept."""
        kept = self._weights.get(step)
        if kept is None:
            return None
        names, now = fingerprint(places)
        if len(now) != len(kept):
            return f"the number of weights and buffers: {len(kept)} and {len(now)}"
        differs = np.flatnonzero(now != kept)
        return names[differs[0]] if len(differs) else None


class HasStepRecords(Protocol):
    """A replay, as far as it is compared."""

    @property
    def records(self) -> StepRecords: ...

    @property
    def losses(self) -> np.ndarray: ...


@dataclass(frozen=True)
class ReplayCheck:
    """A replay that has to be equal to an earlier one, bit for bit, up to the first change that `strikes` make.

    Where it is not, that is an error in the loop at once with `raises`; else the replay ends, and its plan is told.
    """

    replay: HasStepRecords
    strikes: LoopStrikes
    raises: bool

    def calls(self, step: int, position: int) -> tuple[list[Call] | None, bool]:
        """The calls that are expected at a step, and whether only the first is, because a fault strikes there."""
        first = self.strikes.first_change
        if (first is not None and step > first) or self.strikes.is_data_due(position):
            return None, False
        return self.replay.records.calls.get(position), first == step or self.strikes.is_due_at(step)

    def difference(self, replay: HasStepRecords, step: int, places: NamedTensors, seen: str) -> str | None:
        """What of this step of the replay is another one; None: nothing. `seen` is what its inputs have shown."""
        first = self.strikes.first_change
        if first is not None and step > first:
            return None
        if seen:
            return seen
        before, now = self.replay.records.rates.get(step), replay.records.rates.get(step)
        if before is not None and now is not None and before != now:
            pairs = zip(before, now, strict=False)
            number = next((n for n, (one, other) in enumerate(pairs) if one != other), 0)
            return f"the learning rate of parameter group {number}"
        if first == step:
            return None
        if (name := self.replay.records.differing_weight(step, places)) is not None:
            return name
        losses, its = replay.losses, self.replay.losses
        if step < min(len(losses), len(its)) and losses[step].tobytes() != its[step].tobytes():
            return "the loss"
        return None


@torch.no_grad()
def fingerprint(places: NamedTensors) -> tuple[list[str], np.ndarray]:
    """The names of all weights and buffers, and a checksum of each, uint32.

    On a CPU of its bytes; on an accelerator of its norm in float64, which shows a single bit of an element.
    """
    named: dict[str, Tensor] = {**places.weights, **places.buffers}
    if places.device.type == "cpu":
        return list(named), np.array([checksum(values) for values in named.values()], np.uint32)
    sums = [values.detach() for values in named.values()]
    norms = torch._foreach_norm([x if x.is_floating_point() else x.double() for x in sums], 2, dtype=torch.float64)
    words = torch.stack([norm.to(places.device) for norm in norms]).cpu().numpy().view(np.uint64)
    return list(named), (words ^ (words >> np.uint64(32))).astype(np.uint32)
