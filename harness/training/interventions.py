"""What playbooks have done to the trials of a pack: to their rates, data, settings and devices.

The host keeps it, by planned trial: it is decided there, it stays when a row goes back, and a trial without any of it
costs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from harness.basics.devices import sent
from harness.config import Trial
from harness.objectives.base import Steps
from harness.recovery.change_recipe import amended


@dataclass
class Intervention:
    """Of one trial. `rates` are factors, from a step on, up to another one or for good; `stale`: such spans of steps.

    `reads` are the batches that it reads ahead, each with the step at which that was begun; it reads ahead by their sum
    at every step, also where it goes back to before.
    """

    reads: list[tuple[int, int]] = field(default_factory=list)
    rates: list[tuple[float, int, int | None]] = field(default_factory=list)
    stale: list[tuple[int, int | None]] = field(default_factory=list)
    embedding: float = 1.0
    changes: dict[str, Any] = field(default_factory=dict)
    is_spared: bool = False  # of faults of a device
    is_disarmed: bool = False  # of any fault

    def read_on(self, step: int, batches: int) -> None:
        """From this step on so many batches more; what takes back the last such order undoes it."""
        if self.reads and self.reads[-1][1] == -batches:
            self.reads.pop()
        elif batches:
            self.reads.append((step, batches))

    @property
    def batches(self) -> int:
        """How many batches it reads ahead of the planned ones."""
        return sum(batches for _, batches in self.reads)


class Interventions:
    """By planned trial; of those that have none there is no entry."""

    def __init__(self, device: torch.device):
        self._of: dict[int, Intervention] = {}
        self._device = device

    def __bool__(self) -> bool:
        return bool(self._of)

    def of(self, trial: int) -> Intervention:
        """That of a planned trial, to be changed."""
        return self._of.setdefault(trial, Intervention())

    def take(self, trial: int, source: int, of: Interventions | None = None) -> None:
        """A trial has what another one has, its twin of which it forks, or one of another pack (`of`)."""
        known = self._of if of is None else of._of
        if source in known:
            self._of[trial] = Intervention(**asdict(known[source]))

    def same(self, trial: int, other: int) -> bool:
        """Whether two trials train alike from here on, as far as this is concerned."""
        alone, twin = self._of.get(trial, Intervention()), self._of.get(other, Intervention())
        fields = ("batches", "rates", "stale", "embedding", "changes")
        return all(getattr(alone, name) == getattr(twin, name) for name in fields)

    def strikes(self, trial: int, is_of_data: bool) -> bool:
        """Whether a trial's fault still strikes: one of the data does so on every device."""
        intervention = self._of.get(trial)
        return intervention is None or not (intervention.is_disarmed or (intervention.is_spared and not is_of_data))

    def batches(self, trial: int) -> int:
        """How many batches it reads ahead of the planned ones."""
        return self._of[trial].batches if trial in self._of else 0

    def positions(self, rows: Sequence[int], steps: Steps) -> Steps:
        """Which of its batches each row reads at these steps."""
        ahead = [self.batches(trial) for trial in rows] if self._of else []
        if not any(ahead):
            return steps
        each = [steps] * len(rows) if isinstance(steps, int) else steps
        return [step + batches for step, batches in zip(each, ahead, strict=True)]

    def rates(self, rows: Sequence[int], steps: Steps) -> Tensor | None:
        """Factors on the rates of these rows at these steps, [R], float64; None: all are 1."""
        if not any(intervention.rates for intervention in self._of.values()):
            return None
        each = [steps] * len(rows) if isinstance(steps, int) else steps
        factors = [self._rate(trial, step) for trial, step in zip(rows, each, strict=True)]
        return sent(torch.tensor(factors, dtype=torch.float64), self._device)

    def _rate(self, trial: int, step: int) -> float:
        factor = 1.0
        for by, first, end in self._of[trial].rates if trial in self._of else ():
            factor *= by if step >= first and (end is None or step < end) else 1.0
        return factor

    def stale(self, rows: Sequence[int], steps: Steps) -> Tensor | None:
        """Which of these rows were asked to route by older weights at these steps, [R]; None: none."""
        if not any(intervention.stale for intervention in self._of.values()):
            return None
        each = [steps] * len(rows) if isinstance(steps, int) else steps
        return sent(torch.tensor([self._is_stale(*which) for which in zip(rows, each, strict=True)]), self._device)

    def _is_stale(self, trial: int, step: int) -> bool:
        spans = self._of[trial].stale if trial in self._of else ()
        return any(step >= first and (end is None or step < end) for first, end in spans)

    def embeddings(self, rows: Sequence[int]) -> Mapping[int, float]:
        """Row -> factor on its embedding's gradient, where it is not 1."""
        of = ((row, self._of[trial].embedding) for row, trial in enumerate(rows) if trial in self._of)
        return {row: factor for row, factor in of if factor != 1}

    def acting(self, number: int, trial: Trial) -> Trial:
        """A planned trial as it trains now."""
        changes = self._of[number].changes if number in self._of else None
        return amended(trial, changes) if changes else trial

    def state(self) -> list[tuple[int, dict[str, Any]]]:
        """All of it, to `restore`."""
        return [(trial, asdict(intervention)) for trial, intervention in self._of.items()]

    def restore(self, state: Sequence[tuple[int, Mapping[str, Any]]]) -> None:
        """Go on from what `state` has given."""
        self._of = {trial: Intervention(**values) for trial, values in state}
        for intervention in self._of.values():
            intervention.rates = [(by, first, end) for by, first, end in intervention.rates]
            intervention.stale = [(first, end) for first, end in intervention.stale]
            intervention.reads = [(step, batches) for step, batches in intervention.reads]
