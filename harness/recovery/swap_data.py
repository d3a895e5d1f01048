"""Other data from here on."""

from __future__ import annotations

from typing import Any

from harness.recovery.base import Action, Detail, Row

ANOTHER_ORDER = 2**32  # batches further on than any run reads


class SwapData(Action):
    """The order of batches is another one from there on, of the same text."""

    changes_course = True
    source = "OPT logbook, metaseq: another data order after a restart"

    def do(self, row: Row, options: Any) -> Detail:
        row.read_on(ANOTHER_ORDER)
        return {}
