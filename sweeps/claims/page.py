"""The page of verdicts: OUT/claims.md, with a figure of every effect and its interval."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from analysis.figures.effects import EffectRow, effects
from analysis.figures.files import save_picture
from harness.storage.results_folder import ResultsPath
from sweeps.claims.measured import METRICS
from sweeps.claims.trained import EXPLORATORY, Verdict


def write_page(out: Path, found: Sequence[Verdict]) -> Path:
    """Write the verdicts of a folder, and a figure; the page's path."""
    lines = ["# Claims", ""]
    for one in found:
        test = one.claim.trials
        assert test is not None
        unit = METRICS[test.metric].unit
        kind = "over" if METRICS[test.metric].is_ratio else "less"
        lines += [f"## {one.claim.claim}", ""]
        lines += [
            f"**{one.verdict}**{f' ({EXPLORATORY})' if one.is_exploratory else ''}. Source: {one.claim.source}.",
            "",
        ]
        lines += [f"Opposite: {one.claim.opposite}.", ""] if one.claim.opposite else []
        arms = f"`{', '.join(test.of)}` {kind} `{', '.join(test.against)}`"
        lines += [f"{test.metric} of {arms}, {unit}; holds if {test.claimed} {test.threshold:g} in each cell.", ""]
        lines += ["| cell | effect | 95% | seeds | control |", "|---|---|---|---|---|"]
        for cell in one.cells:
            judged, acting = cell.judged, "" if cell.is_acting else " (too little to see anything)"
            interval = f"{judged.low:.3g} to {judged.high:.3g}"
            lines.append(
                f"| {cell.cell} | {judged.mean:.3g} | {interval} | {judged.pairs} | {cell.control:.3g}{acting} |"
            )
        lines += ["", f"Control: {test.control.because}. Registration {one.claim.registration}.", ""]
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
    is_ratio, unit = METRICS[test.metric].is_ratio, METRICS[test.metric].unit
    both = f"{', '.join(test.of)} {'over' if is_ratio else 'less'} {', '.join(test.against)}"
    xlabel = f"{test.metric}, {both} [{unit}]"
    marks = (-test.threshold, test.threshold) if test.claimed == "within" else (test.threshold,)
    drawing = effects(rows, xlabel, one.claim.claim, "", marks, is_ratio)
    name = f"claim_{one.claim.name}.png"
    assert drawing.figure is not None
    (ResultsPath.open(out) / "figures").make_folder()
    save_picture(drawing.figure, out / "figures" / name, name)
    return name
