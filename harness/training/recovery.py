"""Climbs the ladders of a pack's trials at their alarms, on the host, and keeps the log of their incidents."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import isfinite
from typing import Any, Protocol

from torch import Tensor

from harness.config import Trial, sections
from harness.config.ladder import ORACLE, Rung, rungs
from harness.config.limits import KEPT_EVENTS
from harness.guards import ASK
from harness.guards.playbook import Playbook, calls, has_oracle
from harness.recovery.base import STANDS, Alarm
from harness.recovery.table import ACTIONS
from harness.training.pack import Pack
from harness.training.provenance import Provenances
from harness.training.sites import Agenda


class Door(Protocol):
    """What is done to rows of a pack in training: `harness.training.answers` does it."""

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

    def freeze(self, row: int, step: int) -> None:
        """It does not."""

    def earliest(self, row: int) -> Mapping[str, Tensor] | None:
        """The oldest sound state that is kept of a row, by name."""


@dataclass
class Book:
    """Where one planned trial stands on its ladder; `front` is the farthest step of the incident's alarms."""

    used: dict[int, int] = field(default_factory=dict)  # times that each rung was used in the incident at hand
    front: int = -1
    over: int = -1  # the incident is over beyond this step, unless there is another alarm up to it
    reached: int | None = None  # the earliest step to which it went back
    stood: int = 0  # times that an action found the alarm to be one still
    waits: dict[str, Any] | None = None  # for a step: place of the rung, action, step, memory
    is_undone: bool = False  # the oracle has spoken
    log: list[dict[str, Any]] = field(default_factory=list)

    def open(self, step: int) -> None:
        """Another incident begins."""
        self.log.append({"step": step, "last": 0, "closed": None, "alarms": 0, "steps_lost": 0, "acts": []})


class Recovery:
    """Of a pack of which some trial has a ladder; `settle` answers what `guard` asks."""

    def __init__(self, door: Door, guard: Playbook):
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
        if book.waits is not None:  # whoever waits is told of every alarm
            told = [ASK] * len(guard.names)
            guard.expect(row, told, told, book.over, book.waits["step"])
            return
        guard.expect(row, calls(trial, guard.names, book.used), calls(trial, guard.names, {}), book.over, -1)

    def settle(self, row: int, step: int) -> bool:
        """Answer what was asked about a row that is held since this step; False: nothing was."""
        alarm = self.guard.alarm(row, step)
        if alarm is None:
            return False
        if not alarm.is_taken and not (isfinite(alarm.loss) and isfinite(alarm.grad_norm)):
            self._door.provenances.explain(row, step)
        patient = Patient(self._door, self, row, alarm)
        self._treat(patient)
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
            patient = Patient(self._door, self, row, alarm)
            self.books.setdefault(number, Book()).is_undone = True
            self._treat(patient)
            patient.finish()
            self._expect(row)

    def _treat(self, patient: Patient) -> None:
        alarm, ladder = patient.alarm, rungs(patient.trial.playbook.ladder)
        book = self.books.setdefault(patient.number, Book())
        waited, book.waits = book.waits, None
        is_inside = alarm.step <= book.over or waited is not None
        if not book.log and is_inside:  # it forked in the middle of an incident of its twin
            book.open(alarm.step)
        if waited is not None:
            patient.place, patient.action = waited["place"], waited["action"]
            patient.used = book.used.get(patient.place, 1) - 1
            options = _options(patient.trial, patient.action)
            detail = ACTIONS[patient.action]().resume(patient, options, waited["memory"])
            self._log(patient, detail)
            self._rest(book, ladder[patient.place])
            if not detail.get(STANDS, False):
                return
            book.stood += 1
        if not alarm.detectors:
            return
        if alarm.step > book.over:
            book.used, book.reached, book.stood = {}, None, 0
            book.open(alarm.step)
        book.front = max(book.front, alarm.step)
        book.log[-1]["alarms"] += 1
        is_broken = not alarm.is_taken and not (isfinite(alarm.loss) and isfinite(alarm.grad_norm))
        for place, rung in enumerate(ladder):
            used = book.used.get(place, 0)
            answers = set(rung.detectors(self.guard.names)) & set(alarm.detectors)
            if not answers or (rung.limit is not None and used >= rung.limit):
                continue
            if is_broken and all(ACTIONS[name].takes for name in rung.actions):
                continue  # that step cannot be taken
            book.used[place], patient.used, patient.place = used + 1, used, place
            if self._climbed(patient, rung):
                self._rest(book, rung)
                return
        patient.action = "none"
        self._log(patient, {})
        if is_broken and not patient.went_back:
            patient.is_frozen = True

    def _climbed(self, patient: Patient, rung: Rung) -> bool:
        """Whether the actions of a rung were done: its first one may find that it cannot be."""
        for place, patient.action in enumerate(rung.actions):
            detail = ACTIONS[patient.action]().do(patient, _options(patient.trial, patient.action))
            if detail is None:
                return place > 0
            self._log(patient, detail)
        if patient.went_back and any(ACTIONS[name].changes_course for name in rung.actions):
            patient.forget_signals()
        return True

    def _rest(self, book: Book, rung: Rung) -> None:
        book.over = max(book.over, book.front + rung.cool_down)
        book.log[-1]["closed"] = book.over + 1

    def _log(self, patient: Patient, detail: Mapping[str, Any]) -> None:
        alarm, incident = patient.alarm, self.books[patient.number].log[-1]
        incident["last"] = max(incident["last"], alarm.step)
        if len(incident["acts"]) < KEPT_EVENTS:
            scores = {name: _number(score) for name, score in alarm.detectors.items()}
            more = {name: value for name, value in detail.items() if name not in ("to", STANDS)}
            act = {"step": alarm.step, "detectors": scores, "loss": _number(alarm.loss)}
            act |= {"grad_norm": _number(alarm.grad_norm), "action": patient.action}
            incident["acts"].append(act | {"to": detail.get("to"), "detail": more})

    def lose(self, number: int, steps: int) -> None:
        """Steps of a trial that were trained in vain, or skipped."""
        if log := self.books[number].log:
            log[-1]["steps_lost"] += steps

    def incidents(self) -> list[list[dict[str, Any]]]:
        """Of each planned trial, the first incidents in its own row."""
        found: list[list[dict[str, Any]]] = []
        for number, trial in enumerate(self._pack.planned):
            log = self.books[number].log[:KEPT_EVENTS] if number in self.books else []
            closed = [None if one["closed"] is None or one["closed"] >= trial.steps else one["closed"] for one in log]
            found.append([one | {"closed": step} for one, step in zip(log, closed, strict=True)])
        return found

    def state(self) -> list[tuple[int, dict[str, Any]]]:
        """What has happened so far, to `restore`."""
        return [(number, asdict(book) | {"used": list(book.used.items())}) for number, book in self.books.items()]

    def restore(self, state: Sequence[tuple[int, Mapping[str, Any]]]) -> None:
        """Go on from what `state` has given."""
        self.books = {number: Book(**{**book, "used": dict(book["used"])}) for number, book in state}
        self.guard.is_new = True


