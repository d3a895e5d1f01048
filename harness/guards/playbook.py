"""Asks the host what to do at an alarm, where the ladder of a trial has an answer to it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from harness.basics.errors import nearest
from harness.config import Trial
from harness.config.ladder import ANY, ORACLE, Rung, rungs
from harness.detectors.table import DETECTORS
from harness.guards.base import ASK, GO, GO_AND_ASK, Guard, GuardInput, Parts
from harness.model.state import Rows
from harness.recovery.base import Alarm
from harness.recovery.table import ACTIONS

ANSWERS = ASK + 1
UNANSWERED = 1_000_000 * ANSWERS + GO  # beyond every rung


class PlaybookGuard(Guard):
    """Holds a row at an alarm that the next rung of its ladder answers; `harness.incidents.recovery` does the rest.

    What it is to ask about is told by `expect`, row by row, so a healthy step waits for nothing.
    """

    order = 20  # after the detectors

    def __init__(self, parts: Parts):
        super().__init__(parts)
        self.names: tuple[str, ...] = ()  # the detectors that watch
        self.is_new = True  # whether rows have come or gone since `expect` was told of all of them
        self._asked: dict[str, Rows] = {}

    @classmethod
    def is_on(cls, trial: Trial) -> bool:
        return trial.playbook.ladder != "[]"

    def bind(self, trials: Sequence[Trial]) -> None:
        watching, snapshot = trials[0].section("detect").name, trials[0].section("playbook.snapshot")
        self.names = () if watching == "none" else tuple(watching.split("+"))
        self.every = snapshot.every if any(map(goes_back, trials)) else None
        self.kept, self.on_host = snapshot.kept, snapshot.on == "host"
        self.awaits = snapshot.every > 1 and any(map(waits, trials))
        rows, detectors = len(trials), len(self.names)
        self._now = torch.full((rows, detectors), UNANSWERED, device=self.device)
        self._first = self._now.clone()
        self._over = torch.full((rows,), -1, dtype=torch.int64, device=self.device)
        self._awaited, self.is_new = self._over.clone(), True
        self._takes = torch.zeros(rows, dtype=torch.bool, device=self.device)
        if not self._asked:
            # Between the question and the answer rows may come, but no snapshot and no checkpoint is taken.
            like = {
                "step": self._over,
                "values": torch.full((rows, 2), torch.nan, dtype=torch.float64, device=self.device),
                "scores": torch.full((rows, detectors), torch.nan, dtype=torch.float64, device=self.device),
                "alarms": self._now < 0,
                "taken": self._over == 0,
                "late": self._over == 0,
            }
            add = self.parts.state.add
            self._usual = add("playbook_usual", like["scores"].clone())  # scores of the last step without an alarm
            self._asked = {name: add(f"playbook_{name}", values.clone(), scratch=True) for name, values in like.items()}

    def expect(
        self, row: int, now: Sequence[int], first: Sequence[int], over: int, awaited: int = -1, takes: bool = False
    ) -> None:
        """What to answer to each detector in this row: `now`, and `first` at steps beyond `over`.

        That is place * ANSWERS + answer of the rung that it calls, or UNANSWERED; of several detectors the rung that
        comes first is climbed. `awaited` is a step at which to ask without an alarm, too (-1: none), after it is taken
        if it is no alarm or the rung `takes` it. `harness.incidents.escalation.Expectation` has the same for one run.
        """
        self._now[row] = torch.tensor(now, device=self.device)
        self._first[row] = torch.tensor(first, device=self.device)
        self._over[row], self._awaited[row], self._takes[row] = over, awaited, takes

    def judge(self, seen: GuardInput) -> Tensor:
        never = torch.zeros_like(seen.trains)
        silent = never, torch.full_like(seen.loss, torch.nan, dtype=torch.float64), never
        said = [self.parts.alarms.get(name, silent) for name in self.names]
        shown = {"step": seen.step, "values": torch.stack([seen.loss.double(), seen.norm.double()], 1)}
        answer, raised = torch.zeros_like(seen.step, dtype=torch.int8), never
        if said:
            alarms, scores, late = (torch.stack(values, 1) for values in zip(*said, strict=True))
            shown |= {"alarms": alarms, "scores": scores, "late": (late & alarms).any(1)}
            called = torch.where((seen.step > self._over)[:, None], self._first, self._now)
            answer = torch.where(alarms, called, UNANSWERED).amin(1) % ANSWERS
            raised = alarms.any(1)
            is_quiet = seen.trains & ~raised & (seen.step != self._awaited)
            self._usual.used.copy_(torch.where(is_quiet[:, None], scores, self._usual.used))
        # A step that cannot be taken, or whose batch is dropped, is asked about anyway: ASK outvotes other guards.
        is_fine = seen.trains & seen.loss.isfinite() & seen.usable
        is_awaited = seen.here & (seen.step == self._awaited)
        answer = torch.where(is_awaited, torch.where(self._takes | ~raised, GO_AND_ASK, ASK), answer)
        answer = answer * (seen.trains | is_awaited)
        is_waiting = seen.trains & (self._awaited >= 0) & (answer == GO)  # whatever it waits for cannot be reached so
        answer = torch.where((is_waiting | (answer == GO_AND_ASK)) & ~is_fine, ASK, answer)
        shown["taken"], is_asked = answer == GO_AND_ASK, answer != GO
        for name, values in shown.items():
            kept = self._asked[name].used
            kept.copy_(torch.where(is_asked.view(-1, *(1,) * (values.dim() - 1)), values, kept))
        return answer.to(torch.int8)

    @property
    def passes(self) -> Tensor:
        """Of each row, [R], whether it runs steps again whose alarms nobody is asked about."""
        return (self._awaited >= 0) & (self._first == UNANSWERED).all(1)

    def alarm(self, row: int, step: int) -> Alarm | None:
        """What it asks about in a row that is held since this step, once; here the host waits for the device."""
        asked = {name: values.used[row] for name, values in self._asked.items()}
        if int(asked["step"]) != step:
            return None
        asked["step"].fill_(-1)
        scores = dict(zip(self.names, asked["scores"].tolist(), strict=True))
        raised = zip(scores.items(), asked["alarms"].tolist(), strict=True)
        detectors = {name: score for (name, score), is_alarm in raised if is_alarm}
        usual = dict(zip(self.names, self._usual.used[row].tolist(), strict=True))
        loss, norm = asked["values"].tolist()
        return Alarm(step, detectors, loss, norm, bool(asked["taken"]), bool(asked["late"]), scores, usual)


def actions_of(trial: Trial) -> list[str]:
    """The actions that a trial's ladder names."""
    return [name for rung in rungs(trial.playbook.ladder) for name in rung.actions]


