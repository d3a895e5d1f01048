"""What is done at an alarm, rung by rung, and what a run is to do at the next one; whose run it is, is open."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, nan
from typing import Any

from harness.config import Trial, sections
from harness.config.ladder import ORACLE, Rung, rungs
from harness.config.limits import KEPT_EVENTS
from harness.guards.base import ASK, FREEZE, GO, GO_AND_ASK
from harness.guards.playbook import ANSWERS, UNANSWERED, calls
from harness.incidents.book import Book
from harness.incidents.row import IncidentRow
from harness.recovery.base import STANDS, Alarm
from harness.recovery.table import ACTIONS


@dataclass(frozen=True)
class Expectation:
    """What to answer to each detector: `now`, and `first` at steps beyond `over`; see `PlaybookGuard.expect`."""

    now: list[int]
    first: list[int]
    over: int
    awaited: int = -1
    takes: bool = False

    def answer(self, step: int, raised: Sequence[bool], is_finite: bool) -> int:
        """GO, GO_AND_ASK or ASK, as `PlaybookGuard.judge` has it for a row; FREEZE: not finite, and nobody is asked.

        `raised` says of each detector whether this step is an alarm of its.
        """
        called = self.first if step > self.over else self.now
        answer = min((call for call, is_alarm in zip(called, raised, strict=True) if is_alarm), default=UNANSWERED)
        answer %= ANSWERS
        if step == self.awaited:
            answer = GO_AND_ASK if self.takes or not any(raised) else ASK
        if is_finite:
            return answer
        is_waiting = self.awaited >= 0 and answer == GO  # whatever it waits for cannot be reached so
        return ASK if is_waiting or answer == GO_AND_ASK else FREEZE if answer == GO else answer


def expectation(trial: Trial, names: Sequence[str], book: Book) -> Expectation:
    """What a run is to do at the next alarm of the detectors `names`."""
    if book.waits is None:
        return Expectation(calls(trial, names, book.used), calls(trial, names, {}), book.over)
    told = [ASK if book.hears_before_awaited else UNANSWERED] * len(names)
    is_last = _is_last(rungs(trial.playbook.ladder), book.waits["place"], names)
    return Expectation(told, told, book.over, book.waits["step"], book.waits["takes"] and is_last)


def oracle_alarm(step: int) -> Alarm:
    """The alarm that asks the oracle, after the step in which a fault has struck."""
    return Alarm(step, {ORACLE: nan}, nan, nan, True)


def treat(row: IncidentRow, names: Sequence[str]) -> None:
    """Do what the ladder of a run says about its alarm, where the detectors `names` watch."""
    alarm, book, ladder = row.alarm, row.book, rungs(row.trial.playbook.ladder)
    waited, book.waits = book.waits, None
    is_inside = alarm.step <= book.over or waited is not None
    if not book.log and is_inside:  # it forked in the middle of an incident of its twin
        book.open(alarm.step)
    if waited is not None and not _still_stands(row, waited, ladder, names):
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
        book.used[place], row.used, row.place = used + 1, used, place
        if _climbed(row, rung):
            book.rest(rung)
            return
    row.action = "none"
    _log(row, {})
    if is_broken(alarm) and not row.went_back:
        row.is_frozen = True


def _still_stands(row: IncidentRow, waited: Mapping[str, Any], ladder: Sequence[Rung], names: Sequence[str]) -> bool:
    """Ask the action that has waited for this step; whether the alarm is one still, for the next rung to answer."""
    row.place, row.action = waited["place"], waited["action"]
    row.used = row.book.used.get(row.place, 1) - 1
    detail = ACTIONS[row.action]().resume(row, _options(row.trial, row.action), waited["memory"])
    _log(row, detail)
    row.book.rest(ladder[row.place])
    if not detail.get(STANDS, False):
        return False
    row.book.stood += 1
    row.is_calm = row.alarm.is_taken and _is_last(ladder, waited["place"], names)
    return not row.is_calm


def _waits(rung: Rung) -> bool:
    return any(ACTIONS[name].waits for name in rung.actions)


def _is_last(ladder: Sequence[Rung], place: int, names: Sequence[str]) -> bool:
    """Whether no later rung answers a detector that this one does."""
    heard = set(ladder[place].detectors(names))
    return not any(heard & set(rung.detectors(names)) for rung in ladder[place + 1 :])


def is_broken(alarm: Alarm) -> bool:
    """Whether the step was not taken, and cannot be."""
    return not alarm.is_taken and not (isfinite(alarm.loss) and isfinite(alarm.grad_norm))


def _climbed(row: IncidentRow, rung: Rung) -> bool:
    """Whether the actions of a rung were done: its first one may find that it cannot be."""
    for place, row.action in enumerate(rung.actions):
        detail = ACTIONS[row.action]().do(row, _options(row.trial, row.action))
        if detail is None:
            return place > 0
        _log(row, detail)
    if row.went_back and any(ACTIONS[name].changes_course for name in rung.actions):
        row.forget_signals()
    return True


def _log(row: IncidentRow, detail: Mapping[str, Any]) -> None:
    """Add what the row's action did to the incident at hand, as it is stored: the first KEPT_EVENTS actions alone."""
    alarm, incident = row.alarm, row.book.log[-1]
    incident["last"] = max(incident["last"], alarm.step)
    if len(incident["acts"]) < KEPT_EVENTS:
        scores = {name: _number(score) for name, score in alarm.detectors.items()}
        more = {name: value for name, value in detail.items() if name not in ("to", STANDS)}
        act = {"step": alarm.step, "detectors": scores, "loss": _number(alarm.loss)}
        act |= {"grad_norm": _number(alarm.grad_norm), "action": row.action}
        incident["acts"].append(act | {"to": detail.get("to"), "detail": more})


def _options(trial: Trial, action: str) -> Any:
    key = f"playbook.{action}"
    return trial.section(key) if key in sections() else None


def _number(value: float) -> float | str:
    """As JSON has it, which knows neither NaN nor infinities."""
    return value if isfinite(value) else repr(value)
