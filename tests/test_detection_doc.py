"""docs/detection.md shows every detector with its constants, and its commands are sweeps."""

from __future__ import annotations

from pathlib import Path

from sweeps.commands.tables import with_tables

TEXT = (Path(__file__).parent.parent / "docs" / "detection.md").read_text()


def test_its_tables_are_up_to_date() -> None:
    assert with_tables(TEXT) == TEXT, "make tables"
