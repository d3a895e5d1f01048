"""Faults in activations by the module that gives them and the number of elements struck: what became of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd
import xarray as xr

from analysis.measures.known_faults import DAMAGING, LOST, KnownFaults
from analysis.measures.leaderboard import first_seen
from analysis.measures.statistics import wilson_interval
from analysis.reading.twins import numbers_of, values_of
from harness.config import NO_FAULT, Fault, trial_from_dict
from harness.storage.stored import read_packs

INTERVALS = ("low", "high")
OF_WIDTH = ("query", "key", "value", "projection", "down", "residual")


def module_of(pattern: str) -> str:
    """The last word of a tap, or of a glob over taps: `up` of `blocks.*.feedforward.up`."""
    return pattern.rpartition(".")[2]


def flips(sweep: xr.Dataset, is_alarm: Mapping[str, np.ndarray]) -> pd.DataFrame:
    """A row a `module` and number of `elements`, of the faults at activations that changed something.

    `flips`, how many; `damaging`: the share that moved the final loss by more than ten clean envelopes or ended in NaN;
    `lost`, that ended in NaN; and of each detector of `is_alarm` [trial, step] the share that it saw, under its name,
    with the ends of its 95% Wilson interval as `NAME_low` and `NAME_high`.
    """
    incidents = KnownFaults.of(sweep).table
    site = values_of(sweep, "fault_site", "")[incidents["trial"]]
    incidents = incidents[site == "activation"].reset_index(drop=True)
    rows = incidents["trial"].to_numpy()
    incidents["module"] = [module_of(str(pattern)) for pattern in values_of(sweep, "fault_tensor", "")[rows]]
    incidents["elements"] = np.nan_to_num(numbers_of(sweep, "fault_elements", 1)[rows]).astype(int)
    for name, said in is_alarm.items():
        incidents[name] = ~np.isnan(first_seen(said, incidents))
    table = []
    for (module, elements), part in incidents.groupby(["module", "elements"], sort=False):
        row = {"module": module, "elements": elements, "flips": len(part)}
        row |= {"damaging": part["size"].isin(DAMAGING).mean(), "lost": (part["size"] == LOST).mean()}
        for name in is_alarm:
            row[name] = part[name].mean()
            ends = wilson_interval(part[name].sum(), len(part))
            row |= {f"{name}_{end}": float(value) for end, value in zip(INTERVALS, ends, strict=True)}
        table.append(row)
    return pd.DataFrame(table)


def sizes_of(out: Path | None) -> dict[str, int]:
    """How many elements each module's output has in all blocks of the first golden run of a folder, by `module_of`."""
    for pack in read_packs(out) if out else ():
        for values in pack.attributes["trials"]:
            if values["fault"]["kind"] == NO_FAULT.kind:
                trial = trial_from_dict(values, {NO_FAULT.kind: Fault})
                model, tokens = trial.model, trial.train.sequences * trial.model.context
                inner = model.feedforward or int((model.expansion or 4) * model.width)
                sizes = dict.fromkeys(OF_WIDTH, tokens * model.width * model.depth)
                sizes["up"] = tokens * inner * model.depth
                return sizes | {"logits": tokens * int(pack.attributes["corpus"]["vocabulary"])}
    return {}
