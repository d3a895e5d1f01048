"""Whether the mitigation of a trial acted there: by the bits of its losses, and by how often each of its parts did.

A part is named by the key that switches it on (`harness/training/activation_counts.py`). Those of a mitigation are the
ones that the trial has and its counterpart without the mitigation has not: that of the same seed, rate, fault and size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import xarray as xr

from analysis.reading.groups import split, splitting
from harness.config import Trial

BASELINE = Trial().mitigation  # that of a recipe without one
MARK = " †"
EVERY_BIT = "every bit"  # in place of a part: the losses are those of the recipe without the mitigation


@dataclass(frozen=True)
class Acting:
    """What the store has of one finished trial."""

    acts: Mapping[str, int]  # part -> at how many steps it acted
    idle: Mapping[str, str]  # part that could not -> why
    digest: str  # of its losses


def acting(trials: pd.DataFrame, known: Sequence[Acting | None]) -> tuple[np.ndarray, np.ndarray]:
    """`acted` and `idle_parts` of each trial: [trial] each.

    `acted` is 1 where the losses differ from those of the counterpart in some bit and every part of the mitigation
    acted at some step, 0 where not, and NaN without a mitigation, for an unfinished trial, and where nothing is known:
    no counterpart, no such part. `idle_parts` names the parts that did not act, with commas. `trials` has the config's
    columns; `known` is None for a trial that has nothing stored.
    """
    number = np.zeros(len(trials), dtype=int)
    # Counterparts have one number: it is for all that tells trials of one mitigation apart, not what follows from it.
    mitigation = split(number, trials["mitigation"])
    for axis in splitting(mitigation, {column: trials[column] for column in trials.columns})[0]:
        number = split(number, trials[axis])
    is_plain = (trials["mitigation"] == BASELINE).to_numpy()
    plain_row = {place: row for row, place in reversed(list(enumerate(number))) if is_plain[row]}
    acted, idle = np.full(len(trials), np.nan), np.full(len(trials), "", dtype=object)
    for row, trial in enumerate(known):
        if trial is None:
            continue
        has_plain = not is_plain[row] and number[row] in plain_row
        plain = (known[plain_row[number[row]]] if has_plain else None) or Acting({}, {}, "")
        parts = {part: count for part, count in trial.acts.items() if part not in plain.acts}
        missing = [part for part in trial.idle if part not in plain.idle]
        missing += [part for part, count in parts.items() if not count and part not in missing]
        is_alike = bool(trial.digest) and trial.digest == plain.digest
        missing += [EVERY_BIT] if is_alike and not missing else []
        idle[row] = ", ".join(missing)
        if not is_plain[row] and (missing or parts or (trial.digest and plain.digest)):
            acted[row] = not missing
    return acted, idle.astype(str)


def never_acted(trials: pd.DataFrame, by: Sequence[str]) -> pd.DataFrame:
    """Parts that acted in none of a mitigation's finished trials: columns mitigation, those of `by`, `idle_parts`.

    A row each mitigation and group that has some; trials with and without faults count. `trials` has a column for each
    coordinate that is asked for.
    """
    mitigated = trials[trials["complete"] & (trials["mitigation"] != BASELINE)]
    rows = []
    for key, group in mitigated.groupby(["mitigation", *by], sort=True, dropna=False) if len(mitigated) else ():
        parts = [text.split(", ") if text else [] for text in group["idle_parts"].unique()]
        missing = [part for part in parts[0] if all(part in other for other in parts[1:])]
        if missing:
            rows.append([*key, ", ".join(missing)])
    return pd.DataFrame(rows, columns=["mitigation", *by, "idle_parts"])


def marked(sweep: xr.Dataset) -> xr.Dataset:
    """The sweep with a † behind the names of mitigations of which some part acted in no trial of some width."""
    missing = set(_by_width(sweep)["mitigation"])
    names = sweep["mitigation"]
    if not missing:
        return sweep
    texts = np.array([f"{name}{MARK}" if name in missing else name for name in names.values], dtype=str)
    return sweep.assign_coords(mitigation=(names.dims, texts, names.attrs))


def idle_note(sweep: xr.Dataset) -> str:
    """What the † of `marked` says; "" without any."""
    notes = []
    for name, rows in _by_width(sweep).groupby("mitigation", sort=True):
        widths = rows.groupby("idle_parts", sort=True)["width"].agg(lambda at: ", ".join(map("{:g}".format, at)))
        parts = "; ".join(f"{idle} at width {at}" for idle, at in widths.items())
        notes.append(f"{str(name).removesuffix(MARK)} ({parts})")
    return f"{MARK.strip()} did not act as named in any trial: {', '.join(notes)}." if notes else ""


def _by_width(sweep: xr.Dataset) -> pd.DataFrame:
    names = ("complete", "mitigation", "width", "idle_parts")
    return never_acted(pd.DataFrame({name: sweep[name].values for name in names}), ("width",))
