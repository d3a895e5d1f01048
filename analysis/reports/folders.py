"""What `compare` says of two results folders, in lines and as a figure."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from analysis.figures.drawing import Drawing
from analysis.figures.effects import EffectRow, effects
from analysis.figures.files import check_picture, save_picture
from analysis.measures.folders_compared import COMPARED, FolderComparison, folders_compared
from analysis.reports.printed import table_lines
from harness.basics.printing import count
from harness.config.fields import shown

MOST_CELLS = 60  # of a figure
ENDED = ("pairs", "healthy_one", "healthy_other")


def told_comparison(one: Path, other: Path, figure: Path | None = None) -> list[str]:
    """In what the folders differ, a line for each cell, and what cannot be compared.

    With `figure` the changes are drawn into that file. Raises ConfigError.
    """
    if figure is not None:
        check_picture(figure)
    found = folders_compared(one, other)
    lines = [f"one: {one}", f"other: {other}"]
    lines += [f"  {path}: {first} and {second}" for path, (first, second) in found.between.items()]
    if not found.between:
        lines.append("  no field differs in all trials: the same configurations, trained twice")
    lines += [f"  trained by {name}: {first} and {second}" for name, (first, second) in found.trained_by.items()]
    words, unit = COMPARED[found.compared]
    units = f"{words} in {unit}, mean over seeds; change: other - one, with its 95% interval".replace(" in 1,", ",")
    lines += ["", f"{units}:", *table_lines(found.table, 4), ""]
    lines.append(_summed(found.table))
    pairs, one_trained, other_trained = (int(found.table[name].sum()) for name in ENDED)
    lines.append(f"Of {count(pairs, 'pair')} {one_trained} trained in one folder and {other_trained} in the other.")
    for folder, number in zip(("one", "other"), found.alone, strict=True):
        if number:
            lines.append(f"Note: {count(number, 'trial')} of {folder} without a partner, left out.")
    lost = found.table.query("pairs > healthy_one or pairs > healthy_other")
    if len(lost):
        where = count(len(lost), "cell")
        lines.append(f"Note: in {where} some runs were lost: healthy_one and healthy_other say how many trained.")
    if figure is not None:
        drawing = drawn_comparison(found)
        if drawing.figure is None:
            lines.append(drawing.caption)
        else:
            save_picture(drawing.figure, figure, "compare")
            lines += [drawing.caption, f"Figure: {figure}"]
    return lines


def drawn_comparison(found: FolderComparison) -> Drawing:
    """A line a cell: its change, with the interval; filled where zero is beyond it."""
    table = found.table[found.table["change"].notna()].head(MOST_CELLS)
    if not len(table):
        return Drawing(None, "No figure: no cell has finite losses in both folders.")
    rows = [
        EffectRow(
            ", ".join(f"{name}={shown(row[name])}" for name in found.fields) or "all trials",
            row["change"],
            row["low"],
            row["high"],
        )
        for row in table.to_dict("records")
    ]
    left_out = len(found.table) - len(table)
    more = f" {count(left_out, 'cell')} left out." if left_out else ""
    caption = (
        "Change from one folder to the other, mean over seeds, 95% intervals of pairs. Blue: lower with certainty; "
        f"orange: higher; grey: either.{more}"
    )
    words, unit = COMPARED[found.compared]
    return effects(rows, "other - one" if unit == "1" else f"other - one [{unit}]", f"Change of the {words}", caption)


def _summed(table: pd.DataFrame) -> str:
    """How many cells are lower, higher, or neither with certainty."""
    lower, higher = int((table["high"] < 0).sum()), int((table["low"] > 0).sum())
    known = int(table["low"].notna().sum())
    if not known:
        return "No cell has an interval: that takes two pairs with finite losses."
    return (
        f"Of {count(known, 'cell')} with an interval {lower} are lower in the other folder, {higher} higher, and "
        f"{known - lower - higher} neither with certainty."
    )
