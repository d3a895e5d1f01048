"""Numbers that sum up a trial, and groups of trials. Losses are in nat/token throughout."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
import xarray as xr

from analysis.finals import final_loss
from analysis.groups import split
from analysis.open_sweep import RESULTS, STRUCK
from analysis.outcomes import JUDGED
from analysis.statistics import CONFIDENCE, draws
from analysis.twins import Trials, blocks, deviations, twin_curves

SEEDS = ("seed", "model_seed", "data_seed")


def initial_loss(ds: xr.Dataset) -> xr.DataArray:
    """Training loss of the first step, which no update has touched: [trial]. NaN if it is not finite."""
    # A slice, because a sweep that has no trials yet has no first step either.
    first = ds["loss"].isel(step=slice(0, 1)).astype("float64").mean("step", skipna=False).compute()
    return (
        first.where(np.isfinite(first))
        .rename("initial_loss")
        .assign_attrs(units="nat/token", long_name="training loss at initialisation")
    )


def trial_table(ds: xr.Dataset) -> pd.DataFrame:
    """One row a trial: every coordinate along `trial`, `initial_loss`, `final_loss` and `capped_loss`.

    `capped_loss` is min(final loss, loss at initialisation), and the latter for a finished trial without a final loss,
    which is how LR sensitivity counts a trial that diverged; it is NaN for an unfinished one.
    """
    table = pd.DataFrame({name: values.values for name, values in ds.coords.items() if values.dims == ("trial",)})
    table["initial_loss"], table["final_loss"] = initial_loss(ds).values, final_loss(ds).values
    initial = table["initial_loss"].fillna(table["initial_loss"].median())
    table["capped_loss"] = np.fmin(table["final_loss"], initial).where(table["complete"])
    return table


def clean_trials(ds: xr.Dataset) -> xr.Dataset:
    """The trials without a fault: golden twins included."""
    return ds.isel(trial=np.flatnonzero(ds["fault"].values == "none"))


def clean_table(ds: xr.Dataset) -> pd.DataFrame:
    """`trial_table` of the trials without a fault."""
    return trial_table(clean_trials(ds[["loss"]]))


def swept_axes(table: pd.DataFrame, among: Sequence[str]) -> list[str]:
    """`among`, and the further columns of the config that split its groups: other axes of the sweep.

    A field that follows from the others, such as the one that a mitigation sets, is none. Nor are seeds and rates.
    """
    known = {*RESULTS, *STRUCK, *JUDGED, *SEEDS, "fault", "lr", "initial_loss", "final_loss", "capped_loss"}
    axes, number = list(among), np.zeros(len(table), dtype=int)
    for column in among:
        number = split(number, table[column])
    for column in table.columns:
        if column not in known and column not in axes:
            finer = split(number, table[column])
            if finer.max(initial=0) > number.max(initial=0):
                axes.append(column)
                number = finer
    return axes


def lr_sensitivity(ds: xr.Dataset, over: Sequence[str] | None = None) -> pd.DataFrame:
    """Learning-rate sensitivity (Wortsman et al. 2023, arXiv 2309.14322, section 2), one row a group of trials.

        sensitivity = mean over learning rates of min(final loss, loss at initialisation) - best such loss

    A trial that diverged counts with its loss at initialisation. Only finished trials without a fault count. `over`
    names the coordinates that make a group: width, mitigation and whatever else the sweep varies, unless given.

    Columns: those of `over`, then `sensitivity` (the mean over seeds, nat/token), `low` and `high` (a 95% percentile
    bootstrap over seeds, seeded; NaN for one seed; with two seeds it is their range), `seeds` and `rates` (how many of
    each), `lowest_rate`, `highest_rate`, `best_rate` (that of the lowest mean loss) and `best_loss`. A seed that lacks
    one of the group's rates is left out, for a mean over fewer rates is another number; with no seed left, or with one
    rate, the sensitivity is NaN. Groups with different ranges of rates cannot be compared.
    """
    table = clean_table(ds)
    axes = list(over) if over is not None else swept_axes(table, ("width", "mitigation"))
    table = table[table["complete"]]
    groups = table.groupby(axes, sort=True) if len(table) else []
    rows = [dict(zip(axes, key, strict=True)) | _sensitivity(group) for key, group in groups]
    return pd.DataFrame(rows, columns=[*axes, *_sensitivity(table.iloc[:0])])


def group_axes(table: pd.DataFrame) -> list[str]:
    """The columns of `lr_sensitivity` that name the group."""
    return list(table.columns[: table.columns.get_loc("sensitivity")])


def _sensitivity(group: pd.DataFrame) -> dict[str, float]:
    seeds = [column for column in SEEDS if column in group]
    losses = group.groupby([*seeds, "lr"])["capped_loss"].mean().unstack("lr")
    losses = losses[losses.notna().all(axis=1)]
    rates = sorted(group["lr"].unique())
    is_defined = len(losses) > 0 and len(rates) > 1
    each = losses.mean(axis=1).to_numpy() - losses.min(axis=1).to_numpy() if is_defined else np.array([])
    low, high = bootstrap_interval(each)
    means = losses.mean()
    return {
        "sensitivity": float(each.mean()) if is_defined else np.nan,
        "low": low,
        "high": high,
        "seeds": len(losses),
        "rates": len(rates),
        "lowest_rate": min(rates, default=np.nan),
        "highest_rate": max(rates, default=np.nan),
        "best_rate": float(means.idxmin()) if is_defined else np.nan,
        "best_loss": float(means.min()) if is_defined else np.nan,
    }


def bootstrap_interval(values: np.ndarray, seed: int = 0) -> tuple[float, float]:
    """95% percentile bootstrap of the mean of `values` [n] (Efron 1979); NaN for fewer than two.

    With few values it is too narrow: n = 2 gives their range, which holds the true mean half of the time.
    """
    if len(values) < 2:
        return np.nan, np.nan
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(values[draws(len(values), seed)].mean(axis=1), [tail, 1 - tail])
    return float(low), float(high)


def deviation(ds: xr.Dataset) -> xr.DataArray:
    """D_t = loss_t(faulty) - loss_t(golden), of every faulty trial whose golden twin is there: [trial, step].

    NaN where either loss is not finite.
    """
    position = pd.Index(ds["trial"].values).get_indexer(ds["golden"].values)
    faulty = np.flatnonzero((ds["fault"].values != "none") & (position >= 0))
    own = ds["loss"].isel(trial=faulty)
    golden = ds["loss"].isel(trial=position[faulty])
    difference = own.astype("float64") - golden.astype("float64").data
    return (
        difference.where(np.isfinite(difference))
        .rename("deviation")
        .assign_attrs(units="nat/token", long_name="loss, faulty minus golden")
    )


def deviation_table(ds: xr.Dataset) -> pd.DataFrame:
    """One row a faulty trial with a golden twin, both finished: its coordinates, and what the fault did to the loss.

    `worst_deviation` is D_max, the largest D_t of `deviation`; `final_deviation` the difference of the final losses;
    `size` the largest |D_t|, infinite where the fault made the trial non-finite; `is_equal` says that every loss is the
    golden one's, bit for bit. Reads the losses of a block of trials at a time.
    """
    trials = Trials.of(ds)
    rows = np.flatnonzero(trials.has_twin)
    golden = trials.golden[rows]
    largest, size = np.full((2, len(trials.golden)), np.nan)
    for block in blocks(ds["loss"], rows):
        found = deviations(*twin_curves(ds["loss"], block, trials.golden[block]))
        largest[block] = np.where(np.isnan(found), -np.inf, found).max(axis=1, initial=-np.inf)
        size[block] = np.where(np.isnan(found), 0, np.abs(found)).max(axis=1, initial=0)
    table, final = trial_table(ds[["loss"]].isel(trial=rows)), final_loss(ds).values
    table["worst_deviation"] = np.where(np.isfinite(largest[rows]), largest[rows], np.nan)
    table["final_deviation"] = final[rows] - final[golden]
    newly = ~np.isnan(trials.nonfinite_step[rows]) & np.isnan(trials.nonfinite_step[golden])
    table["size"] = np.where(newly, np.inf, size[rows])
    table["is_equal"] = table["size"] == 0
    return table
