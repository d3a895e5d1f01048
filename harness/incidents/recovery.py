"""Climbs the ladders of a pack's trials at their alarms, on the host, and keeps the log of their incidents."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Protocol

from torch import Tensor

from harness.config import Trial
from harness.config.ladder import ORACLE, rungs
from harness.guards import ASK
from harness.guards.playbook import UNANSWERED, PlaybookGuard, calls, has_oracle
from harness.incidents import escalation
from harness.incidents.escalation import Book
from harness.nonfinite.provenance import Provenances
from harness.recovery.base import Alarm
from harness.training.pack import Pack
from harness.training.sites import Agenda


class Door(Protocol):
    """What is done to rows of a pack in training: `harness.incidents.guard_runner` does it."""

    pack: Pack
    agenda: Agenda
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

    def __init__(self, door: Door, guard: PlaybookGuard):
        self._door, self._pack, self.guard = door, door.pack, guard
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
            if row is not None and book.waits and self._pack.clock.steps[row] == book.waits["step"]:
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
        pack, guard = self._pack, self.guard
        number, trial = pack.rows[row], pack.planned[pack.rows[row]]
        book = self.books.get(number, Book())
        if book.waits is not None:
            told = [ASK if book.hears_before_awaited else UNANSWERED] * len(guard.names)
            takes = book.takes_awaited(rungs(trial.playbook.ladder), guard.names)
            guard.expect(row, told, told, book.over, book.waits["step"], takes)
            return
        guard.expect(row, calls(trial, guard.names, book.used), calls(trial, guard.names, {}), book.over)

    def settle(self, row: int, step: int) -> bool:
        """Answer what was asked about a row that is held since this step; False: nothing was."""
        alarm = self.guard.alarm(row, step)
        if alarm is None:
            return False
        if escalation.is_broken(alarm):
            self._door.provenances.explain(row, step)
        patient = PackRow(self._door, self, row, alarm)
        escalation.treat(patient, self.books.setdefault(patient.number, Book()), self.guard.names)
        patient.finish()
        self._expect(row)
        return True

    @property
    def has_news(self) -> bool:
        """Whether there are strikes that the oracle has not answered."""
        return any(self._news())

    def _news(self) -> Iterator[tuple[int, int, int]]:
        """(trial, row, step of the first strike)."""
        for number in self._oracles:
            row, step = self._pack.place_of(number), self._door.agenda.first_change(number)
            has_spoken = number in self.books and self.books[number].is_undone
            if row is not None and step is not None and not has_spoken:
                yield number, row, step

    def undo(self) -> None:
        """Let the oracle answer the strikes of the last steps."""
        for number, row, step in list(self._news()):
            nan = float("nan")
            alarm = Alarm(step, {ORACLE: nan}, nan, nan, True)
            patient = PackRow(self._door, self, row, alarm)
            self.books.setdefault(number, Book()).is_undone = True
            escalation.treat(patient, self.books.setdefault(patient.number, Book()), self.guard.names)
            patient.finish()
            self._expect(row)

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


class PackRow:
    """One trial's row at an alarm, as actions see it (`harness.recovery.base.Row`)."""

    def __init__(self, door: Door, recovery: Recovery, row: int, alarm: Alarm):
        self._door, self._recovery, self._pack, self.row = door, recovery, door.pack, row
        self.number, self.alarm = self._pack.rows[row], alarm
        self.trial: Trial = self._pack.planned[self.number]
        self.used = self.place = 0
        self.action = ""  # the one that acts
        self.goes_on = alarm.step + 1
        self.went_back = self.is_frozen = self.is_calm = self._is_amended = False

    @property
    def _intervention(self) -> Any:
        return self._pack.interventions.of(self.number)

    @property
    def reached(self) -> int | None:
        return self._recovery.books[self.number].reached

    @property
    def is_spared(self) -> bool:
        return bool(self._intervention.is_spared)

    def go_back(self, latest: int) -> int | None:
        step = self._door.go_back(self.row, self.alarm.step, latest)
        if step is not None:
            book = self._recovery.books[self.number]
            book.reached = step if book.reached is None else min(book.reached, step)
            self.goes_on = step
            self.went_back = True
        return step

    def newest(self, latest: int) -> int | None:
        return self._door.newest(self.row, latest)

    def redo(self) -> None:
        self._door.agenda.roll_back(self.number, self.alarm.step + 1)
        self.goes_on = self.alarm.step

    def sound(self, latest: int) -> int | None:
        return self._door.sound(self.row, latest)

    def odd_batches(self, step: int, most: int) -> int:
        return self._door.odd_batches(self.row, step, most)

    def read_on(self, batches: int) -> None:
        self._intervention.read_on(self.goes_on, batches)

    @property
    def reads_since(self) -> int:
        return max((step for step, _ in self._intervention.reads), default=0)

    def scale_rate(self, factor: float, steps: int | None) -> None:
        first = self.goes_on
        self._intervention.rates.append((factor, first, None if steps is None else first + steps))

    def scale_embedding(self, factor: float) -> None:
        self._intervention.embedding *= factor

    def amend(self, changes: Mapping[str, Any]) -> None:
        self._intervention.changes.update(changes)
        self._is_amended = True

    def moments(self) -> Mapping[str, Mapping[str, Tensor]]:
        return {name: dict(self._pack.slot(name, self.row)) for name in self._pack.optimizer.slots}

    def earlier_moments(self) -> Mapping[str, Mapping[str, Tensor]] | None:
        kept = self._door.earliest(self.row)
        if kept is None:
            return None
        return {name: dict(self._pack.tensors(kept[name][None], 0)) for name in self._pack.optimizer.slots}

    def forget_moments(self) -> None:
        self._pack.optimizer.forget(self.row)

    def forget_signals(self) -> None:
        self._pack.forget_signals(self.row)

    def on_spare(self, is_on: bool) -> None:
        self._intervention.is_spared = is_on

    def disarm(self) -> None:
        self._intervention.is_disarmed = True

    def fault_step(self) -> int | None:
        return self._door.agenda.first_change(self.number)

    def wait(self, step: int, memory: Mapping[str, Any], takes: bool) -> None:
        self._recovery.books[self.number].wait(self, step, memory, takes)

    def finish(self) -> None:
        """Let the row go on where it is to."""
        step = self.alarm.step
        if self.is_frozen:
            self._door.freeze(self.row, step)
            return
        lost = step + 1 - self.goes_on if self.goes_on <= step else int(not self.alarm.is_taken)
        self._recovery.books[self.number].lose(lost)
        self._door.go_on(self.row, self.goes_on)
        if self.is_calm:
            self._door.calm(self.row)
        if self._is_amended:
            self._pack.refresh()
