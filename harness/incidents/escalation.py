"""Where a run stands on its ladder of answers to alarms, and what is done at the next one; whose run it is, is open."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, Protocol

from harness.config import Trial, sections
from harness.config.ladder import Rung, rungs
from harness.config.limits import KEPT_EVENTS
from harness.recovery.base import STANDS, Alarm, Row
from harness.recovery.table import ACTIONS


@dataclass
class Book:
    """Where one run stands on its ladder; `front` is the farthest step of the incident's alarms."""

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

    def rest(self, rung: Rung) -> None:
        """The rung was climbed: the incident is over after its cool-down, if nothing more is seen."""
        self.over = max(self.over, self.front + rung.cool_down)
        self.log[-1]["closed"] = self.over + 1

    def lose(self, steps: int) -> None:
        """Steps that were trained in vain, or skipped."""
        if self.log:
            self.log[-1]["steps_lost"] += steps

    def incidents(self, steps: int) -> list[dict[str, Any]]:
        """The first incidents of a run of so many steps; one that is not over at its end has `closed` None."""
        log = self.log[:KEPT_EVENTS]
        closed = [None if one["closed"] is None or one["closed"] >= steps else one["closed"] for one in log]
        return [one | {"closed": step} for one, step in zip(log, closed, strict=True)]

    def wait(self, patient: RowHandle, step: int, memory: Mapping[str, Any], takes: bool) -> None:
        """The patient's action is asked again at that step; `takes` it if no rung comes after."""
        asks = {"place": patient.place, "action": patient.action, "step": step, "memory": dict(memory)}
        self.waits = asks | {"takes": takes}

    @property
    def hears_before_awaited(self) -> bool:
        """Whether alarms at steps before the one that is awaited are asked about, where these are finite.

        Not where the same steps are run again: what was an alarm there at first, and was right, is one again.
        """
        return self.waits is not None and not self.waits["takes"]

    def takes_awaited(self, ladder: Sequence[Rung], names: Sequence[str]) -> bool:
        """Whether the step that is awaited is taken before it is asked about, be it an alarm or not."""
        return self.waits is not None and self.waits["takes"] and _is_last(ladder, self.waits["place"], names)


class RowHandle(Row, Protocol):
    """A run at an alarm, with what the climber notes of it."""

    place: int  # of the rung
    action: str  # the one that acts
    went_back: bool
    is_frozen: bool  # no rung is left for what cannot be trained on
    is_calm: bool  # the alarm was found to be right, and the step was taken: what comes of it is as sound as it was


def treat(patient: RowHandle, book: Book, names: Sequence[str]) -> None:
    """Do what the ladder of a run says about its alarm, where the detectors `names` watch."""
    alarm, ladder = patient.alarm, rungs(patient.trial.playbook.ladder)
    waited, book.waits = book.waits, None
    is_inside = alarm.step <= book.over or waited is not None
    if not book.log and is_inside:  # it forked in the middle of an incident of its twin
        book.open(alarm.step)
    if waited is not None:
        patient.place, patient.action = waited["place"], waited["action"]
        patient.used = book.used.get(patient.place, 1) - 1
        options = _options(patient.trial, patient.action)
        detail = ACTIONS[patient.action]().resume(patient, options, waited["memory"])
        _log(patient, book, detail)
        book.rest(ladder[patient.place])
        if not detail.get(STANDS, False):
            return
        book.stood += 1
        if alarm.is_taken and _is_last(ladder, waited["place"], names):
            patient.is_calm = True
            return
    if not alarm.detectors:
        return
    if alarm.step > book.over:
        book.used, book.reached, book.stood = {}, None, 0
        book.open(alarm.step)
    book.front = max(book.front, alarm.step)
    book.log[-1]["alarms"] += 1
    for place, rung in enumerate(ladder):
        used = book.used.get(place, 0)
        answers = set(rung.detectors(names)) & set(alarm.detectors)
        if not answers or (rung.limit is not None and used >= rung.limit):
            continue
        if waited is not None and place == waited["place"]:
            continue  # it has spoken
        if book.stood and _waits(rung) and not _is_last(ladder, place, names):
            continue  # it has found that alarms of this incident are right
        if is_broken(alarm) and all(ACTIONS[name].takes for name in rung.actions):
            continue  # that step cannot be taken
        book.used[place], patient.used, patient.place = used + 1, used, place
        if _climbed(patient, book, rung):
            book.rest(rung)
            return
    patient.action = "none"
    _log(patient, book, {})
    if is_broken(alarm) and not patient.went_back:
        patient.is_frozen = True


def _waits(rung: Rung) -> bool:
    return any(ACTIONS[name].waits for name in rung.actions)


def _is_last(ladder: Sequence[Rung], place: int, names: Sequence[str]) -> bool:
    """Whether no later rung answers a detector that this one does."""
    heard = set(ladder[place].detectors(names))
    return not any(heard & set(rung.detectors(names)) for rung in ladder[place + 1 :])


def is_broken(alarm: Alarm) -> bool:
    """Whether the step was not taken, and cannot be."""
    return not alarm.is_taken and not (isfinite(alarm.loss) and isfinite(alarm.grad_norm))


def _climbed(patient: RowHandle, book: Book, rung: Rung) -> bool:
    """Whether the actions of a rung were done: its first one may find that it cannot be."""
    for place, patient.action in enumerate(rung.actions):
        detail = ACTIONS[patient.action]().do(patient, _options(patient.trial, patient.action))
        if detail is None:
            return place > 0
        _log(patient, book, detail)
    if patient.went_back and any(ACTIONS[name].changes_course for name in rung.actions):
        patient.forget_signals()
    return True


def _log(patient: RowHandle, book: Book, detail: Mapping[str, Any]) -> None:
    alarm, incident = patient.alarm, book.log[-1]
    incident["last"] = max(incident["last"], alarm.step)
    if len(incident["acts"]) < KEPT_EVENTS:
        scores = {name: _number(score) for name, score in alarm.detectors.items()}
        more = {name: value for name, value in detail.items() if name not in ("to", STANDS)}
        act = {"step": alarm.step, "detectors": scores, "loss": _number(alarm.loss)}
        act |= {"grad_norm": _number(alarm.grad_norm), "action": patient.action}
        incident["acts"].append(act | {"to": detail.get("to"), "detail": more})


def _options(trial: Trial, action: str) -> Any:
    key = f"playbook.{action}"
    return trial.section(key) if key in sections() else None


def _number(value: float) -> float | str:
    """As JSON has it, which knows neither NaN nor infinities."""
    return value if isfinite(value) else repr(value)
