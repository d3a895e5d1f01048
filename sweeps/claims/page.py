"""The page of verdicts: OUT/claims.md, with a figure of every effect and its interval."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from analysis.figures.effects import EffectRow, effects
from analysis.figures.files import save_picture
from harness.storage.results_folder import ResultsPath
from sweeps.claims.measured import metric_of
from sweeps.claims.trained import EXPLORATORY, Verdict
from sweeps.claims.words import compared, effect_words, has_to_happen, holds_if, marks


def write_page(out: Path, found: Sequence[Verdict]) -> Path:
    """Write the verdicts of a folder, and a figure of each; the page's path."""
    lines = ["# Claims", ""]
    for one in found:
        test = one.claim.trials
        assert test is not None
        told = f"**{one.verdict}**{f' ({EXPLORATORY})' if one.is_exploratory else ''}"
        lines += [f"## {one.claim.claim}", "", f"{told}. Source: {one.claim.source}.", ""]
        lines += [f"Opposite: {one.claim.opposite}.", ""] if one.claim.opposite else []
        lines += [f"{compared(test, '`')}; holds if {holds_if(test)} in each cell.", ""]
        lines += ["| cell | effect and 95% | seeds | control |", "|---|---|---|---|"]
        for cell in one.cells:
            acting = "" if cell.is_acting else " (too little to see anything)"
            lines.append(f"| {cell.cell} | {effect_words(cell)} | {cell.judged.pairs} | {cell.control:.3g}{acting} |")
        lines += ["", f"Control: {has_to_happen(test)}. Registration {one.claim.registration}.", ""]
        lines += [f"    stability-harness claims run {one.claim.name} out={out}", ""]
        rows = [EffectRow(cell.cell, cell.judged.mean, cell.judged.low, cell.judged.high) for cell in one.cells]
        if rows:
            lines += [f"![{one.claim.claim}](figures/{_drawn(out, one, rows)})", ""]
    (ResultsPath.open(out) / "claims.md").write("\n".join(lines).encode())
    return out / "claims.md"


def _drawn(out: Path, one: Verdict, rows: Sequence[EffectRow]) -> str:
    """Draw the effects of a claim in the folder; the file's name."""
    test = one.claim.trials
    assert test is not None
    xlabel = f"{compared(test)} [{test.unit}]"
    drawing = effects(rows, xlabel, one.claim.claim, "", marks(test), metric_of(test.metric).is_ratio)
    name = f"claim_{one.claim.name}.png"
    assert drawing.figure is not None
    (ResultsPath.open(out) / "figures").make_folder()
    save_picture(drawing.figure, out / "figures" / name, name)
    return name
