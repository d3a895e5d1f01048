"""The trials of one results folder against those of another that differ from them in the same way, in pairs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from analysis.measures.statistics import mean_interval
from analysis.measures.tidy import final_losses
from analysis.reading.finals import final_loss
from analysis.reading.groups import flat_config, is_seed, splitting
from analysis.reading.levels import varies
from analysis.reading.open_sweep import dataset_of, kept_trials, short_names
from harness.config import ConfigError
from harness.config.fields import shown
from harness.objectives.outcome import TRAINED
from harness.storage.stored import read_store

OF_WINDOWS = ("data.", "train.validate")  # fields that say on which windows losses are taken
ABSENT = "-"
COMPARED = {  # what is compared -> in words, and its unit
    "validation": ("final validation loss", "nat/token"),
    "training": ("final training loss", "nat/token"),
    "quality": ("mean quality of the last completions", "1"),
}


@dataclass(frozen=True)
class FolderComparison:
    """`table` has a row a cell: the fields in which paired trials differ, and what they ended with.

    Columns `one` and `other` (means over seeds of what `compared` names), `change` (other - one), `low` and `high`
    (95%), `pairs`, and `healthy_one`, `healthy_other`: how many of them were trained. `fields` are the cell's, by short
    name, and `between` path -> both values, in which every pair differs. `trained_by` has the same of what they were
    trained by, such as versions. `alone`: trials of each folder without a partner.
    `compared` is a name in `COMPARED`.
    """

    table: pd.DataFrame
    fields: list[str]
    between: dict[str, tuple[str, str]]
    trained_by: dict[str, tuple[str, str]]
    alone: tuple[int, int]
    compared: str


@dataclass(frozen=True)
class _Folder:
    """The finished trials of a folder: the configuration of each by path, in the order of the dataset."""

    configs: list[dict[str, Any]]
    environments: list[dict[str, Any]]  # of packs
    sweep: xr.Dataset


def folders_compared(one: Path, other: Path) -> FolderComparison:
    """Pair the finished trials of two results folders, and compare how they ended.

    Two trials are a pair if their configurations, seeds included, are the same but for the fields in which all of one
    folder differ from all of the other, such as a mitigation. Where no trial of a folder was validated, as a run of the
    user's own, or the trials are policies, the losses in training are compared. Intervals are for other seeds and for
    other held-out text, of differences on the same windows (`analysis.measures.statistics.mean_interval`), and for
    other seeds alone where the folders have other windows; NaN for one pair, and where a loss is not finite.

    Raises:
        ConfigError: No pair, or as `analysis.open_sweep`.
    """
    folders = [_opened(folder) for folder in (one, other)]
    between = _between(*(folder.configs for folder in folders))
    keys = [[_key(config, between) for config in folder.configs] for folder in folders]
    places = {key: number for number, key in enumerate(keys[1])}
    pairs = [(number, places[key]) for number, key in enumerate(keys[0]) if key in places]
    if not pairs:
        differ = ", ".join(between) or "nothing in all trials alike"
        reason = f"no trial of one has a partner in the other (they differ in {differ})"
        raise ConfigError(f"{one} {other}: {reason}; allowed: folders with the same grid, seeds and data")
    alone = len(keys[0]) - len(pairs), len(keys[1]) - len(pairs)
    configs = [folders[0].configs[number] for number, _ in pairs]
    names, cells = _cells([{path: v for path, v in config.items() if path not in between} for config in configs])
    compared = _compared(folders, configs[0])
    chosen = [folder.sweep.isel(trial=[pair[side] for pair in pairs]) for side, folder in enumerate(folders)]
    ended = [(_ends(sweep, compared), sweep["outcome"].values == TRAINED) for sweep in chosen]
    if any(path.startswith(OF_WINDOWS) for path in between) or ended[0][0].shape != ended[1][0].shape:
        ended = [(losses.mean(axis=1, keepdims=True), healthy) for losses, healthy in ended]  # of unlike windows
    rows = []
    for cell in range(cells.max() + 1):
        here = np.flatnonzero(cells == cell)
        first, second = (values[here] for values, _ in ended)
        low, high = mean_interval(second - first)
        rows.append(
            {name: configs[here[0]].get(path, ABSENT) for path, name in names.items()}
            | {"one": first.mean(), "other": second.mean(), "change": (second - first).mean(), "low": low, "high": high}
            | {"pairs": len(here), "healthy_one": ended[0][1][here].sum(), "healthy_other": ended[1][1][here].sum()}
        )
    return FolderComparison(pd.DataFrame(rows), list(names.values()), between, _trained_by(*folders), alone, compared)


def _opened(folder: Path) -> _Folder:
    attributes, packs = read_store(folder)
    known = [pack for pack in packs if pack.complete]
    sweep = dataset_of(attributes, known)
    configs = {trial.of("ids"): flat_config(trial.of("trials", {})) for trial in kept_trials(known)}
    environments = [flat_config(pack.attributes["environment"]) for pack in known]
    return _Folder([configs[trial] for trial in sweep["trial"].values], environments, sweep)


def _trained_by(one: _Folder, other: _Folder) -> dict[str, tuple[str, str]]:
    """What was not the same for both folders: of each all values that some pack has."""
    found = {}
    for name in dict.fromkeys(name for folder in (one, other) for each in folder.environments for name in each):
        values = [sorted({shown(each.get(name, ABSENT)) for each in folder.environments}) for folder in (one, other)]
        if values[0] != values[1]:
            found[name] = (", ".join(values[0]), ", ".join(values[1]))
    return found


def _between(one: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]]) -> dict[str, tuple[str, str]]:
    """The fields that have one value in all trials of a folder, and another one in all of the other."""
    found = {}
    for path in dict.fromkeys(path for config in [*one[:1], *other[:1]] for path in config):
        values = [{repr(config.get(path, ABSENT)) for config in configs} for configs in (one, other)]
        if all(len(value) == 1 for value in values) and values[0] != values[1] and not is_seed(path):
            found[path] = (shown(one[0].get(path, ABSENT)), shown(other[0].get(path, ABSENT)))
    return found


def _key(config: Mapping[str, Any], between: Iterable[str]) -> str:
    """What both trials of a pair have."""
    return repr(sorted((path, repr(value)) for path, value in config.items() if path not in between))


def _cells(configs: Sequence[Mapping[str, Any]]) -> tuple[dict[str, str], np.ndarray]:
    """The fields that tell cells apart, path -> short name, and the number of each trial's cell."""
    paths = list(dict.fromkeys(path for config in configs for path in config if not is_seed(path)))
    columns = {path: np.array([shown(config.get(path, ABSENT)) for config in configs]) for path in paths}
    columns = {path: values for path, values in columns.items() if varies(values)}
    first = ("mitigation", "fault.name")
    order = sorted(columns, key=lambda path: (path not in first, path.startswith("fault.")))
    names, cells = splitting(np.zeros(len(configs), int), {path: columns[path] for path in order})
    short = short_names(paths)
    return {path: short[path] for path in names}, cells


def _compared(folders: Sequence[_Folder], config: Mapping[str, Any]) -> str:
    if config.get("objective.name") == "policy":
        return "quality"
    is_validated = all(folder.sweep["final_validation_loss"].notnull().any() for folder in folders)
    return "validation" if is_validated else "training"


def _ends(sweep: xr.Dataset, compared: str) -> np.ndarray:
    """What trials ended with, [trials, segments]; of a loss in training a single one."""
    if compared == "validation":
        return final_losses(sweep)
    final = final_loss(sweep).values[:, None]
    return np.where(np.isfinite(final), -final if compared == "quality" else final, np.nan)
