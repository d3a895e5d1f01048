"""A run at an alarm, as actions see it: what is the same for a row of a pack and for the user's own loop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from harness.config import Trial
from harness.incidents.book import Book
from harness.recovery.base import Alarm
from harness.training.interventions import Intervention


class IncidentRow:
    """A `harness.recovery.base.Row` over a book and an intervention; subclasses read and write its tensors."""

    def __init__(self, trial: Trial, alarm: Alarm, book: Book, intervention: Intervention):
        self.trial, self.alarm, self.book, self.intervention = trial, alarm, book, intervention
        self.used = self.place = 0  # of the rung
        self.action = ""  # the one that acts
        self.goes_on = alarm.step + 1
        self.went_back = False
        self.is_frozen = False  # no rung is left for what cannot be trained on
        self.is_calm = False  # the alarm was right, and the step was taken: what comes of it is as sound as it was

    # --- what a subclass does ------------------------------------------------------------------------------------

    def put_back(self, latest: int) -> int | None:
        """Put back the newest sound snapshot of a step up to `latest`, without what has struck since; its step."""
        raise NotImplementedError

    def take_back(self) -> None:
        """Undo the step at hand, and let what has struck in it count as not struck."""
        raise NotImplementedError

    def newest(self, latest: int) -> int | None:
        raise NotImplementedError

    def sound(self, latest: int) -> int | None:
        raise NotImplementedError

    def odd_batches(self, step: int, most: int) -> int:
        raise NotImplementedError

    def moments(self) -> Mapping[str, Mapping[str, Tensor]]:
        raise NotImplementedError

    def earlier_moments(self) -> Mapping[str, Mapping[str, Tensor]] | None:
        raise NotImplementedError

    def forget_moments(self) -> None:
        raise NotImplementedError

    def forget_signals(self) -> None:
        raise NotImplementedError

    def reset_reference(self) -> None:
        raise NotImplementedError

    def fault_step(self) -> int | None:
        raise NotImplementedError

    # --- what is the same ----------------------------------------------------------------------------------------

    @property
    def reached(self) -> int | None:
        return self.book.reached

    @property
    def is_spared(self) -> bool:
        return self.intervention.is_spared

    def go_back(self, latest: int) -> int | None:
        step = self.put_back(latest)
        if step is not None:
            self.book.reach(step)
            self.goes_on, self.went_back = step, True
        return step

    def redo(self) -> None:
        self.take_back()
        self.goes_on = self.alarm.step

    def read_on(self, batches: int) -> None:
        self.intervention.read_on(self.goes_on, batches)

    @property
    def reads_since(self) -> int:
        return max((step for step, _ in self.intervention.reads), default=0)

    def scale_rate(self, factor: float, steps: int | None) -> None:
        first = self.goes_on
        self.intervention.rates.append((factor, first, None if steps is None else first + steps))

    def route_stale(self, steps: int | None) -> None:
        first = self.goes_on
        self.intervention.stale.append((first, None if steps is None else first + steps))

    def raise_penalty(self, factor: float, least: float) -> float:
        key = "policy.beta"
        now = self.intervention.changes.get(key, self.trial.section("policy").beta)
        beta = max(now * factor, least)
        self.amend({key: beta})
        return float(beta)

    def scale_embedding(self, factor: float) -> None:
        self.intervention.embedding *= factor

    def amend(self, changes: Mapping[str, Any]) -> None:
        self.intervention.changes.update(changes)

    def on_spare(self, is_on: bool) -> None:
        self.intervention.is_spared = is_on

    def disarm(self) -> None:
        self.intervention.is_disarmed = True

    def wait(self, step: int, memory: Mapping[str, Any], takes: bool) -> None:
        self.book.wait(self.place, self.action, step, memory, takes)

    def count_lost(self) -> None:
        """Have the book count the steps that the answer has cost; none where the run ends here."""
        if not self.is_frozen:
            is_back = self.goes_on <= self.alarm.step
            self.book.lose(self.alarm.step + 1 - self.goes_on if is_back else int(not self.alarm.is_taken))
