"""What of a sweep goes into tables: trials, curves in long form, events. A few trials at a time are in memory."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd

from analysis.export.names import cell
from analysis.export.runs import Source
from analysis.reading.levels import texts

CURVES = ("trial", "signal", "step", "value")
EVENTS = ("trial", "kind", "step", "title", "detail")


def trials(source: Source) -> pd.DataFrame:
    """One row a trial: the coordinates of `open_sweep` along `trial`, and the losses at its end."""
    known = [str(name) for name, variable in source.sweep.variables.items() if variable.dims == ("trial",)]
    columns = {cell(name): source.sweep[name].values for name in known}
    return pd.DataFrame({name: _cells(values) for name, values in columns.items()})


def curves(source: Source) -> Iterator[pd.DataFrame]:
    """One row a measured value, trial by trial: `signal` is `loss` or, of a layer, `activation_rms/layer_3`."""
    runs = source.runs()
    numbers = range(len(runs))
    for run, own in zip(runs, source.curves(numbers, [run.steps for run in runs]), strict=True):
        lengths = [len(series.steps) for series in own]
        yield pd.DataFrame(
            {
                "trial": np.repeat(run.trial, sum(lengths)),
                "signal": np.repeat([series.name for series in own], lengths) if own else np.array([], str),
                "step": np.concatenate([series.steps for series in own]) if own else np.array([], np.int64),
                "value": np.concatenate([series.values for series in own]) if own else np.array([], np.float32),
            }
        )


def events(source: Source) -> pd.DataFrame:
    """One row a strike of a fault or an incident; `detail` is JSON."""
    rows = [
        (run.trial, event.kind, event.step, cell(event.title), cell(event.json))
        for run in source.runs()
        for event in run.events
    ]
    return pd.DataFrame(rows, columns=list(EVENTS))


def _cells(values: np.ndarray) -> np.ndarray:
    if values.dtype.kind in "biuf":
        return values
    values = texts(values) if values.dtype.kind == "O" else values
    return np.array([cell(str(value)) for value in values], dtype=object)
