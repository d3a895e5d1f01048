"""Snapshots of each row in memory, to which it goes back alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise

import torch
from torch import Tensor

from harness.basics.devices import on_cpu, sent
from harness.model import sums
from harness.model.state import State
from harness.recovery.base import GROWN
from harness.training.pack import Pack
from harness.training.row_steps import PackStep

NONE = -1  # in the place of a step: nothing is kept there


class Snapshots:
    """The newest `kept` sound states of each row, one every `every` steps of its own; in main memory if `on_host`.

    A row is sound if its weights and what its optimizer keeps are finite and nothing was wrong with its last step
    (`quiet`): of one that is not, nothing is kept, and nothing that was kept goes. A row that forks has what its twin
    has, and what a row has kept of steps to before which it goes back is forgotten.
    """

    def __init__(self, pack: Pack, every: int, kept: int, on_host: bool = False, awaits: bool = False):
        """With `awaits` there is room for one more, of a step between two that are due."""
        self._pack, self._every, self._on_host = pack, every, on_host
        rows, self._regular = pack.slots.count, kept
        kept += awaits
        self._kept = State(pack.rows_state.capacity)  # [R, kept, ...] by name
        for name, now in [*pack.rows_state, *self._acts().items()]:
            room = torch.zeros((rows, kept, *now.shape[1:]), dtype=now.dtype, device=self._device(now))
            self._kept.add(name, room)
        steps = torch.full((rows, kept), NONE, dtype=torch.int64, device=pack.device)
        self._steps = self._kept.add("kept_steps", steps)
        pack.beside.append(self._kept)

    def _device(self, now: Tensor) -> torch.device:
        return torch.device("cpu") if self._on_host else now.device

    def _acts(self) -> dict[str, Tensor]:
        """Counts of acts of the rows, [R] each."""
        counts, index = self._pack.acts.state(), self._pack.slots.index
        return {f"acts.{part}": of_trials.index_select(0, index) for part, of_trials in counts.items()}

    def take(self, pack_step: PackStep, quiet_R: Tensor, awaited: Iterable[int] = ()) -> None:
        """Keep the rows for which that is due, in the place of the oldest that each has, and the `awaited` ones.

        No look at the device, but where they are kept in main memory.
        """
        pack = self._pack
        due = [row for step, rows in pack_step.groups.items() if step % self._every == 0 for row in rows]
        more = [row for row in awaited if row not in due and any(row in rows for rows in pack_step.groups.values())]
        due += more
        if not due:
            return
        at, newest = pack.row_steps.on_device, self._steps.used.max(1).values
        place = self._steps.used[:, : self._regular].argmin(1)
        takes = quiet_R & pack.active & self._is_finite() & (at > newest)
        if len(due) < len(pack):
            takes = takes & sent(pack.slots.of_rows(due), pack.device)
        if more:
            place = torch.where(sent(pack.slots.of_rows(more), pack.device), self._regular, place)
        if (free := pack.row_steps.free()) is not None:  # one that is held stands where it was, whatever its step is
            takes = takes & free
        self._copy(takes, place, at)

    def _copy(self, takes_R: Tensor, place_R: Tensor, at_R: Tensor) -> None:
        """Rows that `take` are kept in their place, as those of the step `at` which they stand."""
        now = dict(self._pack.rows_state) | self._acts()
        shared = [(self._steps.used, at_R), *((kept, now[name]) for name, kept in self._kept if name in now)]
        if on_cpu(self._pack.device) or self._on_host:  # the host looks, so that no more is copied than has to be
            places = place_R.tolist()
            for row in takes_R.nonzero()[:, 0].tolist():  # one after the other, so little is temporary
                for kept, values in shared:
                    kept[row, places[row]].copy_(values[row])
            return
        for slot in range(self._steps.used.shape[1]):
            is_here = takes_R & (place_R == slot)
            for kept, values in shared:
                old = kept[:, slot]
                torch.where(is_here.view(-1, *[1] * (values.dim() - 1)), values, old, out=old)

    def _is_finite(self) -> Tensor:
        """Of each row, whether its weights and what its optimizer keeps are finite, [R]."""
        pack, optimizer = self._pack, self._pack.optimizer
        arrays = [pack.weights, *(optimizer.slot(name) for name in (*optimizer.slots, *optimizer.tensor_slots))]
        return torch.stack([sums.total(values) for values in arrays]).isfinite().all(0)

    @property
    def oldest(self) -> int | None:
        """The first step to which a row that trains on could go back; here the host waits for the device.

        None: there is none.
        """
        row_steps = self._pack.row_steps
        rows = len(row_steps.steps)
        kept = zip(self._steps.used[:rows].tolist(), self._pack.active[:rows].tolist(), row_steps.steps, strict=True)
        of_rows = (steps for steps, is_active, now in kept if is_active and now < row_steps.last)
        return min((step for steps in of_rows for step in steps if step != NONE), default=None)

    def find(self, row: int, latest: int) -> tuple[int, int] | None:
        """Step and place of the newest of a row's snapshots of a step up to `latest`; the host waits for the device."""
        steps = enumerate(self._steps.used[row].tolist())
        return max(((step, slot) for slot, step in steps if step != NONE and step <= latest), default=None)

    def sound(self, row: int, latest: int) -> int | None:
        """The step of the newest of those whose weights are not `GROWN` times as large as those of the one before it.

        Such are finite, and yet no update leaves them.
        """
        steps = enumerate(self._steps.used[row].tolist())
        slots: list[tuple[int, int]] = sorted(
            ((step, slot) for slot, step in steps if NONE < step <= latest), reverse=True
        )
        largest = dict(self._kept)["weights"][row].abs().amax(-1).tolist()
        for (step, now), (_, before) in pairwise(slots):
            if largest[now] <= GROWN * largest[before]:
                return step
        return slots[-1][0] if slots else None

    def put_back(self, row: int, latest: int) -> int | None:
        """The row is as it was in the newest of its snapshots of a step up to `latest`, which is returned.

        None, and nothing is done, without such a snapshot. Here the host waits for the device.
        """
        if (found := self.find(row, latest)) is None:
            return None
        steps, (step, slot) = self._steps.used[row], found
        kept = {name: values[row, slot] for name, values in self._kept}
        for name, values in self._pack.rows_state:
            values[row].copy_(kept[name])
        for part, counts in self._pack.acts.state().items():
            counts[self._pack.rows[row]] = kept[f"acts.{part}"]
        steps.masked_fill_(steps > step, NONE)
        self._pack.row_steps.read()
        return step

    def earliest(self, row: int) -> Mapping[str, Tensor] | None:
        """The oldest sound state of a row, by name; None: there is none."""
        fitting = [(step, slot) for slot, step in enumerate(self._steps.used[row].tolist()) if step != NONE]
        return {name: values[row, min(fitting)[1]] for name, values in self._kept} if fitting else None

    def state(self) -> dict[str, Tensor]:
        """What is kept, to `restore`."""
        return self._kept.of_rows(len(self._pack))

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state` has given, with the rows as they were then."""
        for name, values in self._kept.of_rows(len(self._pack)).items():
            values.copy_(state[name])
