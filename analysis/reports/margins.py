"""What the command `margins` says of a results folder, in lines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from analysis.figures.files import check_picture, save_picture
from analysis.figures.margins_map import margins_map
from analysis.measures.margins import FailureEstimate, margins
from analysis.reading.open_sweep import open_sweep
from analysis.reading.selection import selected
from analysis.reports.printed import table_lines
from harness.basics.printing import count
from harness.config import ConfigError

SAID = (
    "Shares of runs that failed: not trained, or with a final loss more than {worse:g} nat/token above the whole "
    "recipe under the same seed and stress. In brackets 95% intervals over seeds. Excess: over two parts "
    "that break it independently; a star marks what is above 0 at 10% false discoveries. Importance: what "
    "leaving it out adds to the share, as the first part that is left out or the second, on average."
)


def told_margins(out: Path, worse: float, figure: Path | None = None, wheres: Sequence[str] = ()) -> list[str]:
    """How often it fails with none, one and two parts left out; each part by importance; pairs by excess.

    With `figure` the map of pairs is drawn into that file. Raises ConfigError.
    """
    if figure is not None:
        check_picture(figure)
    if not worse >= 0:
        raise ConfigError(f"--worse={worse}: allowed: at least 0, in nat/token")
    try:
        found = margins(selected(open_sweep(out), wheres), worse)
    except ConfigError as error:
        raise ConfigError(*(f"out={out}: {reason}" for reason in error.reasons)) from None
    sizes = sorted({len(left_out) for left_out in found.sets})
    of_sizes = [{"left out": size, **_told("failed", found.share_of(size))} for size in sizes]
    parts = [
        {"without": name, **_told("failed", found.share(name)), **_told("importance", found.importance(name))}
        for name in found.parts
    ]
    parts.sort(key=lambda row: -float(str(row["importance"]).split()[0]))
    pairs = [
        {
            "without": f"{one}, {other}",
            **_told("failed", found.share(one, other)),
            **_told("excess", found.excess(one, other), "*" if found.discoveries[one, other] else ""),
        }
        for one, other in found.pairs
    ]
    pairs.sort(key=lambda row: -float(str(row["excess"]).split()[0]))
    lines = [f"{len(found.parts)} parts, {found.failed.shape[1]} seeds, {count(found.stresses, 'condition')}", ""]
    for rows in (of_sizes, parts, pairs):
        lines += [*table_lines(pd.DataFrame(rows)), ""] if rows else []
    if figure is not None:
        drawing = margins_map(found)
        assert drawing.figure is not None
        save_picture(drawing.figure, figure, "margins_map")
        lines += [f"Figure: {figure} {drawing.caption}", ""]
    return [*lines, SAID.format(worse=worse)]


def _told(name: str, estimate: FailureEstimate, mark: str = "") -> dict[str, str]:
    return {name: f"{estimate.mean:.3f} [{estimate.low:.3f}, {estimate.high:.3f}]{mark}"}
