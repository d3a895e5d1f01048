"""All trials of a sweep as columns of plain values, from which a page draws figures, filters and a list."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from analysis.figures.labels import labelled_sweep
from analysis.measures.outcomes import JUDGED
from analysis.pages.plain import numbers, shown
from analysis.reading.finals import FINALS
from analysis.reading.loss_words import USUAL_NAME
from analysis.reading.open_sweep import RESULTS
from harness.config import NO_FAULT

# What a trial became; every other coordinate is a setting of it.
BECAME = (*RESULTS, "incidents", "incidents_open", "acts", "steps_lost", "struck_site", "struck_tensor", "struck_bit")
BECAME += ("struck_zero", *FINALS, "latest_loss", *JUDGED)
LEFT_OUT = ("trial", "golden", "pack")
SHOWN_FINALS = ("final_loss", "final_validation_loss")


def columns_of(sweep: xr.Dataset, **more: np.ndarray) -> dict[str, Any]:
    """`trials`, and `columns`: name -> kind, label, unit, whether it is a setting, and values [trial].

    Of a text the values are numbers into `words`; a number that is not known is null. `more` are columns of numbers
    that the sweep does not have. Numbers that are alike in all trials, and texts, are left out, the basic ones apart.
    """
    sweep = labelled_sweep(sweep)
    columns: dict[str, Any] = {}
    known = {str(name): (one.values, one.attrs) for name, one in sweep.coords.items() if one.dims == ("trial",)}
    known |= {name: (values, {}) for name, values in more.items()}
    for name, (values, attributes) in known.items():
        if name not in LEFT_OUT and _is_told(name, values):
            of_loss = sweep["loss"].attrs if name in ("final_loss", "latest_loss") else attributes
            columns[name] = _column(name, values, of_loss)
    ids, golden = (sweep[name].values.tolist() for name in ("trial", "golden"))
    place = {trial: number for number, trial in enumerate(ids)}
    return {
        "study": shown(str(sweep.attrs["study"])),
        "trials": ids,
        "golden": [place.get(twin, -1) for twin in golden],
        "columns": columns,
    }


def finals(sweep: xr.Dataset) -> dict[str, np.ndarray]:
    """The losses at which trials ended [trial], infinite where one became non-finite."""
    lost = np.isfinite(sweep["nonfinite_step"].values)
    return {name: np.where(lost, np.inf, sweep[name].values) for name in SHOWN_FINALS}


def worth(sweep: xr.Dataset, loss: np.ndarray) -> np.ndarray:
    """The numbers of all trials [trial], those that a reader is likelier to open before others.

    First those of other outcomes than `trained`, with incidents in their log, or whose fault changed something for
    good, from the largest `loss` [trial] down; then golden twins of these; then the rest, likewise.
    """
    table = pd.DataFrame(
        {name: sweep[name].values for name in ("outcome", "fault", "complete", "changes", "incidents")}
    )
    is_odd = (table["complete"] & (table["outcome"] != "trained")) | (table["incidents"] > 0)
    is_struck = (table["fault"] != NO_FAULT.name) & (table["changes"] > 0) & np.isnan(sweep["masked_step"].values)
    level = np.where(is_odd, 3, np.where(is_struck, 2, 0))
    twins = pd.Index(sweep["trial"].values).get_indexer(sweep["golden"].values[level > 0])
    level[twins[twins >= 0]] = np.maximum(level[twins[twins >= 0]], 1)
    return np.lexsort((-np.nan_to_num(loss, nan=-np.inf), -level))


def _is_told(name: str, values: np.ndarray) -> bool:
    if name in ("outcome", "mitigation", "fault", "lr", "width", "seed", *SHOWN_FINALS, "latest_loss"):
        return True
    return len(pd.unique(values[~pd.isna(values)])) > 1 or (pd.isna(values).any() and not pd.isna(values).all())


def _column(name: str, values: np.ndarray, attributes: Mapping[str, Any]) -> dict[str, Any]:
    label = {"latest_loss": "latest loss", "final_loss": "final loss", "final_validation_loss": "final validation loss"}
    if name in ("latest_loss", "final_loss") and attributes["long_name"] != USUAL_NAME:
        when = {"latest_loss": "at its latest step", "final_loss": "at the end"}[name]
        label[name] = f"{attributes['long_name']} {when}"
    unit = attributes.get("units", "nat/token" if name in label else "1")
    about = {
        "label": label.get(name, name.replace("_", " ")),
        "about": shown(str(attributes.get("long_name", ""))),
        "unit": "" if unit == "1" else shown(str(unit)),
        "is_setting": name not in BECAME and not name.startswith("provenance_"),
    }
    if values.dtype.kind in "if":
        return {"kind": "number", **about, "values": numbers(values.astype(float))}
    if values.dtype.kind == "b":
        values = np.array(["yes" if v else "no" for v in values])
    places, levels = pd.factorize(values, sort=True, use_na_sentinel=False)
    words = [shown("" if level != level else str(level)) for level in levels]
    return {"kind": "text", **about, "words": words, "values": places.tolist()}
