"""Results of which parts are given, so that a figure can be drawn from what a test has made."""

from __future__ import annotations

from typing import Any

import xarray as xr

from analysis.figures.registry import Results


def given(sweep: xr.Dataset | None = None, **parts: Any) -> Results:
    """`parts` by the name of what `Results` would make of a sweep: `comparison`, `searches`."""
    results = Results(xr.Dataset() if sweep is None else sweep)
    vars(results).update(parts)
    return results


def judged(sweep: xr.Dataset) -> Results:
    """Of a sweep that has its outcomes."""
    return given(sweep, _outcomes=(sweep, []))