class Patient:
    """One trial's row at an alarm, as actions see it (`harness.recovery.base.Row`)."""

    def __init__(self, door: Door, recovery: Recovery, row: int, alarm: Alarm):
        self._door, self._recovery, self._pack, self.row = door, recovery, door.pack, row
        self.number, self.alarm = self._pack.rows[row], alarm
        self.trial: Trial = self._pack.planned[self.number]
        self.used = self.place = 0
        self.action = ""  # the one that acts
        self.goes_on = alarm.step + 1
        self.went_back = self.is_frozen = self._is_amended = False

    @property
    def _remedy(self) -> Any:
        return self._pack.remedies.of(self.number)

    @property
    def reached(self) -> int | None:
        return self._recovery.books[self.number].reached

    @property
    def is_spared(self) -> bool:
        return self._remedy.is_spared

    @property
    def stood(self) -> int:
        return self._recovery.books[self.number].stood

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
        self._remedy.read_on(self.goes_on, batches)

    @property
    def reads_since(self) -> int:
        return max((step for step, _ in self._remedy.reads), default=0)

    def scale_rate(self, factor: float, steps: int | None) -> None:
        first = self.goes_on
        self._remedy.rates.append((factor, first, None if steps is None else first + steps))

    def scale_embedding(self, factor: float) -> None:
        self._remedy.embedding *= factor

    def amend(self, changes: Mapping[str, Any]) -> None:
        self._remedy.changes.update(changes)
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
        self._remedy.is_spared = is_on

    def disarm(self) -> None:
        self._remedy.is_disarmed = True

    def fault_step(self) -> int | None:
        return self._door.agenda.first_change(self.number)

    def wait(self, step: int, memory: Mapping[str, Any]) -> None:
        memory = {"place": self.place, "action": self.action, "step": step, "memory": dict(memory)}
        self._recovery.books[self.number].waits = memory

    def finish(self) -> None:
        """Let the row go on where it is to."""
        step = self.alarm.step
        if self.is_frozen:
            self._door.freeze(self.row, step)
            return
        self._recovery.lose(
            self.number, step + 1 - self.goes_on if self.goes_on <= step else int(not self.alarm.is_taken)
        )
        self._door.go_on(self.row, self.goes_on)
        if self._is_amended:
            self._pack.refresh()


def _options(trial: Trial, action: str) -> Any:
    key = f"playbook.{action}"
    return trial.section(key) if key in sections() else None


def _number(value: float) -> float | str:
    """As JSON has it, which knows neither NaN nor infinities."""
    return value if isfinite(value) else repr(value)
