"""What the command `scaling` says of a results folder, in lines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from analysis.again.sweep_folder import SweepFolder
from analysis.figures.files import check_picture, save_picture
from analysis.figures.scaling_curves import scaling_curves
from analysis.measures.scaling import FEWEST, PARAMETERS, Estimated, Scaling, arm_words, check_sizes, scalings
from analysis.reading.selection import selected
from analysis.reports.printed import table_lines
from harness.config import ConfigError

SAID = (
    "slope: {change} with each doubling of {against}. In brackets 95% intervals over seeds (bootstrap), which do not "
    "say whether the law holds. foretold: what the law says of the largest size from the others, beside what was "
    "measured; holds: whether the interval of their difference has 0 in it."
)
BEYOND = "extrapolated"


def told_scaling(
    out: Path,
    metric: str = "loss",
    against: str = "width",
    sizes: Sequence[float] = (),
    figure: Path | None = None,
    wheres: Sequence[str] = (),
) -> list[str]:
    """A table of laws, a row an arm; `sizes` are foretold, and `figure` is drawn. Raises ConfigError."""
    if figure is not None:
        check_picture(figure)
    check_sizes(sizes)
    folder = SweepFolder.open(out)
    sweep = selected(folder.sweep, wheres)
    weights = {trial: setup.weights for trial, setup in folder.setups.items()} if against == PARAMETERS else None
    try:
        found = scalings(sweep, metric, against, weights)
    except ConfigError as error:
        raise ConfigError(*(f"out={out}: {reason}" for reason in error.reasons)) from None
    if not found:
        why = (
            f"no arm has {metric} within the rates that were tried at {FEWEST} values of {against}, and at all of them"
        )
        raise ConfigError(f"out={out}: {why}; allowed: a sweep over more of them, or over more rates")
    lines = table_lines(pd.DataFrame([_row(one, sizes) for one in found]))
    if figure is not None:
        drawing = scaling_curves(found, max([*sizes, found[0].sizes[-1]]))
        assert drawing.figure is not None
        save_picture(drawing.figure, figure, "scaling_curves")
        lines += ["", f"Figure: {figure} {drawing.caption}"]
    change = "the factor" if found[0].kind.is_log else "the rise"
    return [*lines, "", SAID.format(change=change, against=against)]


def _row(one: Scaling, sizes: Sequence[float]) -> dict[str, object]:
    known = (~np.isnan(one.values)).sum(axis=1)
    seeds = one.values.shape[1]
    row: dict[str, object] = {
        "arm": arm_words(one.arm),
        one.against: f"{one.sizes[0]:g} to {one.sizes[-1]:g} ({len(one.sizes)})",
        "seeds": f"{seeds}" if known.min() == seeds else f"{known.min()} to {known.max()} of {seeds}",
        "slope": _told(one.slope()),
        "law": one.law,
    }
    if one.has_offset and (parameters := one.parameters()) is not None:
        row |= {"c": _told(parameters[0]), "b": _told(parameters[1])}
    for size in sizes:
        is_beyond = not one.sizes[0] <= size <= one.sizes[-1]
        row[f"at {size:g}"] = _told(one.at(size)) + (f" {BEYOND}" if is_beyond else "")
    said, measured, holds = one.foretold()
    if said.value == said.value:
        row["foretold"] = f"at {one.sizes[-1]:g} {_told(said)}, is {measured:.4g}"
        row["holds"] = "-" if holds is None else "yes" if holds else "no"
    return row


def _told(number: Estimated) -> str:
    if number.value != number.value:
        return "-"
    return f"{number.value:.4g}" + (f" [{number.low:.4g}, {number.high:.4g}]" if number.low == number.low else "")
