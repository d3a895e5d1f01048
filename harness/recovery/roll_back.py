"""Back to a snapshot, and on from there."""

from __future__ import annotations

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
        back: int = trial.section("playbook.roll_back").back
        return back

    def do(self, row: Row, options: Any) -> Detail | None:
        latest = row.alarm.step - options.back
        if options.deeper and row.used and row.reached is not None:
            latest = min(latest, row.reached - 1)
        step = row.go_back(latest)
        return None if step is None else {"to": step}
