"""Steps of rows: the step at which each row stands is state like its weights, so that a row can go back alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.basics.devices import sent
from harness.config.curriculum import Curriculum
from harness.model.state import State
from harness.objectives.base import Steps


@dataclass(frozen=True)
class PackStep:
    """One pass of the loop: the step of every row, and which rows take it; the others wait, or have finished.

    `steps` is one number, or one for each slot of the pack. `trains` is [R] on the device; None: all rows do. `groups`
    are the rows that train, by step.
    """

    number: int
    steps: Steps
    groups: dict[int, Sequence[int]]
    trains: Tensor | None

    @property
    def front(self) -> int:
        """The step of the row that is farthest."""
        return max(self.groups)

    @property
    def size(self) -> int:
        """A step whose batches are as large as those of all rows that train now."""
        return min(self.groups)


class RowSteps:
    """`steps` [R], int64, on the device; the host keeps the same numbers, so that nobody waits for them.

    Where rows stand at steps whose batches are of different sizes, those that are farther wait for the others.
    """

    def __init__(self, rows: int, slots: int, state: State, curriculum: Curriculum, device: torch.device):
        """Of so many `slots`, of which the first are the rows."""
        self._steps = state.add("step", torch.zeros(slots, dtype=torch.int64, device=device))
        self._held = state.add("held", torch.full((slots,), -1, dtype=torch.int64, device=device))
        self._sizes, self._device = curriculum, device
        self.last = curriculum.steps
        self.number = 0  # of passes so far
        self._holds = False  # whether a row may be held
        self.steps = [0] * rows

    def arrange(self, sources: Sequence[int]) -> None:
        """Each row stands where one of the rows as they were stands."""
        self.steps = [self.steps[row] for row in sources]

    def read(self) -> None:
        """Take over what is on the device; here the host waits for it."""
        self.steps = self._steps.used[: len(self.steps)].tolist()
        self._holds = self._holds or bool((self._held.used >= 0).any())

    def pack_step(self, until: int | None = None) -> PackStep | None:
        """The next pass, or None where every row has come to step `until`, or to the last."""
        stop = self.last if until is None else min(until, self.last)
        first = self.steps[0]
        if self.steps.count(first) == len(self.steps):
            return PackStep(self.number, first, {first: range(len(self.steps))}, None) if first < stop else None
        here = [(row, step) for row, step in enumerate(self.steps) if step < stop]
        if not here:
            return None
        size = self._size(min(step for _, step in here))
        groups: dict[int, Sequence[int]] = {}
        slots = len(self._steps.used)
        trains = torch.zeros(slots, dtype=torch.bool)
        for row, step in here:
            if self._size(step) == size:
                groups[step] = [*groups.get(step, ()), row]
                trains[row] = True
        shown = [min(step, self.last - 1) for step in self.steps]  # one that has finished reads something all the same
        shown += shown[:1] * (slots - len(shown))
        return PackStep(self.number, shown, groups, sent(trains, self._device))

    def done(self, pack_step: PackStep) -> None:
        """The rows that trained stand at their next step."""
        self.number += 1
        self._steps.used.add_(1 if pack_step.trains is None else pack_step.trains)
        for rows in pack_step.groups.values():
            for row in rows:
                self.steps[row] += 1

    @property
    def is_over(self) -> bool:
        """Whether all rows have come to their last step."""
        return min(self.steps) >= self.last

    @property
    def on_device(self) -> Tensor:
        """The step at which each row stands, [R]."""
        return self._steps.used

    def hold(self, where_R: Tensor) -> None:
        """These rows take no step until they are released, or put back."""
        self._held.used.copy_(torch.where(where_R, self._steps.used, self._held.used))
        self._holds = True

    def free(self) -> Tensor | None:
        """The rows that are not held, [R]; None: all are free."""
        return self._held.used < 0 if self._holds else None

    def held(self) -> list[tuple[int, int]]:
        """The rows that are held, and since which step; here the host waits for the device."""
        held = self._held.used[: len(self.steps)].tolist() if self._holds else []
        return [(row, step) for row, step in enumerate(held) if step >= 0]

    def is_held(self, row: int) -> bool:
        """Whether the row waits; here the host waits for the device."""
        return self._holds and bool(self._held.used[row] >= 0)

    def put(self, row: int, step: int) -> bool:
        """The row may go on, at this step; whether that is another one than it would have taken."""
        self.release(row)
        is_other = self.steps[row] != step
        self._steps.used[row] = self.steps[row] = step
        return is_other

    def release(self, row: int) -> None:
        """The row may go on."""
        self._held.used[row] = -1

    def _size(self, step: int) -> tuple[int, int]:
        return int(self._sizes.sequences[step]), int(self._sizes.lengths[step])
