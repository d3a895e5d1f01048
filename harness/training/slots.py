"""Where the rows of a pack stand in its arrays, and how those are cut into parts that pass through the model together.

On an accelerator parts are of one size, a power of two, and filled up with idle slots: then the kernels that a trial
meets, and so its bits, do not depend on how many others there are, and rows may come and go between two sizes without
anything being made anew. An idle slot holds a copy of some row and is never active. A CPU has no idle slots, because
there each would cost its share.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from harness.training.pack_sizes import cut


class Slots:
    """`rows[i]` is the planned number of the trial in slot i; there are `count` slots, of which those behind are idle.

    `index` [S] has the planned number of each slot, that of the first row where it is idle. `at_once` rows pass through
    the model together, about.
    """

    def __init__(self, trials: int, at_once: int, device: torch.device):
        self.trials, self._at_once, self._device = trials, at_once, device
        self.rows: list[int] = []

    def arrange(self, rows: Sequence[int]) -> None:
        """These trials are the rows now, in this order."""
        self.rows, self.parts = list(rows), self.cut(len(rows))
        self.count = self.parts[-1].stop
        self.planned = [*self.rows, *self.rows[:1] * (self.count - len(self.rows))]
        self.row_of = {planned: row for row, planned in enumerate(self.rows)}
        self.index = torch.tensor(self.planned, device=self._device)
        places = [self.row_of.get(number, -1) for number in range(self.trials)]
        self._place = torch.tensor([max(0, place) for place in places], device=self._device)
        self._has_row = torch.tensor([place >= 0 for place in places], device=self._device)

    def cut(self, rows: int) -> list[slice]:
        """The parts of so many rows, idle slots included."""
        return cut(rows, self._at_once, self._device)

    def sources(self, rows: Sequence[int]) -> list[int]:
        """Of which slot each slot becomes a copy, where the rows become copies of these: idle ones of the first."""
        return [*rows, *[0] * (self.cut(len(rows))[-1].stop - len(rows))]

    def update(self, of_trials: Tensor, of_slots: Tensor, where_S: Tensor | None) -> None:
        """Write what rows have, [S, ...], to their trials, [trials, ...]: those that `where` chooses, [S]; None: all.

        A gather and a choice, because writing by an index, made deterministic, sorts on a GPU.
        """
        here = self._has_row if where_S is None else self.of_trials(where_S)
        gathered = of_slots.index_select(0, self._place)
        of_trials.copy_(torch.where(here.view(-1, *[1] * (gathered.dim() - 1)), gathered, of_trials))

    def of_trials(self, where_S: Tensor) -> Tensor:
        """Which trials have a row that `where` chooses, [trials]."""
        return self._has_row & where_S.index_select(0, self._place)

    def of_rows(self, rows: Sequence[int]) -> Tensor:
        """Which slots these rows are, [S], on the host."""
        here = torch.zeros(self.count, dtype=torch.bool)
        here[list(rows)] = True
        return here
