"""Which trials of a pack train in a row of their own, and whose values the others share meanwhile.

A faulty trial is its golden twin, bit for bit, until its fault begins: up to there one row serves both, and then the
row is forked. Once the whole state of a faulty trial is again that of its twin, and its fault is over, it is its
twin for good, and its row can go. So N faults at step t of T cost t + N (T - t) steps instead of N T.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from harness.config import NO_FAULT, Trial
from harness.config.limits import KEPT_EVENTS


class Twins:
    """The bookkeeping: numbers are those of the trials as planned.

    `begins` holds the step at which each trial's fault begins, None for none. At least `smallest` trials have a row
    from the first step on, because a pack of fewer would round differently.
    """

    def __init__(self, trials: Sequence[Trial], begins: Sequence[int | None], smallest: int):
        golden = {trial.id: number for number, trial in reversed(list(enumerate(trials))) if trial.fault == NO_FAULT}
        self.leader = [golden.get(t.golden.id) if t.fault != NO_FAULT else None for t in trials]
        self.begins: list[float] = [
            0 if leader is None else float("inf") if begin is None else begin
            for leader, begin in zip(self.leader, begins, strict=True)
        ]
        later = sorted((number for number, begin in enumerate(self.begins) if begin > 0), key=self.begins.__getitem__)
        for number in later[: max(0, smallest - (len(trials) - len(later)))]:
            self.begins[number] = 0
        self.forked: set[int] = set()  # trials that have, or had, a row of their own
        self.masked: dict[int, int] = {}  # trial -> the step after which its state was that of its twin

    def beginning(self, step: int) -> list[int]:
        """The trials that get a row of their own at this step."""
        return [number for number, begin in enumerate(self.begins) if begin == step and number not in self.forked]

    def leave(self, leader: int, step: int) -> list[int]:
        """The trials that shared this twin's row beyond a step to which it goes back: they share it up to there now."""
        later = [n for n in self.forked if self.leader[n] == leader and self.begins[n] > step and n not in self.masked]
        for number in later:
            self.begins[number] = step
        return later

    def shares(self, number: int, step: int) -> int | None:
        """The twin whose row serves this trial at this step, or None if it has its own."""
        if step < self.begins[number] or step > self.masked.get(number, step):
            return self.leader[number]
        return None

    def fill_at(self, step: int, values: np.ndarray) -> None:
        """Give each trial that has no row at this step the values of its twin: [R, ...]."""
        self.fill(step, {"": values[:, None]})

    def fill(self, first_step: int, signals: Mapping[str, np.ndarray]) -> None:
        """Give each trial the values of its twin at the steps that they share: [R, n, ...] from `first_step` on."""
        for number, leader in enumerate(self.leader):
            if leader is None:
                continue
            for values in signals.values():
                n = values.shape[1]
                begin = int(min(max(self.begins[number] - first_step, 0), n))
                end = min(max(self.masked.get(number, first_step + n) + 1 - first_step, 0), n)
                values[number, :begin] = values[leader, :begin]
                values[number, end:] = values[leader, end:]

    def records(self, of_rows: Sequence[Sequence[dict[str, Any]]]) -> list[list[dict[str, Any]]]:
        """The first records of each trial, each with a `step`, with those of its twin at the steps that they shared."""
        records = []
        for number, leader in enumerate(self.leader):
            of_twin = of_rows[leader] if leader is not None else []
            shared = [record for record in of_twin if self.shares(number, record["step"]) is not None]
            alone = [record for record in of_rows[number] if self.shares(number, record["step"]) is None]
            records.append(sorted(shared + alone, key=lambda record: record["step"])[:KEPT_EVENTS])
        return records
