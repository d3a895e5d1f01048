"""The faults of a campaign as a table: where each struck, and what became of it. All pictures of a campaign read it."""

from __future__ import annotations

import numpy as np
import pandas as pd
import xarray as xr

from analysis.measures.outcomes import OUTCOMES
from analysis.measures.statistics import studied
from analysis.reading.twins import numbers_of, values_of

# From harmless to worst; they differ in lightness too.
COLOURS = dict(zip(OUTCOMES, ["#9dc3e6", "#4da88f", "#f0c75e", "#dd7442", "#6a2135"], strict=True))
NEVER_FIRED = "never fired"


def site_labels(faulty: xr.Dataset) -> np.ndarray:
    """The site that each trial's fault struck, [trial]; if it never fired, that of its config, else "never fired"."""
    struck = faulty["struck_site"].values
    planned = values_of(faulty, "fault_site", "")
    return np.select([struck != "", planned != ""], [struck, planned], NEVER_FIRED)


def fault_table(sweep: xr.Dataset) -> pd.DataFrame:
    """One row a judged fault: its `trial`, the `site`, `tensor` and `bit` that it struck, in which number `format`, its
    `outcome` and `deviation_max`, and the steps at which it began (`start`) and its trial ended (`steps`).
    """
    faulty = studied(sweep)
    names = {"struck_tensor": "tensor", "struck_bit": "bit", "fault_outcome": "outcome"}
    kept = ("trial", "steps", "deviation_max", *names)
    table = pd.DataFrame({name: faulty[name].values for name in kept}).rename(columns=names)
    table["format"] = values_of(faulty, "fault_format", "fp32")
    table["start"] = numbers_of(faulty, "fault_start", 0)
    table["site"] = site_labels(faulty)
    return table[table["outcome"].isin(OUTCOMES)].reset_index(drop=True)
