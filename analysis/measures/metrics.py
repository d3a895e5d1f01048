"""Numbers that sum up a trial, and groups of trials. Losses are in nat/token throughout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd
import xarray as xr

from analysis.measures.paired import Estimate, mean, paired
from analysis.reading.finals import final_loss
from analysis.reading.groups import is_seed, split, splitting
from analysis.reading.twins import Trials, blocks, deviation_blocks
from harness.config import NO_FAULT

SEEDS = ("seed", "model_seed", "data_seed", "own_start")
LOSSES = {"validation": "final_validation_loss", "training": "final_loss"}
"""Of which loss LR sensitivity is, and where `trial_table` has it."""
BEST = ("seed", "mean")
"""Whose lowest loss LR sensitivity is above: each seed's own, or that at the rate at which their mean is lowest."""
LENGTH = "steps"  # a coordinate
READ = ["loss", "validation_loss", "initial_validation_loss", "final_validation_loss", "final_segment_loss"]
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
    which is how LR sensitivity counts a trial that diverged; it is NaN for an unfinished one, and for one whose
    validation loss was never measured (not `is_validated`). `loss` says of which
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
    table["is_validated"] = _is_validated(ds, table)
    is_known = table["complete"] & (table["is_validated"] | (loss != "validation"))
    table["capped_loss"] = np.fmin(final, initial).where(is_known)
    return table


def _is_validated(ds: xr.Dataset, table: pd.DataFrame) -> np.ndarray:
    """Whether there is anything to say about a trial's validation loss, [trial]: attached runs measure none.

    A run that was not finite needs none, and one whose losses are NaN in spite of that has another kind of trouble.
    """
    has_ended = table["final_validation_loss"].notna() | table["nonfinite_step"].notna()
    is_known = has_ended.to_numpy() | np.isfinite(ds["initial_validation_loss"].values)
    unknown = np.flatnonzero(~is_known)
    for block in blocks(ds["validation_loss"], unknown):
        is_known[block] = np.isfinite(ds["validation_loss"].isel(trial=block).values).any(axis=1)
    return np.asarray(is_known)


def clean_trials(ds: xr.Dataset) -> xr.Dataset:
    """The trials without a fault: golden twins included."""
    return ds.isel(trial=np.flatnonzero(ds["fault"].values == NO_FAULT.name))


def swept_axes(ds: xr.Dataset, table: pd.DataFrame, among: Sequence[str]) -> list[str]:
    """`among`, and the further fields of the config that split its groups: other axes of the sweep.

    `table` has rows of `coordinates(ds)`. A field that follows from the others, such as the one that a mitigation sets,
    is no axis; nor are seeds, rates, and what became of a trial, such as the step of its first non-finite value.
    """
    number = np.zeros(len(table), dtype=int)
    for column in among:
        number = split(number, table[column])
    others = {
        column: table[column]
        for column in table.columns
        if column in ds.coords
        and not is_seed(ds[column].attrs.get("path", "seed"))
        and column not in ("fault", "lr", *among)
    }
    if LENGTH in others:  # last, for it follows from arm and batch where these warm up over as many tokens
        others[LENGTH] = others.pop(LENGTH)
    return [*among, *splitting(number, others)[0]]


def segment_losses(ds: xr.Dataset, table: pd.DataFrame) -> np.ndarray:
    """Final validation losses by segment of the held-out text, [trial, segment].

    They are infinite for a run that ended before, and NaN for one that was never validated.

    `table` is the `trial_table` of `ds`. A store of an older version has one segment for all.
    """
    whole = table["final_validation_loss"].where(table["nonfinite_step"].isna(), np.inf).fillna(np.inf).to_numpy()
    whole = np.where(table["is_validated"], whole, np.nan)
    losses = ds["final_segment_loss"].values.astype(float)
    losses = losses[:, np.isfinite(losses).any(axis=0)]
    return np.where(np.isinf(whole)[:, None], np.inf, losses) if losses.shape[1] else whole[:, None]


