"""What each playbook saves of the same incidents, and what it costs: against no answer, and against the oracle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
import xarray as xr

from analysis.measures.statistics import bootstrap, wilson_interval
from analysis.reading.groups import is_seed
from analysis.reading.levels import word
from analysis.reading.twins import blocks
from harness.basics.printing import label
from harness.config import NO_FAULT, Trial
from harness.config.names import LAST_BIT

NOTHING = Trial().playbook.name
ORACLE = "oracle"
LIMIT = 2.0  # standard deviations of golden runs beyond which a run's final loss is lost
PER = 1000


def cases(sweep: xr.Dataset) -> pd.DataFrame:
    """Every finished trial of a sweep with playbooks, a row each; those whose last bit was changed are left out.

    Columns: `trial`, number along it; `case`, what it shares with the same incident under other playbooks; `playbook`,
    with those of its and its detectors' fields that vary, but for none; `fault`, `deviation`: validation loss after the
    last step less that of the golden run without a playbook, nat/token, NaN where there is none; `spread`, the standard
    deviation of that loss over the seeds of golden runs; `is_lost`: not finite, or worse than the golden run by more
    than `LIMIT` of these, which is more than another seed would do, and never so where either is not known; `acts` and
    `steps_lost`, of a faulty trial those beyond its golden twin's under the same playbook, which has the same false
    alarms; `steps` and `step_seconds`.
    """
    fields = {str(name): str(coordinate.attrs.get("path", "")) for name, coordinate in sweep.coords.items()}
    kept = [name for name, path in fields.items() if path and path.split(".")[0] not in ("playbook", "detect")]
    table = pd.DataFrame({name: sweep[name].values for name in (*kept, "playbook") if name in sweep.coords})
    names = [name for name in kept if name in table and fields[name].split(".")[0] != "fault"]
    table["place"] = table.groupby(names, dropna=False, sort=False).ngroup()
    recipe = [name for name in names if not is_seed(fields[name])]
    table["recipe"] = table.groupby(recipe, dropna=False, sort=False).ngroup() if recipe else 0
    table["case"] = table.groupby(kept, dropna=False, sort=False).ngroup()
    table["playbook"] = _labels(sweep, fields) if "playbook" in table else NOTHING
    of_trials = ("incidents", "acts", "steps_lost", "steps", "changes", "outcome", "complete", "incidents_open")
    table = table.assign(**{name: sweep[name].values for name in of_trials}, trial=np.arange(len(table)))
    table["step_seconds"] = _medians(sweep["step_seconds"])
    table["loss"] = sweep["final_validation_loss"].values
    # Detectors that nothing answers change nothing: of trials without a playbook one a case is enough.
    table = table[table["complete"]].drop_duplicates(["case", "playbook"])
    golden = table[(table["fault"] == NO_FAULT.name) & (table["playbook"] == NOTHING)]
    of_place = dict(zip(golden["place"], golden["loss"], strict=True))
    table["deviation"] = table["loss"] - table["place"].map(of_place).to_numpy(dtype=float)
    spread = golden.groupby("recipe")["loss"].std()
    table["spread"] = table["recipe"].map(spread).to_numpy(dtype=float)
    table["is_lost"] = (table["outcome"] == "non-finite") | (table["deviation"] > LIMIT * table["spread"])
    clean = table[table["fault"] == NO_FAULT.name].set_index(["place", "playbook"])
    is_faulty = table["fault"] != NO_FAULT.name
    at = pd.MultiIndex.from_frame(table[["place", "playbook"]])
    for name in ("acts", "steps_lost"):
        of_twin = clean[name].groupby(level=[0, 1]).first().reindex(at).fillna(0).to_numpy()
        table[name] = np.where(is_faulty, (table[name] - of_twin).clip(lower=0), table[name])
    return table[table["fault"] != LAST_BIT].drop(columns="loss").reset_index(drop=True)


def _medians(signal: xr.DataArray) -> np.ndarray:
    """Over the steps, of each trial [trial]; NaN where nothing was measured."""
    medians = np.full(signal.sizes["trial"], np.nan)
    for block in blocks(signal, np.arange(len(medians))):
        medians[block] = pd.DataFrame(signal.isel(trial=block).values).median(axis=1)
    return medians


def _labels(sweep: xr.Dataset, fields: Mapping[str, str]) -> np.ndarray:
    """The playbook of each trial [trial]; where settings of one playbook vary, with these: `ladder (snapshot.every=5)`.

    `fields` are the paths of the coordinates.
    """
    names = sweep["playbook"].values.astype(str)
    labels = names.astype(object)
    paths = {name: path for name, path in fields.items() if path.split(".")[0] in ("playbook", "detect")}
    settings = pd.DataFrame({path.removeprefix("playbook."): sweep[name].values for name, path in paths.items()})
    for name in set(names) - {NOTHING}:
        part = settings[names == name]
        varied = part.loc[:, part.nunique(dropna=False) > 1]
        if len(varied.columns):
            told = (
                ", ".join(f"{key}={word(value)}" for key, value in row.items()) for row in varied.to_dict("records")
            )
            labels[names == name] = [label(f"{name} ({words})") for words in told]
    return labels


def _nothing_to_compare(known: Sequence[str]) -> str:
    """Why there is no table, if no incident has been left unanswered."""
    if not known:
        return "no finished fault has changed something"
    return f"no finished fault is without a playbook, to compare {', '.join(known)} with"


def is_oracle(playbook: str) -> bool:
    """Whether a label is one of the playbook that knows the fault."""
    return playbook.split(" ")[0] == ORACLE


def playbooks(sweep: xr.Dataset, per_hour: float | None = None) -> pd.DataFrame:
    """How well each playbook does, a row each, of the incidents that all of them had and whose fault changed something.

    - `incidents`, and `lost` of them; `kept`: of those that are lost without an answer, the share that is not lost with
      it, and its 95% Wilson interval, NaN where none is lost; `harmed`: those that are lost with it alone.
    - `deviation`: median size of the final deviation of what is not lost, nat/token.
    - `steps_lost`: mean of the steps that an incident cost, trained in vain or skipped, where an answer was given, with
      its 95% bootstrap interval, and their median, `steps_lost_median`; `over_oracle`, the ratio of the mean to the
      oracle's over the incidents that both have answered, and `over_oracle_in_all` that of the sums over all incidents,
      of which one without an answer costs no step, to be read beside `kept`.
    - `answered`: incidents with an answer, `ended`: the share of these in which no alarm was open at the end.
    - `false_acts` in a thousand steps of golden runs, and `false_cost`, the steps lost in a thousand by them.
    - `cost`: of an answered incident's steps, in whatever `per_hour` is for an hour of one trial; left out without it.

    Raises ValueError for a sweep without a trial that has no playbook.
    """
    table = cases(sweep)
    faulty = table[(table["fault"] != NO_FAULT.name) & (table["changes"] > 0)]
    known = sorted(faulty["playbook"].unique(), key=lambda name: (name != NOTHING, is_oracle(name), name))
    if NOTHING not in known:
        raise ValueError(_nothing_to_compare(known))
    wide = {name: faulty[faulty["playbook"] == name].set_index("case") for name in known}
    shared = sorted(set.intersection(*(set(part.index) for part in wide.values())))
    wide = {name: part.loc[shared] for name, part in wide.items()}
    lost_without = wide[NOTHING]["is_lost"].to_numpy()
    oracle = next((part for name, part in wide.items() if is_oracle(name)), None)
    rows = []
    for name, part in wide.items():
        is_lost, answered = part["is_lost"].to_numpy(), (part["acts"] > 0).to_numpy()
        low, high = wilson_interval((lost_without & ~is_lost).sum(), lost_without.sum())
        cost = part["steps_lost"].to_numpy(dtype=float)[answered]
        at_least, at_most = bootstrap(cost, lambda drawn: drawn.mean(-1), interpolated=True)
        clean = table[(table["playbook"] == name) & (table["fault"] == NO_FAULT.name)]
        row = {
            "playbook": name,
            "incidents": len(part),
            "lost": int(is_lost.sum()),
            "kept": (~is_lost[lost_without]).mean() if lost_without.any() else np.nan,
            "kept_low": float(low),
            "kept_high": float(high),
            "harmed": int((is_lost & ~lost_without).sum()),
            "deviation": float(part["deviation"][~is_lost].abs().median()),
            "answered": int(answered.sum()),
            "ended": (part["incidents_open"].to_numpy()[answered] == 0).mean() if answered.any() else np.nan,
            "steps_lost": cost.mean() if len(cost) else np.nan,
            "steps_lost_low": at_least,
            "steps_lost_high": at_most,
            "steps_lost_median": np.median(cost) if len(cost) else np.nan,
            "over_oracle": _over(part, oracle, in_all=False),
            "over_oracle_in_all": _over(part, oracle, in_all=True),
            "false_acts": PER * clean["acts"].sum() / max(1, clean["steps"].sum()),
            "false_cost": PER * clean["steps_lost"].sum() / max(1, clean["steps"].sum()),
        }
        if per_hour is not None:
            row["cost"] = float((part["steps_lost"] * part["step_seconds"])[answered].mean() / 3600 * per_hour)
        rows.append(row)
    return pd.DataFrame(rows)


def _over(part: pd.DataFrame, oracle: pd.DataFrame | None, in_all: bool) -> float:
    """Steps lost over the oracle's, of the incidents that both have answered, or `in_all`."""
    if oracle is None:
        return np.nan
    both = ((part["acts"] > 0) & (oracle["acts"] > 0)).to_numpy() | in_all
    spent = oracle["steps_lost"].to_numpy()[both].sum()
    return float(part["steps_lost"].to_numpy()[both].sum() / spent) if spent else np.nan


def by_fault(sweep: xr.Dataset, playbook: str) -> pd.DataFrame:
    """Of one playbook, a row a fault: `lost_without` an answer, of these the `kept`, and `harmed` others.

    `answered`: incidents with an answer, and `steps_lost`, the mean of the steps that these cost.
    """
    table = cases(sweep)
    faulty = table[(table["fault"] != NO_FAULT.name) & (table["changes"] > 0)]
    without = faulty[faulty["playbook"] == NOTHING].set_index("case")
    part = faulty[faulty["playbook"] == playbook].set_index("case")
    shared = without.index.intersection(part.index)
    lost, now, acts = without.loc[shared, "is_lost"], part.loc[shared, "is_lost"], part.loc[shared, "acts"]
    by = pd.DataFrame({"fault": without.loc[shared, "fault"], "lost_without": lost})
    by["kept"], by["harmed"], by["answered"] = lost & ~now, ~lost & now, acts > 0
    by["steps_lost"] = part.loc[shared, "steps_lost"].where(acts > 0)
    counted = dict.fromkeys(("lost_without", "kept", "harmed", "answered"), "sum")
    return by.groupby("fault").agg(counted | {"steps_lost": "mean"}).reset_index()
