"""The table of verdicts in the documentation: a row a claim, from one results folder after another, and a figure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap

from analysis.figures.effects import EffectRow, panels
from analysis.figures.files import save_picture
from harness.config import ConfigError
from sweeps.claims.registered import RegisteredClaim
from sweeps.claims.trained import EXPLORATORY, Verdict
from sweeps.claims.verdicts import CONFIRMED, NOT_HERE, REFUTED, UNDECIDED, discovered
from sweeps.claims.words import compared, effect_words, holds_if, marks

FIRST, LAST = "<!-- verdicts -->", "<!-- end -->"
ORDER = (REFUTED, CONFIRMED, UNDECIDED, NOT_HERE)  # what disagrees with its source stands first
STAR = "\\*"  # of what is not among the discoveries
HEADINGS = ("claim", "verdict", "effect [95%]", "p", "seeds", "trained")
_ROW = re.compile(r"^\| `(\w+)`: .* \| \*\*([^*]+)\*\*.*? \| (.*?) \| (.*?) \| (\d*) \| (.*?), registration (\w+) \|$")
_EFFECT = re.compile(r"(.+?): (?:(\S+) )?\[(\S+), (\S+)\](.*)")


@dataclass(frozen=True)
class FindingRow:
    """A row of the table as it stands there: the effects by cell as text, joined by semicolons."""

    name: str
    verdict: str
    is_exploratory: bool
    effects: str
    p: str
    seeds: str
    trained: str
    registration: str

    @property
    def cells(self) -> Iterator[EffectRow]:
        """Its effects; a mean that is open is NaN."""
        for text in self.effects.split("; "):
            if found := _EFFECT.fullmatch(text):
                yield EffectRow(f"{self.name}, {found[1]}", float(found[2] or "nan"), float(found[3]), float(found[4]))


def row_of(one: Verdict) -> FindingRow:
    """The row of a verdict."""
    told = "; ".join(
        f"{cell.cell}: {effect_words(cell)}{'' if cell.is_acting else ' (control too weak)'}" for cell in one.cells
    )
    seeds = min((cell.judged.pairs for cell in one.cells), default=0)
    commits = ", ".join(commit[:8] or "no commit" for commit in one.commits)
    p = "" if math.isnan(one.p) else f"{one.p:.2g}"
    trained = f"{one.ended[:10]}, {commits}"
    return FindingRow(
        one.claim.name, one.verdict, one.is_exploratory, told, p, str(seeds), trained, one.claim.registration[:8]
    )


def write_findings(page: Path, found: Sequence[Verdict], known: Mapping[str, RegisteredClaim]) -> Path:
    """Put verdicts into the table of a page, and draw all of its effects beside it (`.svg`); the figure's path.

    Rows of other claims stay, unless the claim is another one now. Raises ConfigError for a page without the table.
    """
    try:
        text = page.read_text()
    except OSError as error:
        raise ConfigError(f"{page}: {error.strerror}; allowed: a page with a line {FIRST} and one {LAST}") from None
    if FIRST not in text or LAST not in text.partition(FIRST)[2]:
        raise ConfigError(f"{page}: has no table; allowed: a page with a line {FIRST} and one {LAST} behind it")
    before, _, rest = text.partition(FIRST)
    table, _, after = rest.partition(LAST)
    rows = {row.name: row for row in _rows(table, known)}
    rows |= {one.claim.name: row_of(one) for one in found if one.cells and one.verdict in ORDER}
    listed = sorted(rows.values(), key=lambda row: (ORDER.index(row.verdict), row.name))
    page.write_text(before + "\n".join([FIRST, "", *_lines(listed, known), "", LAST]) + after)
    return _drawn(page, listed, known)


def _rows(table: str, known: Mapping[str, RegisteredClaim]) -> Iterator[FindingRow]:
    for line in table.splitlines():
        found = _ROW.fullmatch(line)
        if found and found[1] in known and known[found[1]].registration.startswith(found[7]):
            effects, p, *rest = found.groups()[2:]
            is_exploratory = f"**{found[2]}** ({EXPLORATORY})" in line
            yield FindingRow(found[1], found[2], is_exploratory, effects, p.removesuffix(STAR).strip(), *rest)


def _lines(rows: Sequence[FindingRow], known: Mapping[str, RegisteredClaim]) -> Iterator[str]:
    counts = {verdict: sum(row.verdict == verdict for row in rows) for verdict in ORDER}
    told = ", ".join(f"{number} {verdict}" for verdict, number in counts.items() if number)
    yield f"{told or 'None yet'}."
    yield from ("", f"| {' | '.join(HEADINGS)} |", f"|{'---|' * len(HEADINGS)}")
    for row, is_found in zip(rows, discovered([float(row.p or "nan") for row in rows]), strict=True):
        claim, test = known[row.name], known[row.name].trials
        assert test is not None
        kind = f" ({EXPLORATORY})" if row.is_exploratory else ""
        said = f"`{row.name}`: {claim.claim}. Source: {claim.source}. {compared(test)}, {holds_if(test)}"
        p = row.p if is_found else f"{row.p} {STAR}"
        yield (
            f"| {said.replace('|', ' ')} | **{row.verdict}**{kind} | {row.effects} | {p} | {row.seeds} | "
            f"{row.trained}, registration {row.registration} |"
        )
    by_trials = {name for name, claim in known.items() if claim.trials is not None}
    if waiting := sorted(by_trials - {row.name for row in rows}):
        told = f"Not trained yet: {', '.join(f'`{name}`' for name in waiting)}."
        yield from ("", *wrap(told, 100, break_on_hyphens=False))


def _drawn(page: Path, rows: Sequence[FindingRow], known: Mapping[str, RegisteredClaim]) -> Path:
    """All effects, a panel a unit, each against its own threshold."""
    parts: dict[str, list[tuple[EffectRow, tuple[float, ...]]]] = {}
    for row in rows:
        test = known[row.name].trials
        assert test is not None
        if test.against:
            parts.setdefault(test.unit, []).extend((cell, marks(test)) for cell in row.cells)
    file = page.with_suffix(".svg")
    drawing = panels(parts, "Claims: effects with 95% intervals, and where each has to lie", logarithmic=("ratio",))
    if drawing.figure is not None:
        save_picture(drawing.figure, file, file.name)
    return file
