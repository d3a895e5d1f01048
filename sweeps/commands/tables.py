"""The tables of docs/mitigations.md and docs/faults.md, from what each file says: python -m sweeps.commands.tables ...

A part of a page is between `<!-- mitigation: SECTION -->` and `<!-- end -->`: the files whose `about.section` is that.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from harness.basics.errors import PROGRAM
from harness.config import Problems, shown
from sweeps.commands.catalogue import Entry, entries
from sweeps.commands.ending import ended
from sweeps.compose.folders import leaves
from sweeps.compose.hydra_calls import FOLDER

_PART = re.compile(r"^<!-- (mitigation|fault): ([^\n]*) -->$.*?^<!-- end -->$", re.MULTILINE | re.DOTALL)


def with_tables(page: str) -> str:
    """The page with its marked parts as our files are now. Raises ConfigError for a file of which it has no part."""
    sections = [(part[1], part[2]) for part in _PART.finditer(page)]
    all_entries = [entry for group in dict(sections) for entry in entries(group) if entry.name != "none"]
    ours = [entry for entry in all_entries if entry.file is not None and entry.file.is_relative_to(FOLDER)]
    problems = Problems()
    for entry in ours:
        if (entry.group, entry.about.section) not in sections:
            given = f"{entry.group}={entry.name}: about.section={shown(entry.about.section)}"
            allowed = "; ".join(section for group, section in sections if group == entry.group)
            problems.reasons[f"{given}: no such part of the page; allowed: {allowed}"] = None
    problems.check()

    def made(part: re.Match[str]) -> str:
        here = [entry for entry in ours if (entry.group, entry.about.section) == part.groups()]
        first, last = part[0].split("\n")[0], part[0].split("\n")[-1]
        return "\n".join([first, "", *_table(part[1], here), "", *_examples(here), last])

    return _PART.sub(made, page)


def _table(group: str, listed: Sequence[Entry]) -> list[str]:
    lines = [f"| {group} | what it is | what it sets |", "|---|---|---|"]
    for entry in listed:
        said = f"{entry.text} {entry.about.note}." if entry.about.note else entry.text
        fields = ", ".join(f"`{'.'.join(path)}: {shown(value)}`" for path, value in leaves(entry.fields, "") if path)
        lines.append(f"| `{entry.name}` | {said} | {fields} |")
    return lines


def _examples(listed: Sequence[Entry]) -> list[str]:
    """A command for each fault."""
    faults = [entry for entry in listed if entry.group == "fault"]
    lines = [f"{PROGRAM} sweep fault={entry.name} {entry.about.example}".rstrip() for entry in faults]
    return ["```", *lines, "```", ""] if lines else []


def main(pages: Sequence[str]) -> None:
    """Write the tables of these pages anew."""
    for page in map(Path, pages):
        page.write_text(with_tables(page.read_text()))


if __name__ == "__main__":
    sys.exit(ended(lambda: main(sys.argv[1:])))