@dataclass(frozen=True)
class RateGrid:
    """The losses in nat/token of the seeds that have one at each learning rate."""

    seeds: np.ndarray  # [s], numbers
    rates: np.ndarray  # [r], rising
    final: np.ndarray  # [s, r, segment]; infinite for a run that was lost, NaN for a segment that no trial has
    initial: np.ndarray  # [s, r], before the first step

    @classmethod
    def of(cls, trials: pd.DataFrame, final: np.ndarray) -> RateGrid:
        """From rows of `trial_table` with `who` (`seed_numbers`) and `row`, their place in `final` [trial, segment].

        Several trials of one seed at one rate count with their mean, and what is NaN throughout does not count.
        """
        seeds, row = np.unique(trials["who"], return_inverse=True)
        rates, column = np.unique(trials["lr"], return_inverse=True)
        initial = trials["initial_loss"].fillna(trials["initial_loss"].median())
        values = np.column_stack([initial, final[trials["row"]]])
        total = np.zeros((len(seeds), len(rates), values.shape[1]))
        number = np.zeros((len(seeds), len(rates), 1))
        np.add.at(total, (row, column), values)
        np.add.at(number, (row, column), 1)
        with np.errstate(invalid="ignore", divide="ignore"):
            means: np.ndarray = total / number
        is_missing: np.ndarray = np.isnan(means[:, :, 1:]).all(axis=2)
        is_whole = ~is_missing.any(axis=1)
        kept, first = means[is_whole, :, 1:], means[is_whole, :, 0]
        # A run that was lost is so in every segment, also in those that a short text has not.
        return cls(seeds[is_whole], rates, np.where(np.isnan(kept).any(axis=(0, 1)), np.nan, kept), first)

    def at(self, rate: float) -> pd.DataFrame:
        """Final losses at one rate, [seed, segment]; NaN where the rate was not swept."""
        where = np.flatnonzero(self.rates == rate)
        values = self.final[:, where[0]] if len(where) else np.full((len(self.seeds), self.final.shape[2]), np.nan)
        return pd.DataFrame(values, index=self.seeds)

    @property
    def best_rate(self) -> float:
        """The rate at which the mean over seeds is lowest, of equal ones the smallest; NaN without seeds."""
        means = np.nanmean(self.final, axis=2).mean(axis=0) if len(self.seeds) else np.array([])
        return float(self.rates[np.argmin(means)]) if len(means) else np.nan

    def sensitivity(self, capped: bool = True, best: str = "seed") -> pd.DataFrame:
        """Each seed's LR sensitivity, [seed, segment], as a difference within each segment.

            mean over rates of min(final loss, loss at initialisation) - the lowest such loss

        Not `capped`: of the final losses as they are, which is infinite where a run was lost and the mitigations' own
        losses at initialisation play no part in. `best`: one of `BEST`. NaN where no run was finite.
        """
        if best not in BEST:
            raise ValueError(f"best={best}: expected one of {', '.join(BEST)}")
        if not len(self.seeds):
            return pd.DataFrame(np.empty((0, self.final.shape[2])))
        values = self.capped if capped else self.final
        means = np.nanmean(values, axis=2)
        lowest = np.argmin(means, axis=1) if best == "seed" else np.full(len(means), np.argmin(means.mean(axis=0)))
        with np.errstate(invalid="ignore"):
            above = values.mean(axis=1) - values[np.arange(len(values)), lowest]
        return pd.DataFrame(above, index=self.seeds)

    @cached_property
    def capped(self) -> np.ndarray:
        """What is not below the loss at initialisation, as a whole, is that in every segment: [s, r, segment]."""
        is_above = ~(np.nanmean(self.final, axis=2) < self.initial)
        return np.where(is_above[..., None] & ~np.isnan(self.final), self.initial[..., None], self.final)


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
    training = table["final_loss"].fillna(np.inf).to_numpy()[:, None]
    final = training if loss == "training" else segment_losses(clean, table)
    axes = list(over) if over is not None else swept_axes(clean, table, ("width", "mitigation"))
    table = table.assign(row=np.arange(len(table)), who=seed_numbers(table))
    table = table[table["complete"]]
    groups = table.groupby(axes, sort=True, dropna=False) if len(table) else []
    rows = [dict(zip(axes, key, strict=True)) | _sensitivity(group, final, best) for key, group in groups]
    return pd.DataFrame(rows, columns=[*axes, *_sensitivity(table.iloc[:0], final, best)])


def group_axes(table: pd.DataFrame) -> list[str]:
    """The columns of `lr_sensitivity` that name the group."""
    return list(table.columns[: table.columns.get_loc("sensitivity")])


def seed_numbers(table: pd.DataFrame) -> pd.Series:
    """A number for each different set of seeds, row by row."""
    return table.groupby([column for column in SEEDS if column in table], dropna=False).ngroup()


def _sensitivity(group: pd.DataFrame, final: np.ndarray, best: str) -> dict[str, float]:
    grid = RateGrid.of(group, final)
    is_defined = len(grid.seeds) > 0 and len(grid.rates) > 1 and bool(np.isfinite(grid.initial).all())
    capped, uncapped = (
        paired(grid.sensitivity(is_capped, best), None, mean) if is_defined else Estimate()
        for is_capped in (True, False)
    )
    losses = np.nanmean(grid.capped, axis=2).mean(axis=0) if is_defined else np.array([])
    return {
        "sensitivity": capped.value,
        "low": capped.low,
        "high": capped.high,
        "uncapped": uncapped.value,
        "uncapped_low": uncapped.low,
        "uncapped_high": uncapped.high,
        "seeds": len(grid.seeds),
        "rates": len(grid.rates),
        "lowest_rate": min(grid.rates, default=np.nan),
        "highest_rate": max(grid.rates, default=np.nan),
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
