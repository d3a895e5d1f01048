"""The oracle's answer: as if the fault had not been."""

from __future__ import annotations

from typing import Any

from harness.recovery.base import Action, Detail, Row


class Undo(Action):
    """Back to just before the first strike that changed something, and on without the fault: the upper bound.

    It knows the fault, as no operator does, and repairs it: also a poisoned batch is what it should have been.
    """

    goes_back = True
    source = "ours"

    def do(self, row: Row, options: Any) -> Detail | None:
        step = row.fault_step()
        to = None if step is None else row.go_back(step)
        if to is None:
            return None
        row.disarm()
        return {"to": to}
