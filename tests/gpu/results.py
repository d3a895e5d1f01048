"""A group's results as JSON and as a table in Markdown, and the tables in the documentation."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.gpu.marks import GROUPS, NOT_MEASURED, Row, row_of

BEGIN, END = "<!-- gpu: begin, by python -m tests.gpu merge -->", "<!-- gpu: end -->"
NOTHING = "No GPU has been at hand: none of these checks has been measured yet."
DRY = "dry run"


@dataclass(frozen=True)
class Results:
    """What one run of a group has left. `about` says when, on what and with what: date, device, torch, python."""

    group: str
    about: Mapping[str, str]
    rows: Sequence[Row]

    def write(self, folder: Path) -> None:
        """Both files, each whole at any time."""
        told = {"group": self.group, "about": dict(self.about), "rows": [row.as_json() for row in self.rows]}
        for name, text in ((f"{self.group}.json", json.dumps(told, indent=1)), (f"{self.group}.md", self.table())):
            new = folder / f".{name}.new"
            new.write_text(text + "\n")
            new.replace(folder / name)

    def table(self) -> str:
        about = self.about
        lines = [
            f"`python -m tests.gpu {self.group}` on {about['date']}: {about['device']}, torch {about['torch']}, "
            f"Python {about['python']}",
            "",
            "| | check | measured | pass mark | |",
            "|---|---|---|---|---|",
        ]
        return "\n".join(lines + [line_of(row) for row in self.rows])


def line_of(row: Row) -> str:
    check = row.check
    measured = "; ".join([*(f"{name}: {shown(value)}" for name, value in row.figures.items()), *row.notes])
    cells = (check.number, check.title, measured or NOT_MEASURED, check.wanted, row.told)
    return "| " + " | ".join(cell(text) for text in cells) + " |"


def cell(text: Any) -> str:
    """What stands in a cell of a table, whatever the text: an error's may have anything."""
    return " ".join(str(text).replace("|", "\\|").replace("<", "&lt;").split())


def shown(value: float) -> str:
    return f"{value:.0f}" if float(value).is_integer() and abs(value) < 1e15 else f"{value:.3g}"


def read(folder: Path) -> list[Results]:
    """What is in a folder, in the order of the groups. Raises SystemExit where there is nothing."""
    found = []
    for group in GROUPS:
        if (file := folder / f"{group}.json").exists():
            told = json.loads(file.read_text())
            found.append(Results(told["group"], told["about"], [row_of(row) for row in told["rows"]]))
    if not found:
        raise SystemExit(f"error: {folder}: no results; run python -m tests.gpu {GROUPS[0]} first")
    return found


def merge(results: Iterable[Results], page: Path) -> None:
    """Put the tables between the markers of a page, in place of what is there."""
    text = page.read_text()
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise SystemExit(f"error: {page}: needs the lines {BEGIN!r} and {END!r} once each, in this order")
    before, rest = text.split(BEGIN)
    results = list(results)
    is_measured = any(row.figures for each in results for row in each.rows)
    parts = [*([] if is_measured else [NOTHING]), *(each.table() for each in results)]
    page.write_text("\n\n".join([before + BEGIN, *parts, END + rest.split(END)[1]]))
