"""Where first non-finite values came from, a row a trial; and how often the tensor that is blamed is the one struck."""

from __future__ import annotations

import numpy as np
import pandas as pd
import xarray as xr

from analysis.measures.statistics import studied, wilson_interval
from analysis.reading.provenances import FIELDS, PREFIX
from analysis.reading.twins import values_of

ALL = "all"
ABOUT = ("trial", "fault", "nonfinite_step", "struck_site", "struck_tensor")


def provenance(sweep: xr.Dataset) -> pd.DataFrame:
    """One row a trial that was not finite: what the sweep says of its fault, and all fields of its provenance.

    Args:
        sweep: As `analysis.open_sweep` gives it.

    Returns:
        The fields of `analysis.reading.provenances`, numbers as integers or NA. Of a run of an older version every
        field is NA or "".
    """
    lost = sweep.isel(trial=np.flatnonzero(np.isfinite(sweep["nonfinite_step"].values)))
    table = pd.DataFrame({name: values_of(lost, name, "") for name in ABOUT})
    for name, (kind, _) in FIELDS.items():
        values = pd.Series(lost[PREFIX + name].values)
        table[name] = values.astype("Int64") if kind is float else values
    return table.astype({"nonfinite_step": "Int64"})


def named(sweep: xr.Dataset) -> pd.DataFrame:
    """How often the blamed tensor is the struck one, by the site that was struck, and over `all` of them.

    Of the faulty trials that were not finite and of which a provenance is stored, whose golden twin was finite, and
    whose fault changed something in one tensor alone. A moment, gradient or update of a tensor is that tensor; an
    activation, and its gradient, is its tap.

    Args:
        sweep: As `analysis.open_sweep` gives it.

    Returns:
        Columns: `site`, `trials`, `named` (of them), `blamed` (of them, in which any tensor is), `share` = named /
        trials, and its 95% Wilson interval, `low` and `high`; NaN where there are no trials.
    """
    lost = np.isfinite(sweep["nonfinite_step"].values)
    golden = dict(zip(sweep["trial"].values, lost, strict=True))
    faulty = studied(sweep)
    kept = np.isfinite(faulty["nonfinite_step"].values) & (faulty["changes"].values > 0)
    kept &= np.isfinite(faulty[f"{PREFIX}step"].values)
    kept &= ~np.array([golden.get(twin, False) for twin in faulty["golden"].values], bool)
    kept &= ~np.isin(faulty["struck_tensor"].values, ("", "several"))
    faulty = faulty.isel(trial=np.flatnonzero(kept))
    struck = np.array([name.rpartition(":")[2] for name in faulty["struck_tensor"].values], str)
    table = pd.DataFrame({"site": faulty["struck_site"].values, "blamed": faulty[f"{PREFIX}blamed"].values})
    table["named"], table["blamed"] = table["blamed"] == struck, table["blamed"] != ""
    groups = [*table.groupby("site"), (ALL, table)]
    rows = [(site, len(part), int(part["named"].sum()), int(part["blamed"].sum())) for site, part in groups]
    scored = pd.DataFrame(rows, columns=["site", "trials", "named", "blamed"])
    low, high = wilson_interval(scored["named"], scored["trials"])
    share = scored["named"] / scored["trials"].where(scored["trials"] > 0)
    return scored.assign(share=share, low=low, high=high)
