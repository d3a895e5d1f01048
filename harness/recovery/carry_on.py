"""Nothing is done, and the log has it."""

from __future__ import annotations

from typing import Any

from harness.recovery.base import Action, Detail, Row


class CarryOn(Action):
    """The step is taken, and the alarm is kept in the log."""

    takes = True
    source = "every trainer"

    def do(self, row: Row, options: Any) -> Detail:
        return {}
