"""The faults of a campaign as a table: where each struck, and what became of it. All pictures of a campaign read it."""

from __future__ import annotations

import numpy as np
import pandas as pd
import xarray as xr

from analysis.measures.outcomes import IDLE, OUTCOMES
from analysis.measures.statistics import studied
from analysis.reading.twins import numbers_of, values_of
from harness.basics.printing import count
from harness.config.formats import HELD

# From harmless to worst; they differ in lightness too.
COLOURS = dict(zip(OUTCOMES, ["#9dc3e6", "#4da88f", "#f0c75e", "#dd7442", "#6a2135"], strict=True))
NEVER_FIRED = "never fired"


def site_labels(faulty: xr.Dataset) -> np.ndarray:
    """The site that each trial's fault struck, [trial]; if it never fired, that of its config, else "never fired"."""
    struck = faulty["struck_site"].values
    planned = values_of(faulty, "fault_site", "")
    return np.select([struck != "", planned != ""], [struck, planned], NEVER_FIRED)


def idle_words(sweep: xr.Dataset) -> str:
    """A sentence on the faults that no figure counts, because they changed nothing; "" without any."""
    idle = int((studied(sweep)["fault_outcome"].values == IDLE).sum())
    return f" Not counted: {count(idle, 'fault')} that never fired or wrote what was there." if idle else ""


def fault_table(sweep: xr.Dataset) -> pd.DataFrame:
    """One row a judged fault that changed something.

    Its `trial`, the `site`, `tensor` and `bit` that it struck, in which number `format`, its `outcome` and
    `deviation_max`, and the steps at which it began (`start`) and its trial ended (`steps`).
    """
    faulty = studied(sweep)
    names = {"struck_tensor": "tensor", "struck_bit": "bit", "fault_outcome": "outcome"}
    kept = ("trial", "steps", "deviation_max", *names)
    table = pd.DataFrame({name: faulty[name].values for name in kept}).rename(columns=names)
    struck, planned = values_of(faulty, "struck_format", ""), values_of(faulty, "fault_format", "fp32")
    table["format"] = np.where(np.isin(struck, list(HELD)), struck, planned)
    table["start"] = numbers_of(faulty, "fault_start", 0)
    table["site"] = site_labels(faulty)
    return table[table["outcome"].isin(OUTCOMES)].reset_index(drop=True)
