"""The tables of docs/, from what each mitigation, fault and detector says: python -m sweeps.commands.tables PAGE ...

A part of a page is between `<!-- mitigation: SECTION -->` and `<!-- end -->`: the files whose `about.section` is that.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from harness.basics.errors import PROGRAM
from harness.config import Problems, shown
from harness.config.ladder import canonical, rungs
from harness.detectors.table import DETECTORS
from sweeps.claims.checks import CHECKS
from sweeps.claims.registered import chosen, claims
from sweeps.commands.catalogue import CatalogueEntry, entries
from sweeps.commands.ending import ended
from sweeps.compose.folders import leaves
from sweeps.compose.hydra_calls import FOLDER

_PART = re.compile(
    r"^<!-- (mitigation|fault|detect|playbook|claim): ([^\n]*) -->$.*?^<!-- end -->$", re.MULTILINE | re.DOTALL
)


def with_tables(page: str) -> str:
    """The page with its marked parts as our files are now. Raises ConfigError for a file of which it has no part."""
    sections = [(part[1], part[2]) for part in _PART.finditer(page)]
    groups = dict(sections).keys() - {"claim"}
    all_entries = [entry for group in groups for entry in entries(group) if entry.name != "none"]
    ours = [entry for entry in all_entries if _is_ours(entry)]
    problems = Problems()
    for entry in ours:
        if (entry.group, entry.about.section) not in sections:
            given = f"{entry.group}={entry.name}: about.section={shown(entry.about.section)}"
            allowed = "; ".join(section for group, section in sections if group == entry.group)
            problems.reasons[f"{given}: no such part of the page; allowed: {allowed}"] = None
    if tags := {tag for group, tag in sections if group == "claim"}:
        for claim in claims().values():
            if claim.check and not tags.intersection(claim.tags):
                allowed = f"allowed: {', '.join(sorted(tags))}"
                problems.reasons[
                    f"claim={claim.name}: tags={shown(claim.tags)}: no such part of the page; {allowed}"
                ] = None
    problems.check()

    def made(part: re.Match[str]) -> str:
        first, last = part[0].split("\n")[0], part[0].split("\n")[-1]
        if part[1] == "claim":
            return "\n".join([first, "", *_claims(part[2]), "", last])
        here = [entry for entry in ours if (entry.group, entry.about.section) == part.groups()]
        return "\n".join([first, "", *_table(part[1], here), "", *_examples(here), last])

    return _PART.sub(made, page)


def _claims(tag: str) -> list[str]:
    lines = ["| claim | verdict | because | source |", "|---|---|---|---|"]
    for claim in (claim for claim in chosen([], tag) if claim.check):
        answer = CHECKS[claim.check]()
        lines.append(f"| {claim.claim} | {answer.verdict} | {answer.words} | {claim.source} |")
    return lines


def _is_ours(entry: CatalogueEntry) -> bool:
    """Whether it is none of an installed package's, and no kind of fault, which has no row of its own."""
    if entry.file is None:
        return entry.group == "detect" and DETECTORS[entry.name].__module__.startswith("harness.")
    return entry.file.is_relative_to(FOLDER)


def _table(group: str, listed: Sequence[CatalogueEntry]) -> list[str]:
    sets = "its constants" if group == "detect" else "what it sets"
    lines = [f"| {group} | what it is | {sets} |", "|---|---|---|"]
    for entry in listed:
        said = f"{entry.text} {entry.about.note}." if entry.about.note else entry.text
        fields = ", ".join(f"`{key}: {shown(value)}`" for key, value in _fields(entry))
        lines.append(f"| `{entry.name}` | {said} | {fields} |")
    return lines


def _fields(entry: CatalogueEntry) -> Iterator[tuple[str, Any]]:
    """What a file sets, by key; a ladder as a rung after the other."""
    for path, value in leaves(entry.fields, ""):
        if path[:2] != ("playbook", "ladder"):
            yield from [(".".join(path), value)] if path else ()
    for rung in rungs(canonical(entry.fields["playbook"]["ladder"])) if entry.group == "playbook" else ():
        often = "" if rung.limit is None else f" x {rung.limit}"
        yield rung.detector, f"{rung.action}{often} ({rung.cool_down})"


def _examples(listed: Sequence[CatalogueEntry]) -> list[str]:
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
