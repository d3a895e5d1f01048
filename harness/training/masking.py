"""Which faulty trials have become their golden twins again: since which step, by one rule on every device.

A trial whose fault is over is masked after the first step after which its whole state is that of its twin, bit for bit.
Two rows of equal state stay equal, so it is enough to note, on the device, since when they have been: the host asks at
every step on a CPU, where it also compares as little as it can, and once a block of signals elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from harness.basics.devices import on_cpu
from harness.model.formats import raw_words
from harness.training.clock import Tick
from harness.training.pack import Pack

Alike = Callable[[int, int, int], bool]
NEVER = -1


class Masking:
    """`over` has the last step of each planned trial's fault, or None; `alike` says of a trial, its twin and a step
    whether what is known of them on the host is equal, too.
    """

    def __init__(self, pack: Pack, over: Sequence[int | None], alike: Alike):
        self._pack, self._over, self._alike = pack, over, alike
        self._since: dict[int, Tensor] = {}  # planned trial -> the step since which it is its twin, [], or NEVER

    def look(self, tick: Tick, loss_R: Tensor, asks: bool) -> None:
        """After a step of the rows that train: note what is equal, and mark it where the host `asks`."""
        pairs = list(self._pairs(tick))
        if on_cpu(self._pack.device):
            self._mark_now(pairs, loss_R)
            return
        paired = {self._pack.rows[row] for row, _, _ in pairs}
        self._since = {trial: since for trial, since in self._since.items() if trial in paired}
        by_twin: dict[tuple[int, int], list[int]] = {}
        for row, twin, step in pairs:
            by_twin.setdefault((twin, step), []).append(row)
        for (twin, step), rows in by_twin.items():
            self._note(rows, twin, step, loss_R)
        if asks:
            self._mark_since(pairs)

    def _pairs(self, tick: Tick) -> list[tuple[int, int, int]]:
        """Rows whose fault is over, those of their twins, and the step at which both stand."""
        pack, pairs = self._pack, []
        for step, rows in tick.groups.items():
            for row in rows:
                trial = pack.rows[row]
                last, leader = self._over[trial], pack.twins.leader[trial]
                if last is None or last > step or trial in pack.twins.masked or leader is None:
                    continue
                if (twin := pack.place_of(leader)) is not None and twin in rows:
                    pairs.append((row, twin, step))
        return pairs

    def _mark_now(self, pairs: Sequence[tuple[int, int, int]], loss_R: Tensor) -> None:
        """States are compared only where the loss of this step is equal."""
        pack = self._pack
        if not pairs:
            return
        equal = loss_R[[row for row, _, _ in pairs]] == loss_R[[twin for _, twin, _ in pairs]]
        for is_equal, (row, twin, step) in zip(equal.tolist(), pairs, strict=True):
            is_alike = is_equal and self._alike(pack.rows[row], pack.rows[twin], step)
            if is_alike and pack.active[[row, twin]].all() and pack.rows_state.equal(row, twin):
                pack.twins.masked[pack.rows[row]] = step

    def _note(self, rows: Sequence[int], twin: int, step: int, loss_R: Tensor) -> None:
        """What `_mark_now` would find of the rows with this twin, [R], in a few passes over the state of all."""
        pack = self._pack
        equal = (loss_R == loss_R[twin]) & pack.active & pack.active[twin]
        for _, values in pack.rows_state:
            words = raw_words(values)
            equal = equal & (words == words[twin : twin + 1]).reshape(len(words), -1).all(1)
        for row in rows:
            before = self._since.get(pack.rows[row])
            since = torch.full_like(equal[row], NEVER, dtype=torch.int64) if before is None else before
            is_new = (since == NEVER) | (since > step)  # it went back
            self._since[pack.rows[row]] = torch.where(equal[row], torch.where(is_new, step, since), NEVER)

    def _mark_since(self, pairs: Sequence[tuple[int, int, int]]) -> None:
        """Here the host waits for the device."""
        if not pairs:
            return
        trials = [(self._pack.rows[row], self._pack.rows[twin], step) for row, twin, step in pairs]
        noted = torch.stack([self._since[trial] for trial, _, _ in trials]).tolist()
        for since, (trial, twin, step) in zip(noted, trials, strict=True):
            alike = (at for at in range(since, step + 1) if self._alike(trial, twin, at))
            if since != NEVER and (masked := next(alike, None)) is not None:
                self._pack.twins.masked[trial] = masked
