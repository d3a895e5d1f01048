"""What of a recipe acts now and then, at how many steps it did, and what cannot act in a run of this size.

A part is named by the key that switches it on, such as `optim.clip` or `spam.interval`. Which parts there are, and the
rule by which one cannot act, stands beside the code of each: `parts` and `idle` of clippers, optimizers and the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from harness.config import Trial
from harness.data import curriculum
from harness.data.screening import CRITERIA
from harness.model import hyper_connections, placements, precision, scaling
from harness.model.branches import branches_of
from harness.optim import schedules
from harness.optim.clippers import CLIPPERS
from harness.optim.optimizers import OPTIMIZERS
from harness.optim.optimizers.base import CLIP_UPDATE
from harness.optim.qk_clip import QKClip
from harness.training.slots import Slots
from harness.training.twins import Twins


def parts_of(trial: Trial) -> list[str]:
    """The parts of a trial's recipe that act at some steps and not at others."""
    parts = [cls.part for cls in CLIPPERS if cls.part and cls.is_on(trial)]
    parts += OPTIMIZERS[trial.optim.name].parts
    parts += [CLIP_UPDATE] if trial.optim.clip_update is not None else []
    parts += [QKClip.part] if QKClip.is_on(trial) else []
    parts += [part for branch in branches_of(trial) for part in branch.parts(trial)]
    return parts + [f"screen.{name}" for name in CRITERIA if getattr(trial.screen, name) is not None]


def idle_parts(trial: Trial) -> dict[str, str]:
    """What cannot act in this trial as it is named: its key, and why, in words with the number that it would take."""
    rules = [cls.idle for cls in CLIPPERS if cls.is_on(trial)]
    rules += [OPTIMIZERS[trial.optim.name].idle]
    rules += [branch.idle for branch in branches_of(trial)]
    rules += [part.idle for part in (curriculum, placements, hyper_connections, precision, scaling, schedules)]
    return {key: reason for rule in rules for key, reason in rule(trial)}


class Acts:
    """Counts, for each trial as planned, the steps at which each part of the recipe changed something."""

    def __init__(self, trials: Sequence[Trial], device: torch.device):
        self._parts = [parts_of(trial) for trial in trials]
        names = dict.fromkeys(name for parts in self._parts for name in parts)
        self._counts = {name: torch.zeros(len(trials), dtype=torch.int64, device=device) for name in names}
        self.noticed: dict[str, Tensor] = {}  # in forward passes since it was cleared: part -> in which rows, [R]

    def bind(self, slots: Slots) -> None:
        """Count for the rows in these slots from now on."""
        self._slots = slots

    def notice(self, part: str, acted_r: Tensor, rows: slice) -> None:
        """The part acted in a forward pass of these rows."""
        if part not in self.noticed:
            self.noticed[part] = torch.zeros(self._slots.count, dtype=torch.bool, device=acted_r.device)
        self.noticed[part][rows] |= acted_r

    def count(self, part: str, acted_R: Tensor) -> None:
        """The part changed something in these rows at this step."""
        if part in self._counts:
            self._counts[part].add_(self._slots.of_trials(acted_R))

    def take(self, planned: int, source: int, counts: Mapping[str, Tensor]) -> None:
        """A trial has what `source`, itself or its twin, had by these counts: as it forks, or goes back."""
        for name, now in self._counts.items():
            now[planned] = counts[name][source]

    def state(self) -> dict[str, Tensor]:
        """All counts, [trials] each."""
        return dict(self._counts)

    def restore(self, counts: Mapping[str, Tensor]) -> None:
        """Go on from what `state` has given."""
        for name, now in self._counts.items():
            now.copy_(counts[name])

    def totals(self, twins: Twins, last_step: int) -> list[dict[str, int]]:
        """Part -> at how many steps it acted, of each trial; here the host waits for the device."""
        counts = {name: values.cpu().numpy().copy() for name, values in self._counts.items()}
        for values in counts.values():
            twins.fill_at(last_step, values)
        return [{name: int(counts[name][number]) for name in parts} for number, parts in enumerate(self._parts)]