def goes_back(trial: Trial) -> bool:
    """Whether snapshots are taken of it."""
    return any(ACTIONS[name].needs_snapshots(trial) for name in actions_of(trial) if name in ACTIONS)


def waits(trial: Trial) -> bool:
    """Whether steps that are awaited are kept beside its snapshots."""
    return any(ACTIONS[name].waits for name in actions_of(trial) if name in ACTIONS)


def has_oracle(trial: Trial) -> bool:
    """Whether the ladder is told of the fault."""
    return any(rung.detector == ORACLE for rung in rungs(trial.playbook.ladder))


def calls(trial: Trial, names: Sequence[str], used: Mapping[int, int]) -> list[int]:
    """For `Playbook.expect`: the first rung that is left for each detector, where rungs were used so often."""
    found = []
    for name in names:
        call = UNANSWERED
        for place, rung in enumerate(rungs(trial.playbook.ladder)):
            if name in rung.detectors(names) and (rung.limit is None or used.get(place, 0) < rung.limit):
                takes = all(ACTIONS[action].takes for action in rung.actions)
                call = place * ANSWERS + (GO_AND_ASK if takes else ASK)
                break
        found.append(call)
    return found


def refused(trial: Trial) -> Iterator[str]:
    """A ladder that cannot be climbed, or never is."""
    watching, ladder = trial.section("detect").name, rungs(trial.playbook.ladder)
    names = [*(() if watching == "none" else watching.split("+")), ORACLE]
    endless: set[str] = set()
    for place, rung in enumerate(ladder):
        key = f"playbook.ladder[{place}]"
        yield from _unknown(key, rung)
        heard, is_known = set(rung.detectors(names[:-1])) & set(names), not list(_unknown(key, rung))
        if not heard and is_known:
            why = f"can never fire beside detect={watching}"
            yield f"{key}.detector={rung.detector}: {why}; allowed: any of {', '.join(names)}"
        elif heard <= endless and is_known:
            yield f"{key}.limit: can never be reached, because those before it have limit=null; allowed: a limit there"
        endless |= heard if rung.limit is None else set()
        known = [ACTIONS[name] for name in rung.actions if name in ACTIONS]
        if rung.limit is None and any(action.goes_back for action in known):
            yield f"{key}.limit=null: {rung.action} goes back, and would do so for ever; allowed: 1 or more"
        if len(known) > 1 and (alone := {"re_execute", "undo", "carry_on"} & set(rung.actions)):
            yield f"{key}.action={rung.action}: {alone.pop()} stands alone; allowed: a rung of its own"
        if "re_execute" in rung.actions and ORACLE in rung.detector.split("+"):
            why = "compares what detectors have seen, and the oracle sees nothing"
            yield f"{key}.action=re_execute: {why}; allowed: beside other detectors"
        if "undo" in rung.actions and rung.detector != ORACLE:
            yield f"{key}.action=undo: only the oracle knows what to undo; allowed: beside detector: {ORACLE}"
    for name in dict.fromkeys(actions_of(trial)):
        if name in ACTIONS:
            yield from _too_far_back(trial, name)
            yield from ACTIONS[name].refused(trial)


def _too_far_back(trial: Trial, name: str) -> Iterator[str]:
    back, snapshot = ACTIONS[name].back(trial), trial.section("playbook.snapshot")
    if back > snapshot.history:
        kept = f"playbook.snapshot.kept={snapshot.kept}, one every {snapshot.every} steps"
        yield f"playbook.{name}.back={back}: beyond the history of {kept}; allowed: 0 to {snapshot.history}"


def _unknown(key: str, rung: Rung) -> Iterator[str]:
    for name in rung.detector.split("+"):
        if name not in (ANY, ORACLE, *DETECTORS):
            hint = nearest(name, DETECTORS)
            yield f"{key}.detector={name}: unknown detector; {hint}allowed: {ANY}, {ORACLE}, {', '.join(DETECTORS)}"
    for name in rung.actions:
        if name not in ACTIONS:
            yield f"{key}.action={name}: unknown action; {nearest(name, ACTIONS)}allowed: {', '.join(ACTIONS)}"
