"""docs/detection.md names every reading, its cadence and what it gives."""

from __future__ import annotations

import re
from pathlib import Path

from harness.readings.table import READINGS

PAGE = Path(__file__).parent.parent / "docs" / "detection.md"
ROW = re.compile(r"^\| `(\w+)` \| (\d+) \| (.*?) \|", re.MULTILINE)


def test_the_table_of_signals_is_that_of_the_code() -> None:
    rows = {
        name: (int(every), re.findall(r"`(\w+)`", signals)) for name, every, signals in ROW.findall(PAGE.read_text())
    }
    assert rows == {name: (cls.cadence, list(cls.signals)) for name, cls in READINGS.items()}
