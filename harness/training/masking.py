"""Which faulty trials have become their golden twins again: since which step, by one rule on every device.

A trial whose fault is over is masked after the first step after which its whole state is that of its twin, bit for bit.
Two rows of equal state stay equal, so it is enough to note, on the device, since when they have been: the host asks at
every step on a CPU, where it also compares as little as it can, and once a block of signals elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from harness.basics.devices import on_cpu, sent
from harness.model.formats import raw_words
from harness.training.pack import Pack
from harness.training.row_steps import PackStep

Alike = Callable[[int, int, int], bool]
NEVER = -1


class Masking:
    """`over` has the last step of each planned trial's fault, or None."""

    def __init__(self, pack: Pack, over: Sequence[int | None]):
        self._pack, self._over = pack, over
        self._rows: list[int] = []  # the trials in the slots when `_since` was noted
        self._since: Tensor | None = None  # the step since which each slot is its twin, [S], or NEVER
        self._chosen: dict[tuple[int, ...], Tensor] = {}  # rows -> which slots they are

    def look(self, pack_step: PackStep, loss_R: Tensor, asks: bool, alike: Alike) -> None:
        """After a step of the rows that train: note what is equal, and mark it where the host `asks`.

        `alike` says of a trial, its twin and a step whether what is known of them on the host is equal, too.
        """
        pairs = list(self._pairs(pack_step))
        if on_cpu(self._pack.device):
            self._mark_now(pairs, loss_R, alike)
        elif not pairs:
            self._since = None
        else:
            self._note(pairs, loss_R)
            if asks:
                self._mark_since(pairs, alike)

    def _pairs(self, pack_step: PackStep) -> list[tuple[int, int, int]]:
        """Rows whose fault is over, those of their twins, and the step at which both stand."""
        pack, pairs = self._pack, []
        for step, rows in pack_step.groups.items():
            for row in rows:
                trial = pack.rows[row]
                last, leader = self._over[trial], pack.twins.leader[trial]
                if last is None or last > step or trial in pack.twins.masked or leader is None:
                    continue
                if (twin := pack.place_of(leader)) is not None and twin in rows:
                    pairs.append((row, twin, step))
        return pairs

    def _mark_now(self, pairs: Sequence[tuple[int, int, int]], loss_R: Tensor, alike: Alike) -> None:
        """States are compared only where the loss of this step is equal."""
        pack = self._pack
        if not pairs:
            return
        equal = loss_R[[row for row, _, _ in pairs]] == loss_R[[twin for _, twin, _ in pairs]]
        for is_equal, (row, twin, step) in zip(equal.tolist(), pairs, strict=True):
            is_alike = is_equal and alike(pack.rows[row], pack.rows[twin], step)
            if is_alike and pack.active[[row, twin]].all() and pack.rows_state.equal(row, twin):
                pack.twins.masked[pack.rows[row]] = step

    def _note(self, pairs: Sequence[tuple[int, int, int]], loss_R: Tensor) -> None:
        """What `_mark_now` would find, in a few passes over the state of all rows for each twin."""
        pack, known = self._pack, self._known()
        since = torch.full_like(known, NEVER)
        by_twin: dict[tuple[int, int], list[int]] = {}
        for row, twin, step in pairs:
            by_twin.setdefault((twin, step), []).append(row)
        for (twin, step), rows in by_twin.items():
            equal = (loss_R == loss_R[twin]) & pack.active & pack.active[twin] & self._slots_of(tuple(rows))
            for _, values in pack.rows_state:
                words = raw_words(values)
                equal = equal & (words == words[twin : twin + 1]).reshape(len(words), -1).all(1)
            is_new = (known == NEVER) | (known > step)  # those beyond it went back
            since = torch.where(equal, torch.where(is_new, step, known), since)
        self._since = since

    def _known(self) -> Tensor:
        """What was noted before of the trials that are in the slots now, [S]."""
        pack = self._pack
        if self._since is None or self._rows != pack.rows:
            before = {} if self._since is None else dict(zip(self._rows, self._since.tolist(), strict=False))
            steps = [before.get(trial, NEVER) for trial in pack.rows]
            steps += [NEVER] * (pack.slots.count - len(steps))
            self._rows, self._since = list(pack.rows), sent(torch.tensor(steps), pack.device)
            self._chosen.clear()
        return self._since

    def _slots_of(self, rows: tuple[int, ...]) -> Tensor:
        if rows not in self._chosen:
            self._chosen[rows] = sent(self._pack.slots.of_rows(rows), self._pack.device)
        return self._chosen[rows]

    def _mark_since(self, pairs: Sequence[tuple[int, int, int]], alike: Alike) -> None:
        """Here the host waits for the device."""
        noted, rows = self._known().tolist(), self._pack.rows
        for row, twin, step in pairs:
            fitting = (at for at in range(noted[row], step + 1) if alike(rows[row], rows[twin], at))
            if noted[row] != NEVER and (masked := next(fitting, None)) is not None:
                self._pack.twins.masked[rows[row]] = masked
