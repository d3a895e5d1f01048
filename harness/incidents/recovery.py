"""Climbs the ladders of a pack's trials at their alarms, on the host, and keeps the log of their incidents."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Protocol

from torch import Tensor

from harness.guards.playbook import PlaybookGuard, has_oracle
from harness.incidents.book import Book
from harness.incidents.escalation import expectation, is_broken, oracle_alarm, treat
from harness.incidents.row import IncidentRow
from harness.nonfinite.provenance import Provenances
from harness.recovery.base import Alarm
from harness.training.pack import Pack
from harness.training.sites import FaultSchedule


class HeldRows(Protocol):
    """What is done to rows of a pack in training: `harness.incidents.guard_runner` does it."""

    pack: Pack
    fault_schedule: FaultSchedule
    provenances: Provenances

    def go_back(self, row: int, struck: int, latest: int) -> int | None:
        """To the newest sound snapshot of a step up to `latest`, whose step is returned, without what has struck."""

    def newest(self, row: int, latest: int) -> int | None:
        """The step of that snapshot."""

    def sound(self, row: int, latest: int) -> int | None:
        """The step of the newest one whose weights are of the size of those before."""

    def odd_batches(self, row: int, step: int, most: int) -> int:
        """How many batches from that of a step on are unlike those before; 0 also if more than `most` are."""

    def go_on(self, row: int, step: int) -> None:
        """The row trains on from this step."""

    def calm(self, row: int) -> None:
        """Its last step was right, though it was an alarm: a snapshot may be taken."""

    def freeze(self, row: int, step: int) -> None:
        """It does not."""

    def earliest(self, row: int) -> Mapping[str, Tensor] | None:
        """The oldest sound state that is kept of a row, by name."""


class Recovery:
    """Of a pack of which some trial has a ladder; `settle` answers what `guard` asks."""

    def __init__(self, held: HeldRows, guard: PlaybookGuard):
        self._held, self._pack, self.guard = held, held.pack, guard
        self.books: dict[int, Book] = {}
        self._oracles = [number for number, trial in enumerate(self._pack.planned) if has_oracle(trial)]

    def begin(self) -> None:
        """Tell the guard what to ask about, where rows have come or gone."""
        if self.guard.is_new:
            for row in range(len(self._pack)):
                self._expect(row)
            self.guard.is_new = False

    def awaited(self) -> Iterator[int]:
        """The rows that stand at a step that an action wanted to see again."""
        for number, book in self.books.items():
            row = None if book.waits is None else self._pack.place_of(number)
            if row is not None and book.waits and self._pack.row_steps.steps[row] == book.waits["step"]:
                yield row

    def same(self, trial: int, twin: int, step: int) -> bool:
        """Whether two trials would be answered alike after this step: in the midst of no incident, or of the same."""
        books = [self.books.get(number, Book()) for number in (trial, twin)]
        if all(book.over <= step and book.waits is None for book in books):
            return True
        alone, other = (replace(book, log=[], is_undone=False) for book in books)
        return alone == other

    def fork(self, trial: int, leader: int) -> None:
        """A trial stands on its ladder where its twin does."""
        if leader in self.books:
            self.books[trial] = replace(Book(**asdict(self.books[leader])), log=[])

    def _expect(self, row: int) -> None:
        number = self._pack.rows[row]
        to = expectation(self._pack.planned[number], self.guard.names, self.books.get(number, Book()))
        self.guard.expect(row, to.now, to.first, to.over, to.awaited, to.takes)

    def settle(self, row: int, step: int) -> bool:
        """Answer what was asked about a row that is held since this step; False: nothing was."""
        alarm = self.guard.alarm(row, step)
        if alarm is None:
            return False
        if is_broken(alarm):
            self._held.provenances.explain(row, step)
        self._treat(row, alarm)
        return True

    def _treat(self, row: int, alarm: Alarm) -> None:
        book = self.books.setdefault(self._pack.rows[row], Book())
        handle = PackRow(self._held, row, alarm, book)
        treat(handle, self.guard.names)
        handle.finish()
        self._expect(row)

    @property
    def has_news(self) -> bool:
        """Whether there are strikes that the oracle has not answered."""
        return any(self._news())

    def _news(self) -> Iterator[tuple[int, int, int]]:
        """(trial, row, step of the first strike)."""
        for number in self._oracles:
            row, step = self._pack.place_of(number), self._held.fault_schedule.first_change(number)
            has_spoken = number in self.books and self.books[number].is_undone
            if row is not None and step is not None and not has_spoken:
                yield number, row, step

    def undo(self) -> None:
        """Let the oracle answer the strikes of the last steps."""
        for number, row, step in list(self._news()):
            self.books.setdefault(number, Book()).is_undone = True
            self._treat(row, oracle_alarm(step))

    def incidents(self) -> list[list[dict[str, Any]]]:
        """Of each planned trial, the first incidents in its own row."""
        planned = enumerate(self._pack.planned)
        return [self.books[n].incidents(trial.steps) if n in self.books else [] for n, trial in planned]

    def state(self) -> list[tuple[int, dict[str, Any]]]:
        """What has happened so far, to `restore`."""
        return [(number, asdict(book) | {"used": list(book.used.items())}) for number, book in self.books.items()]

    def restore(self, state: Sequence[tuple[int, Mapping[str, Any]]]) -> None:
        """Go on from what `state` has given."""
        self.books = {number: Book(**{**book, "used": dict(book["used"])}) for number, book in state}
        self.guard.is_new = True


class PackRow(IncidentRow):
    """One trial's row in a pack."""

    def __init__(self, held: HeldRows, index: int, alarm: Alarm, book: Book):
        self._held, self._pack, self._index = held, held.pack, index
        self._number, self._is_amended = self._pack.rows[index], False
        super().__init__(self._pack.planned[self._number], alarm, book, self._pack.interventions.of(self._number))

    def put_back(self, latest: int) -> int | None:
        return self._held.go_back(self._index, self.alarm.step, latest)

    def take_back(self) -> None:
        self._held.fault_schedule.roll_back(self._number, self.alarm.step + 1)

    def newest(self, latest: int) -> int | None:
        return self._held.newest(self._index, latest)

    def sound(self, latest: int) -> int | None:
        return self._held.sound(self._index, latest)

    def odd_batches(self, step: int, most: int) -> int:
        return self._held.odd_batches(self._index, step, most)

    def amend(self, changes: Mapping[str, Any]) -> None:
        super().amend(changes)
        self._is_amended = True

    def moments(self) -> Mapping[str, Mapping[str, Tensor]]:
        return {name: dict(self._pack.slot(name, self._index)) for name in self._pack.optimizer.slots}

    def earlier_moments(self) -> Mapping[str, Mapping[str, Tensor]] | None:
        kept = self._held.earliest(self._index)
        if kept is None:
            return None
        return {name: dict(self._pack.tensors(kept[name][None], 0)) for name in self._pack.optimizer.slots}

    def forget_moments(self) -> None:
        self._pack.optimizer.forget(self._index)

    def forget_signals(self) -> None:
        self._pack.forget_signals(self._index)

    def reset_reference(self) -> None:
        self._pack.objective.reset_reference(self._index)

    def fault_step(self) -> int | None:
        return self._held.fault_schedule.first_change(self._number)

    def finish(self) -> None:
        """Let the row go on where it is to."""
        if self.is_frozen:
            self._held.freeze(self._index, self.alarm.step)
            return
        self.count_lost()
        self._held.go_on(self._index, self.goes_on)
        if self.is_calm:
            self._held.calm(self._index)
        if self._is_amended:
            self._pack.refresh()
