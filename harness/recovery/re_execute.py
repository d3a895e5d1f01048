"""The last steps once more: what differs was a fault, and has been repaired by that."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from harness.config import PER_TRIAL, Trial, choice, number
from harness.recovery.base import STANDS, Action, Alarm, Detail, Row

TRANSIENT, PERSISTENT, DATA, CORRECT = "transient", "persistent", "data", "correct"
"""The verdicts: another value the second time; the same there, and another on another device; the same on both, and no
alarm with another batch; and an alarm with every batch, on every device: the result is right, and the run is not."""
ODD, ANY_BATCH = "odd", "any"
AGAIN, SPARE, OTHER_DATA = "again", "spare", "other data"  # what is tried


@dataclass(frozen=True)
class Options:
    """`playbook.re_execute.*`."""

    back: int = number(PER_TRIAL, 0, "steps before the alarm that are run again as well, at least", low=0)
    deepest: int = number(PER_TRIAL, 10, "steps before it from which they are run again at most", low=0)
    patience: int = number(
        PER_TRIAL, 2, "transient faults in an incident after which the trial stays on another device", low=1
    )
    batches: int = number(PER_TRIAL, 8, "batches that are left out at most, to find one without an alarm", low=0)
    data: str = choice(PER_TRIAL, ANY_BATCH, "which may be left out: those odd by their tokens, or any", ODD, ANY_BATCH)


@dataclass(frozen=True)
class Try:
    """What is run again: from so many steps before the alarm, with batches that come so many later."""

    kind: str
    before: int
    ahead: int = 0


def tries(options: Options, before: int, is_late: bool, odd: int, history: int) -> list[Try]:
    """What is tried in turn: from `before` steps before the alarm, with other batches, and from further back.

    That is as far back as snapshots surely go, `history` steps, and no further than `options.deepest`.

    Where `odd` batches are unlike those before, what comes after them is tried second. Where others may be left out at
    all (`options.data`), one batch is tried before an earlier step, and the others after it, because a weight that few
    batches read may be what is wrong. An alarm that `is_late` speaks of weights and moments, and so of earlier steps.
    """
    others = [Try(OTHER_DATA, before, odd)] if odd else []
    first = [Try(AGAIN, before), *others, Try(SPARE, before)]
    powers = range(options.batches.bit_length() if options.data == ANY_BATCH else 0)
    batches = [Try(OTHER_DATA, before, 2**power) for power in powers]
    deeper, deepest = [], min(options.deepest, history)
    while before < deepest:
        before = min(2 * before + 1, deepest)
        deeper.append(Try(AGAIN, before))
    last = [Try(SPARE, before)] if deeper else []
    if is_late:
        return [*first, *deeper, *last, *batches]
    return [*first, *batches[:1], *deeper[:1], *batches[1:], *deeper[1:], *last]


class ReExecute(Action):
    """Runs the steps up to the alarm again, and compares loss, gradient norm and scores bit for bit.

    The step again, from a snapshot whose weights are sound. Other values: a transient fault, and what came out now is
    right; at the second one in an incident the device is taken for a bad one, and the trial stays on another. The same,
    and the batch is unlike those before by its tokens alone: the first that is not is tried, and if that is no alarm,
    the others were bad, and are left out. Else once more on another device, where a permanent fault does not strike.
    The same there: where any batch may be left out, with another one, 1, 2, 4, ... further on; if that is no alarm, and
    its scores are nearer to what was usual than to the alarm's, the batch was bad. If not, the state may have been bad
    before: once more from 1, 3, 7, ... steps before, and from there on another device. Always the same: the result is
    right. The step was taken then, or if other rungs answer the alarm they are asked, until the incident is over. What
    is known only after a step is looked for in the step before and in earlier ones, and then with other batches.
    """

    goes_back = waits = True
    source = "Megatron-LM, core/rerun_state_machine.py, which looks at the current step alone"

    @classmethod
    def back(cls, trial: Trial) -> int:
        back: int = trial.section("playbook.re_execute").back
        return back

    def do(self, row: Row, options: Any) -> Detail | None:
        alarm = row.alarm
        before = max(options.back, int(alarm.is_late and row.newest(alarm.step - 1) is not None))
        newest, sound = row.newest(alarm.step - before), row.sound(alarm.step - before)
        if newest is None or sound is None:
            return None
        if sound < newest:
            before = alarm.step - sound
        half = {name: repr((score + alarm.usual[name]) / 2) for name, score in alarm.detectors.items()}
        odd = row.odd_batches(alarm.step - before, options.batches)
        memory = {"before": before, "late": alarm.is_late, "odd": odd, "half": half, "went": {}}
        memory |= {"home": row.is_spared, "seen": _seen(alarm, alarm.detectors)}
        began = self._begin_next(row, options, memory, 0)
        return None if began is None else {**began, **({"odd": odd} if odd else {})}

    def resume(self, row: Row, options: Any, memory: Mapping[str, Any]) -> Detail:
        alarm, seen = row.alarm, memory["seen"]
        kind, is_alarm = memory["kind"], bool(alarm.detectors)
        if kind == OTHER_DATA:
            if not is_alarm and _is_calm(alarm, memory):
                return {"verdict": DATA, "batches": memory["ahead"]}
            if not is_alarm:
                memory = {"quiet": memory["ahead"], "quiet_to": memory["to"], **memory}
            row.read_on(-memory["ahead"])
        elif _seen(alarm, seen["scores"]) != seen:
            verdict = PERSISTENT if kind == SPARE else TRANSIENT
            if verdict == PERSISTENT or row.used + 1 >= options.patience:
                row.on_spare(True)
            went = memory["went"]
            if verdict == PERSISTENT and went.get(AGAIN, alarm.step) < went[SPARE]:
                # What led here was trained on the device at fault.
                return {"verdict": verdict, "to": row.go_back(went[AGAIN]), "spare": True}
            return {"verdict": verdict, STANDS: is_alarm, "spare": row.is_spared}
        row.on_spare(memory["home"])
        if (began := self._begin_next(row, options, memory, memory["tried"] + 1)) is not None:
            return began
        if "quiet" not in memory:
            return {"verdict": CORRECT, STANDS: True}
        if row.newest(memory["quiet_to"]) == memory["quiet_to"]:
            row.go_back(memory["quiet_to"])
        elif not alarm.is_taken:
            row.redo()
        row.read_on(memory["quiet"])
        return {"verdict": DATA, "batches": memory["quiet"]}

    def _begin_next(self, row: Row, options: Any, memory: Mapping[str, Any], first: int) -> Detail | None:
        """Begin the first try from this place of the plan on that can be made; None: there is none."""
        history = row.trial.section("playbook.snapshot").history
        plan = tries(options, memory["before"], memory["late"], memory["odd"], history)
        for place, one in enumerate(plan[first:], first):
            if (to := self._begin(row, one, memory)) is None:
                continue
            # What lies between the snapshot and the bad batch is left out, too.
            ahead = one.ahead + memory["seen"]["step"] - one.before - to if one.kind == OTHER_DATA else 0
            row.on_spare(one.kind == SPARE or memory["home"])
            row.read_on(ahead)
            went = memory["went"] if one.kind == OTHER_DATA else {**memory["went"], one.kind: to}
            now = {"tried": place, "kind": one.kind, "ahead": ahead, "went": went, "to": to}
            row.wait(memory["seen"]["step"], {**memory, **now}, takes=one.kind != OTHER_DATA)
            told = {"tried": one.kind if place else "", "before": one.before, "batches": ahead}
            return {"to": to} | {name: value for name, value in told.items() if value}
        return None

    def _begin(self, row: Row, one: Try, memory: Mapping[str, Any]) -> int | None:
        """The step from which it is run again; None: there is no snapshot, or none that was not tried."""
        step: int = memory["seen"]["step"]
        to = row.newest(step - one.before)
        stands = row.alarm.step == step and not row.alarm.is_taken
        if one.kind == OTHER_DATA and one.before == 0 and stands and to != step:  # detectors go back with a snapshot
            row.redo()
            return step
        is_known = one.kind != OTHER_DATA and to is not None and to >= memory["went"].get(one.kind, step + 1)
        if to is None or is_known or (one.kind != OTHER_DATA and to < row.reads_since):
            return None  # what was read before its batches were others is not what it would read now
        return row.go_back(to)


def _seen(alarm: Alarm, names: Iterable[str]) -> dict[str, Any]:
    """What is compared, as JSON has it; NaN is as good as NaN."""
    scores = {name: repr(alarm.scores[name]) for name in names}
    return {"step": alarm.step, "loss": repr(alarm.loss), "grad_norm": repr(alarm.grad_norm), "scores": scores}


def _is_calm(alarm: Alarm, memory: Mapping[str, Any]) -> bool:
    """Whether scores are nearer to what was usual than to the alarm's, where these are numbers."""
    return not any(alarm.scores[name] > float(half) for name, half in memory["half"].items())
