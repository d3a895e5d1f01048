"""What is forecast of a recipe at a size that nobody has trained: one number for each seed, from trials or a table.

A *cell* is a recipe at a size; some targets have a number for each learning rate of a cell. Sizes are width and depth,
and their parameters outside of embeddings, 12 depth width^2 (Kaplan et al. 2020, arXiv 2001.08361, section 2.1).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
import xarray as xr

from analysis.measures.metrics import RateGrid, seed_numbers, segment_losses, swept_axes, trial_table
from analysis.measures.outcomes import outcomes_and_notes
from analysis.measures.scaling import arm_words
from analysis.measures.spikes import spike_score
from analysis.reading.twins import blocks
from harness.config import NO_FAULT, ConfigError
from harness.config.names import LAST_BIT
from harness.objectives.outcome import TRAINED

CELL = ["recipe", "width", "depth"]
UNIT = [*CELL, "lr"]  # of a target that has a number for each rate; else `lr` is NaN
AT = 0.1  # share of the run after which early signals are read


@dataclass(frozen=True)
class ForecastTarget:
    """A number of a cell. `is_share`: each run has it as 0 or 1. `better`: 1 where more is, -1 where less is."""

    text: str
    units: str = "1"
    by_rate: bool = False
    is_share: bool = False
    better: int = 0


TARGETS = {
    "early_logit": ForecastTarget(
        "log10 of the largest attention logit of the first block early in a run", by_rate=True
    ),
    "divergent": ForecastTarget("whether a run does not train", by_rate=True, is_share=True),
    "edge": ForecastTarget("log10 of the largest stable learning rate", better=1),
    "sensitivity": ForecastTarget("LR sensitivity", "nat/token", better=-1),
    "loss": ForecastTarget("final validation loss at the best rate", "nat/token", better=-1),
    "spikes": ForecastTarget("spike score of the loss (OLMo 2), mean over rates"),
    "harm": ForecastTarget("log10 of the largest deviation of the loss under the fault", better=-1),
}


@dataclass(frozen=True)
class Observations:
    """Tables by target with `UNIT`, `seed` and `value`; `features` of each clean trial with `UNIT` and `seed`."""

    tables: Mapping[str, pd.DataFrame]
    features: pd.DataFrame = field(default_factory=pd.DataFrame)

    @property
    def sizes(self) -> list[tuple[float, float]]:
        """Width and depth of all cells, by rising number of parameters."""
        both = pd.concat([table[["width", "depth"]] for table in self.tables.values()]).drop_duplicates()
        found = list(map(tuple, both.to_numpy(float).tolist()))
        return sorted(found, key=lambda size: (parameters(*size), size))

    def at(self, sizes: Sequence[tuple[float, float]]) -> Observations:
        """Those of these sizes alone."""
        wanted = set(sizes)

        def kept(table: pd.DataFrame) -> pd.DataFrame:
            pairs = zip(table.get("width", ()), table.get("depth", ()), strict=True)
            return table[[pair in wanted for pair in pairs]]

        return Observations({name: kept(table) for name, table in self.tables.items()}, kept(self.features))

    def without(self, sizes: Sequence[tuple[float, float]]) -> Observations:
        """Those of all other sizes."""
        return self.at([size for size in self.sizes if size not in set(sizes)])


def parameters(width: float | np.ndarray, depth: float | np.ndarray) -> np.ndarray:
    """Outside of embeddings."""
    return np.asarray(12.0 * np.asarray(depth, float) * np.asarray(width, float) ** 2)


def observed(sweep: xr.Dataset, at: float = AT) -> Observations:
    """Of the finished trials of a sweep; a recipe is its mitigation and what else varies beside size, rate and seed.

    - `early_logit`: at the step after the share `at` of the run.
    - `divergent`: 1 for an outcome other than `trained`.
    - `edge`: a seed's is the middle, on a log scale, between its largest rate below which all train and the next; half
      a step beyond the rates where it is outside of them, so a bound there.
    - `sensitivity`, `loss`: as `analysis.measures.scaling.scalings` has them, of a loss at most that at initialisation.
    - `spikes`: `analysis.measures.spikes.spike_score`.
    - `harm`: of the trials with a fault, from `analysis.measures.outcomes`.

    Raises ConfigError for a sweep without finished trials at two rates.
    """
    table = trial_table(sweep).assign(row=np.arange(sweep.sizes["trial"]))
    table["who"] = seed_numbers(table)
    table = table[table["complete"] & (table["lr"] > 0)]
    clean = table[(table["fault"] == NO_FAULT.name) & table["is_validated"]]
    if clean["lr"].nunique() < 2:
        raise ConfigError(
            "the trials have fewer than two learning rates; allowed: finished trials at two rates or more"
        )
    axes = [name for name in swept_axes(sweep, clean, ("mitigation", "width", "depth")) if name not in CELL]
    table = table.assign(
        recipe=[arm_words(dict(zip(axes, key, strict=True))) for key in table[axes].itertuples(index=False)]
    )
    clean = table.loc[clean.index]
    tables = {
        "early_logit": _early_logits(sweep, clean, at),
        "divergent": _by_rate(clean, (clean["outcome"] != TRAINED).astype(float)),
        **_by_cell(clean, segment_losses(sweep, trial_table(sweep))),
        "spikes": _spikes(sweep, clean),
        "harm": _harm(sweep, table),
    }
    return Observations({name: one for name, one in tables.items() if len(one)}, _features(sweep, clean, at))


def _by_rate(trials: pd.DataFrame, values: pd.Series) -> pd.DataFrame:
    return trials[UNIT].assign(seed=trials["who"], value=values).dropna(subset="value").reset_index(drop=True)


def _by_cell(clean: pd.DataFrame, final: np.ndarray) -> dict[str, pd.DataFrame]:
    """Edge, sensitivity and loss of each seed of each cell."""
    found: dict[str, list[pd.DataFrame]] = {"edge": [], "sensitivity": [], "loss": []}
    for cell, trials in clean.groupby(CELL):
        grid = RateGrid.of(trials, final)
        if len(grid.rates) < 2 or not len(grid.seeds):
            continue
        losses = grid.capped.mean(axis=2)
        is_stable = (trials["outcome"] == TRAINED).groupby([trials["who"], trials["lr"]]).min().unstack("lr")
        is_stable = is_stable.loc[grid.seeds].astype(bool).to_numpy()
        numbers = {
            "edge": edges(np.log10(grid.rates), is_stable),
            "sensitivity": grid.sensitivity().mean(axis=1).to_numpy(),
            "loss": losses[:, losses.mean(axis=0).argmin()],
        }
        for name, values in numbers.items():
            key = dict(zip(CELL, cell, strict=True)) | {"lr": np.nan}
            found[name].append(pd.DataFrame(key | {"seed": grid.seeds, "value": values}))
    return {name: pd.concat(parts).dropna(subset="value") for name, parts in found.items() if parts}


def edges(rates: np.ndarray, is_stable: np.ndarray) -> np.ndarray:
    """Of each seed [seeds], from `is_stable` [seeds, rates], at rising logarithms of rates."""
    half = np.diff(rates) / 2
    middles = np.concatenate([[rates[0] - half[0]], rates[:-1] + half, [rates[-1] + half[-1]]])
    return np.asarray(middles[np.cumprod(is_stable, axis=1).sum(axis=1)])


def _early_logits(sweep: xr.Dataset, clean: pd.DataFrame, at: float) -> pd.DataFrame:
    if "attention_logit_max" not in sweep:
        return pd.DataFrame()
    values = _at_step(sweep, clean, "attention_logit_max", at)
    return _by_rate(clean, pd.Series(values, index=clean.index))


def _at_step(sweep: xr.Dataset, clean: pd.DataFrame, signal: str, at: float) -> np.ndarray:
    """log10 of a signal of each trial after that share of its run, in its first layer if it has some."""
    found = np.full(len(clean), np.nan)
    for steps, part in clean.assign(place=np.arange(len(clean))).groupby("steps"):
        step = min(round(at * float(steps)), int(steps) - 1)
        values = sweep[signal].isel(trial=part["row"].to_numpy(), step=step)
        values = values.isel({name: 0 for name in values.dims if name != "trial"})
        with np.errstate(divide="ignore", invalid="ignore"):
            found[part["place"]] = np.log10(values.values.astype(float))
    found[~np.isfinite(found)] = np.nan
    return found


def _spikes(sweep: xr.Dataset, clean: pd.DataFrame) -> pd.DataFrame:
    values = np.full(sweep.sizes["trial"], np.nan)
    for block in blocks(sweep["loss"], clean["row"].to_numpy()):
        losses = sweep["loss"].isel(trial=block).transpose("trial", "step").values.astype(float)
        values[block] = spike_score(np.where(np.isfinite(losses), losses, np.nan))
    trials = clean.assign(value=values[clean["row"]])
    means = trials.groupby([*CELL, "who"])["value"].mean().rename_axis(index={"who": "seed"})
    return means.dropna().reset_index().assign(lr=np.nan)


def _harm(sweep: xr.Dataset, table: pd.DataFrame) -> pd.DataFrame:
    is_struck = ~table["fault"].isin([NO_FAULT.name, LAST_BIT])
    struck = table[is_struck]
    if struck.empty:
        return pd.DataFrame()
    deviation = outcomes_and_notes(sweep)[0]["deviation_max"].values[struck["row"]]
    with np.errstate(divide="ignore", invalid="ignore"):
        values = np.log10(deviation)
    trials = struck.assign(value=np.where(np.isfinite(values), values, np.nan))
    means = trials.groupby([*CELL, "who"])["value"].mean().rename_axis(index={"who": "seed"})
    return means.dropna().reset_index().assign(lr=np.nan)


def _features(sweep: xr.Dataset, clean: pd.DataFrame, at: float) -> pd.DataFrame:
    """What of each clean trial was known at its first step (`initial_`), and after the share `at` of it (`early_`)."""
    found = clean[UNIT].assign(seed=clean["who"]).reset_index(drop=True)
    for signal in ("grad_norm", "attention_logit_max", "loss"):
        if signal in sweep:
            found[f"initial_{signal}"] = _at_step(sweep, clean, signal, 0.0)
            found[f"early_{signal}"] = _at_step(sweep, clean, signal, at)
    return found


# --- tables of others -----------------------------------------------------------------------------------------------

COLUMNS = {
    "lr": "peak learning rate of the run",
    "loss": "final loss of the run; with `step`, the loss at that step",
    "width": "width of the model",
    "depth": "number of blocks; default: 1",
    "parameters": "parameters, where width is not known",
    "seed": "seed; default: 0",
    "recipe": "name of what else differs between runs; default: one recipe",
    "initial_loss": "loss before the first step; default: the largest finite loss of the table",
    "divergent": "1 for a run that did not train; default: a loss that is not finite or not below initial_loss",
    "run": "name of the run; needed with `step`",
    "step": "step of a row, where the table has curves",
}
"""Columns of a table of runs, and what they are."""
FINAL = 0.05  # of a curve's steps, over which the final loss is the mean


def observed_runs(table: pd.DataFrame) -> Observations:
    """From a table of runs, or of points of their curves, with `COLUMNS`. Raises ConfigError."""
    runs = _runs_of(table)
    lost = (runs["divergent"] > 0).astype(float)
    units = runs[UNIT].assign(seed=runs["seed"])
    tables = {"divergent": units.assign(value=lost)}
    capped = np.fmin(runs["loss"].where(lost == 0, runs["initial_loss"]), runs["initial_loss"])
    found: dict[str, list[dict[str, object]]] = {"edge": [], "sensitivity": [], "loss": []}
    for cell, part in runs.assign(lost=lost, capped=capped).groupby(CELL):
        losses = part.pivot_table(index="seed", columns="lr", values="capped").dropna()
        if losses.shape[1] < 2 or losses.empty:
            continue
        is_lost = part.pivot_table(index="seed", columns="lr", values="lost", aggfunc="max").loc[losses.index]
        of_edge = edges(np.log10(losses.columns.to_numpy(float)), is_lost.to_numpy() == 0)
        best = losses.mean().to_numpy().argmin()
        for place, seed in enumerate(losses.index):
            key = dict(zip(CELL, cell, strict=True)) | {"lr": np.nan, "seed": seed}
            own = losses.iloc[place].to_numpy()
            for name, value in (("edge", of_edge[place]), ("sensitivity", own.mean() - own.min()), ("loss", own[best])):
                found[name].append(key | {"value": value})
    if not found["edge"]:
        raise ConfigError("the table has no model with two learning rates of one seed; allowed: two rates or more")
    return Observations(tables | {name: pd.DataFrame(rows) for name, rows in found.items()})


def _runs_of(table: pd.DataFrame) -> pd.DataFrame:
    """A row a run, with all columns. Raises ConfigError."""
    table = table.rename(columns=lambda name: str(name).strip().lower())
    if reasons := list(_missing(table)):
        raise ConfigError(*reasons)
    for name in (column for column in COLUMNS if column in table and column not in ("recipe", "run", "seed")):
        numbers = pd.to_numeric(table[name], errors="coerce")
        is_text = numbers.isna() & table[name].notna() & ~table[name].astype(str).str.lower().isin(["nan", "inf"])
        if is_text.any() or (name not in ("loss", "initial_loss") and numbers.isna().any()):
            wrong = table[name][is_text | numbers.isna()].iloc[0]
            raise ConfigError(f"column {name}: {str(wrong):.40} is no number; allowed: numbers")
        table = table.assign(**{name: numbers})
    if "step" in table:
        table = _ends_of_curves(table)
    if "width" not in table:  # a block of that many parameters
        table = table.assign(width=np.sqrt(table["parameters"] / 12), depth=1.0)
    for name, default in (("depth", 1.0), ("seed", 0), ("recipe", "all runs")):
        if name not in table:
            table = table.assign(**{name: default})
    if not ((table[["lr", "width", "depth"]] > 0).all(axis=None)):
        raise ConfigError("columns lr, width, depth, parameters: a value is not above 0; allowed: numbers above 0")
    if "initial_loss" not in table:
        table = table.assign(initial_loss=table["loss"].where(np.isfinite(table["loss"])).max())
    if "divergent" not in table:
        table = table.assign(divergent=(~(table["loss"] < table["initial_loss"])).astype(float))
    return table


def _missing(table: pd.DataFrame) -> Iterator[str]:
    wanted = ", ".join(COLUMNS)
    for name in ("lr", "loss"):
        if name not in table:
            yield f"column {name}: is not there; allowed: lr, loss, width or parameters, and any of {wanted}"
    if "width" not in table and "parameters" not in table:
        yield "columns width, parameters: none is there; allowed: one of them"
    if "step" in table and "run" not in table:
        yield "column run: is not there, and the table has steps; allowed: the name of each run"
    if not len(table):
        yield "the table has no row; allowed: a row a run"


def _ends_of_curves(table: pd.DataFrame) -> pd.DataFrame:
    rows = []
    for _, curve in table.sort_values("step", kind="stable").groupby("run"):
        last = curve.iloc[-1].to_dict()
        tail = curve["loss"].to_numpy(float)[-max(1, round(FINAL * len(curve))) :]
        rows.append(last | {"loss": tail.mean(), "initial_loss": last.get("initial_loss", curve["loss"].iloc[0])})
    return pd.DataFrame(rows)
