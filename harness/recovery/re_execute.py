"""The last steps once more: what differs was a fault, and has been repaired by that."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from harness.config import PER_TRIAL, Trial, number
from harness.recovery.base import STANDS, Action, Detail, Row

TRANSIENT, PERSISTENT, DATA, CORRECT = "transient", "persistent", "data", "correct"
"""The verdicts: another value the second time; the same there, and another on another device; the same on both, and no
alarm with another batch; and an alarm with every batch, on every device: the result is right, and the run is not."""
AGAIN, SPARE, OTHER_DATA = "again", "spare", "other data"  # what is tried


@dataclass(frozen=True)
class Options:
    """`playbook.re_execute.*`."""

    back: int = number(PER_TRIAL, 0, "steps before the alarm that are run again as well, at least", low=0)
    deepest: int = number(PER_TRIAL, 7, "steps before it from which they are run again at most", low=0)
    batches: int = number(PER_TRIAL, 8, "batches that are left out at most, to find one without an alarm", low=1)


class ReExecute(Action):
    """Runs the steps up to the alarm again, and compares loss and gradient norm with what they were, bit for bit.

    Other values: a transient fault, and what came out now is right. The same: from 1, 3, 7, ... steps before, because
    the state may have been bad before the alarm. Always the same: from the first of these once more on another device,
    where a permanent fault does not strike. The same there: the step with another batch, 1, 2, 4, ... further on. The
    alarm is gone: the batch was bad, and is left out. It stays: the result is right, and from there on the other rungs
    are asked, until the incident is over. What is known only after a step is first looked for in the step before.
    """

    goes_back = True
    source = "Megatron-LM, core/rerun_state_machine.py, which looks at the current step alone"

    @classmethod
    def back(cls, trial: Trial) -> int:
        return trial.section("playbook.re_execute").back

    @classmethod
    def refused(cls, trial: Trial) -> Iterator[str]:
        back, snapshot = cls.back(trial), trial.section("playbook.snapshot")
        if back > snapshot.history:
            kept = f"playbook.snapshot.kept={snapshot.kept}, one every {snapshot.every} steps"
            yield f"playbook.re_execute.back={back}: beyond the history of {kept}; allowed: 0 to {snapshot.history}"

    def do(self, row: Row, options: Any) -> Detail | None:
        alarm = row.alarm
        before = max(options.back, int(alarm.is_late))
        to = None if row.stood else row.go_back(alarm.step - before)
        if to is None:
            return None
        seen = {"step": alarm.step, "loss": repr(alarm.loss), "grad_norm": repr(alarm.grad_norm), "before": before}
        row.wait(alarm.step, {**seen, "first": to, "tried": AGAIN})
        return {"to": to}

    def resume(self, row: Row, options: Any, memory: Mapping[str, Any]) -> Detail:
        alarm, tried, is_alarm = row.alarm, memory["tried"], bool(row.alarm.detectors)
        if tried == OTHER_DATA:
            return self._after_other_data(row, options, memory)
        is_same = alarm.step == memory["step"] and alarm.same_as(float(memory["loss"]), float(memory["grad_norm"]))
        if not is_same:
            return {"verdict": PERSISTENT if tried == SPARE else TRANSIENT, STANDS: is_alarm}
        before = 2 * memory["before"] + 1
        if tried == AGAIN and before <= options.deepest and (to := row.go_back(alarm.step - before)) is not None:
            row.wait(alarm.step, {**memory, "before": before})
            return {"tried": AGAIN, "to": to}
        if tried == AGAIN:
            row.on_spare(True)
            to = row.go_back(memory["first"])
            row.wait(alarm.step, {**memory, "tried": SPARE})
            return {"tried": SPARE, "to": to}
        row.on_spare(False)
        return self._with_batch(row, memory, 1)

    def _with_batch(self, row: Row, memory: Mapping[str, Any], ahead: int) -> Detail:
        row.read_on(ahead - memory.get("ahead", 0))
        row.redo()
        row.wait(row.alarm.step, {**memory, "tried": OTHER_DATA, "ahead": ahead})
        return {"tried": OTHER_DATA, "batches": ahead}

    def _after_other_data(self, row: Row, options: Any, memory: Mapping[str, Any]) -> Detail:
        if not row.alarm.detectors:
            return {"verdict": DATA, "batches": memory["ahead"]}
        if 2 * memory["ahead"] <= options.batches and row.alarm.step == memory["step"]:
            return self._with_batch(row, memory, 2 * memory["ahead"])
        row.read_on(-memory["ahead"])
        return {"verdict": CORRECT, STANDS: True}
