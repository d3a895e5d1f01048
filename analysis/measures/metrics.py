"""Numbers that sum up a trial, and groups of trials. Losses are in nat/token throughout."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
import xarray as xr

from analysis.measures.outcomes import JUDGED
from analysis.measures.paired import Estimate, mean, paired
from analysis.measures.rates import RateGrid, segment_losses
from analysis.reading.finals import final_loss
from analysis.reading.groups import split, splitting
from analysis.reading.open_sweep import RESULTS, STRUCK
from analysis.reading.twins import Trials, deviation_blocks
from harness.config import NO_FAULT

SEEDS = ("seed", "model_seed", "data_seed")
LOSSES = {"validation": "final_validation_loss", "training": "final_loss"}
"""Of which loss LR sensitivity is, and where `trial_table` has it."""
READ = ["loss", "initial_validation_loss", "final_validation_loss", "final_segment_loss"]
"""The variables that the tables here are made of."""


def initial_loss(ds: xr.Dataset) -> xr.DataArray:
    """Validation loss before the first step: [trial]. NaN if it is not finite.

    A store of an older version, which lacks it, has the training loss of the first step, of one batch.
    """
    # A slice, because a sweep that has no trials yet has no first step either.
    first = ds["loss"].isel(step=slice(0, 1)).astype("float64").mean("step", skipna=False).compute()
    loss = ds["initial_validation_loss"].compute().fillna(first)
    return loss.where(np.isfinite(loss))


def coordinates(ds: xr.Dataset) -> pd.DataFrame:
    """One row a trial: every coordinate along `trial`."""
    return pd.DataFrame({name: values.values for name, values in ds.coords.items() if values.dims == ("trial",)})


def trial_table(ds: xr.Dataset, loss: str = "validation") -> pd.DataFrame:
    """One row a trial: every coordinate along `trial`, `initial_loss`, both final losses, and `capped_loss`.

    `capped_loss` is min(final loss, loss at initialisation), and the latter for a finished trial without a final loss,
    which is how LR sensitivity counts a trial that diverged; it is NaN for an unfinished one. `loss` says of which
    final loss, one of `LOSSES`; ValueError for another.
    """
    if loss not in LOSSES:
        raise ValueError(f"loss={loss}: expected one of {', '.join(LOSSES)}")
    table = coordinates(ds)
    table["initial_loss"], table["final_loss"] = initial_loss(ds).values, final_loss(ds).values
    table["final_validation_loss"] = ds["final_validation_loss"].values
    initial = table["initial_loss"].fillna(table["initial_loss"].median())
    # A run that froze at its last step was validated after it.
    final = table[LOSSES[loss]].where(table["nonfinite_step"].isna())
    table["capped_loss"] = np.fmin(final, initial).where(table["complete"])
    return table


def clean_trials(ds: xr.Dataset) -> xr.Dataset:
    """The trials without a fault: golden twins included."""
    return ds.isel(trial=np.flatnonzero(ds["fault"].values == NO_FAULT.name))


def swept_axes(table: pd.DataFrame, among: Sequence[str]) -> list[str]:
    """`among`, and the further columns of the config that split its groups: other axes of the sweep.

    A field that follows from the others, such as the one that a mitigation sets, is none. Nor are seeds and rates.
    """
    known = {*RESULTS, *STRUCK, *JUDGED, *SEEDS, *LOSSES.values(), "fault", "lr", "initial_loss", "capped_loss"}
    number = np.zeros(len(table), dtype=int)
    for column in among:
        number = split(number, table[column])
    others = {column: table[column] for column in table.columns if column not in known and column not in among}
    return [*among, *splitting(number, others)[0]]


def lr_sensitivity(
    ds: xr.Dataset, over: Sequence[str] | None = None, loss: str = "validation", best: str = "seed"
) -> pd.DataFrame:
    """Learning-rate sensitivity (Wortsman et al. 2023, arXiv 2309.14322, section 2), one row a group of trials.

        sensitivity = mean over learning rates of min(final loss, loss at initialisation) - best such loss

    A trial that diverged counts with its loss at initialisation. Only finished trials without a fault count. `over`
    names the coordinates that make a group: width, mitigation and whatever else the sweep varies, unless given. `loss`
    is the final one: "validation", or "training", the mean of the last 5% of the steps. `best` is the lowest of each
    seed's own losses ("seed"), or the loss at the rate that is best for the mean of seeds ("mean").

    Columns: those of `over`, then `sensitivity` (the mean over seeds, nat/token), `low` and `high` (its 95% interval,
    `analysis.measures.statistics.mean_interval`; NaN for one seed), `uncapped`, `uncapped_low` and `uncapped_high`
    (the same of final losses as they are, infinite where a run was lost: a mitigation that starts at another loss is
    neither favoured nor punished), `seeds` and `rates` (how many of each), `lowest_rate`, `highest_rate`, `best_rate`
    (that of the lowest mean of capped losses) and `best_loss`. A seed that lacks one of the group's rates is left out,
    for a mean over fewer rates is another number; with no seed left, or with one rate, the sensitivity is NaN. Groups
    with different ranges of rates cannot be compared. Raises ValueError for another `loss` or `best`.
    """
    clean = clean_trials(ds[READ])
    table = trial_table(clean, loss)
    if loss == "validation":
        values = table["final_validation_loss"].where(table["nonfinite_step"].isna(), np.inf)
        final = segment_losses(clean, values.fillna(np.inf))
    else:
        final = table["final_loss"].fillna(np.inf).to_numpy()[:, None]
    axes = list(over) if over is not None else swept_axes(table, ("width", "mitigation"))
    table = table.assign(row=np.arange(len(table)), who=seed_numbers(table))
    table = table[table["complete"]]
    groups = table.groupby(axes, sort=True) if len(table) else []
    rows = [dict(zip(axes, key, strict=True)) | _sensitivity(group, final, best) for key, group in groups]
    return pd.DataFrame(rows, columns=[*axes, *_sensitivity(table.iloc[:0], final, best)])


def group_axes(table: pd.DataFrame) -> list[str]:
    """The columns of `lr_sensitivity` that name the group."""
    return list(table.columns[: table.columns.get_loc("sensitivity")])


def seed_numbers(table: pd.DataFrame) -> pd.Series:
    """A number for each different set of seeds, row by row."""
    return table.groupby([column for column in SEEDS if column in table], dropna=False).ngroup()


def rate_grid(group: pd.DataFrame, final: np.ndarray) -> RateGrid:
    """Of rows of `trial_table` with `who` (`seed_numbers`) and `row`, their place in `final` [trial, segment]."""
    initial = group["initial_loss"].fillna(group["initial_loss"].median())
    return RateGrid.of(group["who"], group["lr"], final[group["row"]], initial)


def _sensitivity(group: pd.DataFrame, final: np.ndarray, best: str) -> dict[str, float]:
    grid, rates = rate_grid(group, final), sorted(group["lr"].unique())
    is_defined = len(grid.seeds) > 0 and len(rates) > 1
    capped, uncapped = (
        paired(grid.sensitivity(is_capped, best), None, mean) if is_defined else Estimate()
        for is_capped in (True, False)
    )
    losses = np.nanmean(grid.capped, axis=2).mean(axis=0) if len(grid.seeds) else np.array([])
    return {
        "sensitivity": capped.value,
        "low": capped.low,
        "high": capped.high,
        "uncapped": uncapped.value,
        "uncapped_low": uncapped.low,
        "uncapped_high": uncapped.high,
        "seeds": len(grid.seeds),
        "rates": len(rates),
        "lowest_rate": min(rates, default=np.nan),
        "highest_rate": max(rates, default=np.nan),
        "best_rate": float(grid.rates[np.argmin(losses)]) if is_defined else np.nan,
        "best_loss": float(losses.min()) if is_defined else np.nan,
    }


def deviation_table(ds: xr.Dataset) -> pd.DataFrame:
    """One row a faulty trial with a golden twin, both finished: its coordinates, and what the fault did to the loss.

    `worst_deviation` is the largest D_t = loss_t(faulty) - loss_t(golden); `final_deviation` the difference of the
    final losses; `size` the largest |D_t|, infinite where the fault made the trial non-finite; `is_equal` says that
    every loss is the golden one's, bit for bit. Reads the losses of a block of trials at a time.
    """
    trials = Trials.of(ds)
    rows = np.flatnonzero(trials.has_twin)
    golden = trials.golden[rows]
    largest, size = np.full((2, len(trials.golden)), np.nan)
    for block, deviation in deviation_blocks(ds, trials, rows, np.zeros(len(largest), dtype=int)):
        largest[block] = np.where(np.isnan(deviation), -np.inf, deviation).max(axis=1, initial=-np.inf)
        size[block] = np.where(np.isnan(deviation), 0, np.abs(deviation)).max(axis=1, initial=0)
    table, final = trial_table(ds[READ].isel(trial=rows)), final_loss(ds).values
    table["worst_deviation"] = np.where(np.isfinite(largest[rows]), largest[rows], np.nan)
    table["final_deviation"] = final[rows] - final[golden]
    table["size"] = np.where(trials.is_lost[rows] & ~trials.is_lost[golden], np.inf, size[rows])
    table["is_equal"] = table["size"] == 0
    return table
