"""The words of a sweep as figures and tables can take them: on one line, visible, and not too long.

What is stored is anybody's text. Equal texts stay equal and different ones different, so nothing that is counted or
compared changes.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
import xarray as xr

from analysis.reading.acted import marked
from harness.basics.printing import label


def labelled(sweep: xr.Dataset, events: pd.DataFrame) -> tuple[xr.Dataset, pd.DataFrame]:
    """`open_with_events`, with labels for the texts, and a mark on mitigations that did not act as named."""
    texts = {
        name: events[name].map(lambda value: label(value) if isinstance(value, str) else value)
        for name in events.columns
        if events[name].map(type).eq(str).any()
    }
    return marked(labelled_sweep(sweep)), events.assign(**texts)


def labelled_sweep(sweep: xr.Dataset) -> xr.Dataset:
    """`open_sweep`, with labels for the texts along its trials and for the study."""
    labels = {}
    for name, coordinate in sweep.coords.items():
        if coordinate.dtype.kind == "U":
            different, places = np.unique(coordinate.values, return_inverse=True)
            texts = np.array([label(str(text)) for text in different])[places.reshape(coordinate.shape)]
            labels[name] = (coordinate.dims, texts, coordinate.attrs)
    study = label(str(sweep.attrs["study"]))
    return sweep.assign_coords(labels).assign_attrs(study=study)
