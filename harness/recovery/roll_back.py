"""Back to a snapshot, and on from there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from harness.config import PER_TRIAL, Trial, number
from harness.config.fields import anything
from harness.recovery.base import Action, Detail, Row


@dataclass(frozen=True)
class Options:
    """`playbook.roll_back.*`."""

    back: int = number(PER_TRIAL, 0, "steps by which the snapshot lies before the alarm, at least", low=0)
    deeper: bool = anything(PER_TRIAL, True, "further back each time that the incident goes on")


class RollBack(Action):
    """The trial is what it was at a snapshot; its data are the same, unless the next action of the rung says otherwise.

    With the same data and settings the detectors' memory is that of the snapshot, so a trial whose fault was transient
    ends bit for bit as its golden twin.
    """

    goes_back = True
    source = "PaLM, Chowdhery et al. 2022, arXiv 2204.02311, section 5.1; in memory: GEMINI, Wang et al. 2023"

    @classmethod
    def back(cls, trial: Trial) -> int:
        return trial.section("playbook.roll_back").back

    @classmethod
    def refused(cls, trial: Trial) -> Iterator[str]:
        back, snapshot = cls.back(trial), trial.section("playbook.snapshot")
        if back > snapshot.history:
            kept = f"playbook.snapshot.kept={snapshot.kept}, one every {snapshot.every} steps"
            yield f"playbook.roll_back.back={back}: beyond the history of {kept}; allowed: 0 to {snapshot.history}"

    def do(self, row: Row, options: Any) -> Detail | None:
        latest = row.alarm.step - options.back
        is_deeper = options.deeper and row.used and row.reached is not None
        step = row.go_back(min(latest, row.reached - 1) if is_deeper and row.reached is not None else latest)
        return None if step is None else {"to": step}
