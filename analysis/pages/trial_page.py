"""What the page of one trial shows, as plain data: curves against its twin, strikes, incidents, config, command."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from analysis.again.batches import config_of, stored_trials, unknown_trial
from analysis.again.sweep_folder import SweepFolder
from analysis.measures.evidence import provenance_of
from analysis.measures.incidents import Incident, of_one, runs
from analysis.pages.command import training_command
from analysis.pages.curves import curve, largest
from analysis.pages.plain import plain, shown
from analysis.reading.finals import FINALS
from analysis.reading.open_sweep import ADDRESS, dataset_of
from analysis.reading.padding import cut, own_sizes
from analysis.reading.twins import deviations, numbers_of
from harness.config import ConfigError, sections
from harness.storage.results_folder import ResultsPath
from harness.storage.stored import PackInfo

POSTMORTEMS = "postmortems"  # the folder of pages that are written on single trials
LOSSES = ("final_loss", "final_validation_loss")
EVERY_STEP = ("loss", "grad_norm")  # NaN there is a number that was not finite
FIRST = ("loss", "validation_loss", "grad_norm", "update_rms", "learning_rate")  # of the signals, in a list
LEAST_OF_ALL = ("tokens_per_second", "step_seconds")
MOST_EVENTS = 200
AT_ONCE, KEPT_IN_MEMORY = 100, 2**27  # trials whose pages are made together, and bytes of their signals and twins'
FAILURES = (
    ConfigError,
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    ArithmeticError,
)  # of what a store should not hold


@dataclasses.dataclass(frozen=True)
class Detail:
    """How much of a trial its page shows: points of a curve of `FIRST`, and of any other signal."""

    first: int = 1200
    others: int = 600


@dataclasses.dataclass(frozen=True)
class TrialPages:
    """The pages of some trials: `page`, what is told of each, and `curves`: trial -> signal -> `curves.curve`."""

    pages: dict[str, dict[str, Any]]
    curves: dict[str, dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class IncidentRows:
    """The incidents of some trials, as `told_incident` has them; or why there are none, in words for the page."""

    by_trial: Mapping[str, Sequence[dict[str, Any]]]
    missing: str = ""


def trial_page(
    out: Path,
    attributes: dict[str, Any],
    packs: Sequence[PackInfo],
    trial: str,
    incidents: IncidentRows | None = None,
) -> dict[str, Any]:
    """`page` and `curves` of one trial and its golden twin, of those in these packs of the store in `out`.

    To look for incidents takes milliseconds a step: whoever has done it hands them on.

    Raises ConfigError for a trial that they do not have, and DamagedStore where its values cannot be read.
    """
    stored = stored_trials(packs)
    if trial not in stored:
        raise unknown_trial(out, trial, iter(stored))
    made = _made(opened(out, attributes, _packs_of(stored, [trial])), [trial], Detail(), incidents)
    return {"page": made.pages[trial], "curves": made.curves}


def trial_pages(
    out: Path, attributes: dict[str, Any], packs: Sequence[PackInfo], trials: Sequence[str], detail: Detail
) -> Iterator[TrialPages]:
    """The pages of these trials, some at a time, in their order; a damaged one has the reason as `damage` instead."""
    stored = stored_trials(packs)
    for begin in range(0, len(trials), AT_ONCE):
        part = trials[begin : begin + AT_ONCE]
        folder = opened(out, attributes, _packs_of(stored, part))
        trial_bytes = sum(values.nbytes for values in folder.sweep.data_vars.values()) // folder.sweep.sizes["trial"]
        at_once = max(1, KEPT_IN_MEMORY // max(1, 2 * trial_bytes))
        for first in range(0, len(part), at_once):
            some = part[first : first + at_once]
            try:
                yield _made(folder, some, detail)
            except FAILURES:  # a damaged file: who needs it is told one by one
                yield from (_alone(out, attributes, _packs_of(stored, [trial]), trial, detail) for trial in some)


def _alone(out: Path, attributes: dict[str, Any], packs: Sequence[PackInfo], trial: str, detail: Detail) -> TrialPages:
    try:
        return _made(opened(out, attributes, packs), [trial], detail)
    except FAILURES as error:
        return TrialPages({trial: {"id": trial, "damage": shown(str(error) or type(error).__name__)}}, {})


def _packs_of(stored: Mapping[str, PackInfo], trials: Sequence[str]) -> list[PackInfo]:
    """Those that the trials and their golden twins are taken from."""
    found: dict[str, PackInfo] = {}
    for trial in trials:
        pack = stored[trial]
        golden = stored.get(pack.attributes["golden"][pack.attributes["ids"].index(trial)], pack)
        found |= {pack.id: pack, golden.id: golden}
    return list(found.values())


def opened(out: Path, attributes: dict[str, Any], packs: Sequence[PackInfo]) -> SweepFolder:
    """The results in `out` as if there were these packs alone: opened in milliseconds, whatever else there is."""
    return SweepFolder(out, dataset_of(attributes, packs), packs)


def _made(
    folder: SweepFolder, trials: Sequence[str], detail: Detail, incidents: IncidentRows | None = None
) -> TrialPages:
    """Their values are read once, and are in memory together. Raises DamagedStore."""
    sweep = folder.sweep.sel(trial=list(trials))
    twins = [name for name in np.unique(sweep["golden"].values) if name in folder.sweep["trial"].values]
    rows = list(dict.fromkeys([*trials, *map(str, twins)]))
    signals = [name for name, signal in folder.sweep.data_vars.items() if "step" in signal.dims]
    part = folder.sweep[signals].sel(trial=rows).load()
    known = dataclasses.replace(folder, sweep=part.assign({name: FINALS[name][1](part) for name in LOSSES}))
    incidents = incidents or _incidents(known, trials)
    curves = {trial: _curves(known.sweep, row, detail) for row, trial in enumerate(rows)}
    stored = stored_trials(folder.packs)
    pages = {}
    for row, trial in enumerate(trials):
        golden = str(sweep["golden"].values[row])
        config = config_of(stored[trial], trial)
        if golden != trial and golden in curves:
            curves[trial]["deviation"] = _deviation(known.sweep, row, rows.index(golden), detail)
        pages[trial] = {
            "id": trial,
            "golden": golden if golden != trial else None,
            "has_twin": golden in curves,
            "facts": _facts(known.sweep, row, stored[trial]),
            "events": _events(stored[trial], trial),
            "incidents": list(incidents.by_trial.get(trial, ())),
            "incidents_missing": incidents.missing,
            "provenance": _provenance(known.sweep, trial),
            "config": _config(config),
            "command": training_command(config),
            "postmortem": _postmortem(folder.out, trial),
        }
    return TrialPages(pages, curves)


# --- curves ------------------------------------------------------------------------------------------------------


def _curves(sweep: xr.Dataset, row: int, detail: Detail) -> dict[str, Any]:
    """Signal -> curve with its unit and long name; of signals by layer and rank the largest. None has no value."""
    done = _steps_taken(sweep, row)
    names = [str(name) for name, signal in sweep.variables.items() if signal.dims[:2] == ("trial", "step")]
    sizes: dict[Hashable, int] = {dim: int(size[row]) for dim, size in own_sizes(sweep).items()}
    found = {}
    for name in sorted(names, key=_place):
        signal = sweep.variables[name]
        values = largest(cut(signal.values[row : row + 1, :done], signal.dims, sizes))[0]
        made = curve(values, detail.first if name in FIRST else detail.others, name in EVERY_STEP)
        if made["y"] or made["holes"]:
            about = shown(signal.attrs.get("long_name", name)) + (", the largest" if signal.ndim > 2 else "")
            found[shown(name)] = {"unit": shown(signal.attrs.get("units", "1")), "name": about, **made}
    return found


def _place(name: str) -> tuple[int, str]:
    if name in FIRST:
        return FIRST.index(name), name
    return (99, name) if name in LEAST_OF_ALL else (50, name)


def _steps_taken(sweep: xr.Dataset, row: int) -> int:
    """A trial of a complete pack has all its steps; of another those up to the last with any number."""
    if sweep.variables["complete"].values[row]:
        return int(sweep.variables["steps"].values[row])
    known = np.flatnonzero(np.isfinite([sweep.variables[name].values[row] for name in EVERY_STEP]).any(axis=0))
    return int(known[-1]) + 1 if len(known) else 0


def _deviation(sweep: xr.Dataset, row: int, golden: int, detail: Detail) -> dict[str, Any]:
    """loss_t(faulty) - loss_t(golden) from the strike on."""
    # Two losses of float32 differ by a number that float32 may not have.
    loss = sweep.variables["loss"].values.astype("float64")
    begin = int(np.nan_to_num(numbers_of(sweep, "fault_start", 0))[row])
    values = deviations(loss[row : row + 1], loss[golden : golden + 1], begin)[0]
    return {
        "unit": shown(sweep["loss"].attrs["units"]),
        "name": "loss less that of the golden twin",
        **curve(values, detail.first),
    }


# --- words -------------------------------------------------------------------------------------------------------


def _facts(sweep: xr.Dataset, row: int, pack: PackInfo) -> dict[str, Any]:
    """What became of it."""
    names = ["outcome", "steps", "nonfinite_step", "masked_step", "strikes", "changes", "steps_lost", "acted"]
    values = {name: sweep.variables[name].values[row] for name in (*names, *LOSSES)}
    known = {name: value for name, value in values.items() if value == value}
    known |= {name: int(known[name]) for name in ("nonfinite_step", "masked_step") if name in known}
    known |= {"steps_done_by_its_pack": pack.attributes["steps_done"], "complete": pack.complete}
    shown: dict[str, Any] = plain(known)
    return shown


def _provenance(sweep: xr.Dataset, trial: str) -> dict[str, str]:
    return {name: shown(text.removesuffix(".0")) for name, text in provenance_of(sweep, trial).items()}


def _events(pack: PackInfo, trial: str) -> list[dict[str, Any]]:
    """What its fault did, an event a strike, those that the store has kept."""
    if not pack.complete:
        return []
    events = pack.attributes["faults"][pack.attributes["ids"].index(trial)][:MOST_EVENTS]
    order = ("step", *(name for name in ADDRESS if name != "step"), "before", "after", "changed")
    return [plain({name: event[name] for name in (*order, *event) if name in event}) for event in events]


def _incidents(sweep: SweepFolder, trials: Sequence[str]) -> IncidentRows:
    """The incidents of these trials, finished or not."""
    try:
        found = incidents_by_trial(sweep, trials)
    except FAILURES as error:  # of what no sweep has written: its curves can still be looked at
        return IncidentRows({}, shown(f"They could not be told: {type(error).__name__}: {error}"))
    return IncidentRows({trial: [told_incident(one) for one in own] for trial, own in found.items()})


def incidents_by_trial(sweep: SweepFolder, trials: Sequence[str]) -> dict[str, list[Incident]]:
    """As `analysis.measures.incidents` finds them."""
    return {run.trial: of_one(run, sweep.logs.get(run.trial)) for run in runs(sweep.sweep, sweep.setups, trials)}


def told_incident(one: Incident) -> dict[str, Any]:
    """A row of the table of incidents, and what was done at each alarm."""
    acts = [{"step": act.step, "action": act.action, "back_to": act.to, **act.detail} for act in one.acts]
    row = {name: value for name, value in one.row.items() if name not in ("money", "tokens", "seconds", "trial")}
    shown: dict[str, Any] = plain({**row, "acts": acts})
    return shown


def _config(config: Mapping[str, Any]) -> dict[str, list[list[Any]]]:
    """`changed`: [key, value, default] where they differ, and what is set of the fault; `rest`: [key, value]."""
    changed: list[list[Any]] = []
    rest: list[list[Any]] = []
    for section, own in config.items():
        cls = sections().get(section)
        defaults = vars(cls()) if cls else {}
        if not isinstance(own, Mapping):
            usual = {"recipe": "plain", "mitigation": "none"}.get(section)
            (rest if own == usual else changed).append([section, own, usual])
            continue
        for name, value in own.items():
            is_default = name in defaults and defaults[name] == value
            is_default |= section == "fault" and (value is None or own.get("name") == "none")
            (rest if is_default else changed).append([f"{section}.{name}", value, defaults.get(name)])
    return {"changed": plain(changed), "rest": plain([row[:2] for row in rest])}


def _postmortem(out: Path, trial: str) -> str | None:
    """Its post-mortem's place in the results folder, if it has been written."""
    name = f"{trial}.html"
    return f"{POSTMORTEMS}/{name}" if (ResultsPath.at(out) / POSTMORTEMS / name).exists() else None
