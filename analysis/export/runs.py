"""What of a sweep goes to a tracker: runs with parameters, tags, last values and events, and their curves."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pandas as pd
import xarray as xr

from analysis.again.sweep_folder import SweepFolder
from analysis.export.names import former_name, key, sweep_name, text
from analysis.measures.incidents import all_incidents
from analysis.reading.finals import FINALS
from analysis.reading.incident_log import Logged
from analysis.reading.levels import parameter
from analysis.reading.open_sweep import events_of
from analysis.reading.selection import chosen_signals, selected
from harness.basics.printing import label
from harness.storage.results_folder import ResultsPath
from harness.storage.stored import PackInfo

GROUP_BYTES = 2**27  # of curves that are in memory at once: of a chunk all of its trials are read, each time
PARTS = {"layer": "layer_{}", "rank": "rank_{}"}  # of a name, for each value of a signal beside `step`


@dataclass(frozen=True)
class RunEvent:
    """Something that happened to a trial at one step: a strike of its fault, or an incident."""

    kind: str
    step: int
    title: str
    detail: Mapping[str, Any]

    @property
    def json(self) -> str:
        """Its detail; numbers that are not finite as text, for which JSON has no word."""
        return json.dumps(_finite(self.detail), sort_keys=True, default=str, allow_nan=False)


@dataclass(frozen=True)
class MeasuredCurve:
    """One curve: the steps at which it was measured [n], ascending, and its values there, float32 [n], none a NaN."""

    name: str
    steps: np.ndarray
    values: np.ndarray

    def between(self, first: int, stop: int) -> MeasuredCurve:
        """Of these steps alone."""
        low, high = np.searchsorted(self.steps, (first, stop))
        return MeasuredCurve(self.name, self.steps[low:high], self.values[low:high])


@dataclass(frozen=True)
class TrackedRun:
    """A trial as a tracker has it. `steps` are those that the store has so far.

    `created`, in seconds since 1970, is when its pack was, and a millisecond more for each trial before it there: so no
    two trials share a time, and the points of each lie together in an index by time.
    """

    trial: str
    name: str
    complete: bool
    steps: int
    created: float
    parameters: Mapping[str, Any]
    tags: Mapping[str, str]
    finals: Mapping[str, float]
    events: Sequence[RunEvent]
    signals: str | None  # those that were asked for, None for all

    @cached_property
    def checksum(self) -> int:
        """Of all but the curves."""
        events = [(event.kind, event.step, event.json) for event in self.events]
        facts = (self.parameters, self.tags, self.finals, self.signals, events)
        return int(google_crc32c.value(json.dumps(facts, sort_keys=True, default=str).encode()))


@dataclass(frozen=True)
class Source:
    """A sweep, or the trials of it that were asked for, at one moment."""

    out: Path
    id: str  # of the results folder
    sweep: xr.Dataset
    signals: list[str]
    asked: str | None  # the signals in the words of the command
    packs: Mapping[str, PackInfo]
    events: pd.DataFrame  # of faults
    incidents: Mapping[str, Sequence[RunEvent]]
    recorded: str = ""  # the name under which a place has it already

    @classmethod
    def open(cls, out: Path, wheres: Sequence[str], signals: str | None, finds_incidents: bool) -> Source:
        """Of the results folder `out`. Raises ConfigError as `open_sweep` and `analysis.reading.selection` do."""
        folder = ResultsPath.open(out)
        opened = SweepFolder.open(out)
        sweep, chosen = selected(opened.sweep, wheres), chosen_signals(opened.sweep, signals)
        incidents = {trial: [_logged(one) for one in log] for trial, log in opened.logs.items()}
        if finds_incidents:
            incidents = _found(opened, sweep)
        by_id = {pack.id: pack for pack in opened.packs}
        return cls(Path(out), folder.id, sweep, chosen, signals, by_id, events_of(opened.packs), incidents)

    @property
    def name(self) -> str:
        """Of the sweep, as a folder, a file or a tracker's project has it."""
        return self.recorded or sweep_name(self.out.resolve().name, self.sweep.attrs["study"], self.id)

    @property
    def former_name(self) -> str:
        """As earlier versions had it."""
        return former_name(self.sweep.attrs["study"], self.id)

    def under(self, name: str) -> Source:
        """The same, to be exported under this name."""
        return dataclasses.replace(self, recorded=name)

    def as_in(self, place: Path) -> Source:
        """The same, under the name that tables of it have in a place already, also where its folder was renamed."""
        ends = (f"-{self.id[:8]}", f"-{self.id[:8]}.nc")
        there = sorted(path.name.removesuffix(".nc") for path in place.iterdir() if path.name.endswith(ends))
        return self.under(there[0]) if there else self

    def page(self, *names: str) -> bytes | None:
        """A file of the folder; None if it is not there."""
        file = ResultsPath.open(self.out)
        for name in names:
            file = file / name
        try:
            return file.read_bytes()
        except FileNotFoundError:
            return None

    # --- runs ----------------------------------------------------------------------------------------------------

    def runs(self) -> list[TrackedRun]:
        """One a trial, in the order of the sweep."""
        sweep, study = self.sweep, text(self.sweep.attrs["study"])
        columns = {name: sweep[name].values.tolist() for name in ("trial", "pack", "golden", "outcome", "complete")}
        varied = [name for name, column in sweep.coords.items() if "path" in column.attrs and _varies(column.values)]
        shown = {str(name): sweep[name].values.tolist() for name in varied}
        finals = {name: sweep[name].values.tolist() for name in FINALS}
        strikes = {str(trial): group for trial, group in self.events.groupby("trial", sort=False)}
        rows = {id: {trial: row for row, trial in enumerate(pack.attributes["ids"])} for id, pack in self.packs.items()}
        configs = [config for pack in self.packs.values() for config in pack.attributes["trials"]]
        nulls = {path for config in configs for path, value in _flat(config) if value is None}
        found = []
        for number, trial in enumerate(columns["trial"]):
            facts = {name: column[number] for name, column in columns.items()}
            pack = self.packs[facts["pack"]]
            config = pack.attributes["trials"][rows[pack.id][trial]]
            tags = {"study": study, "trial": trial, "pack": pack.id, "golden": facts["golden"]}
            tags |= {"outcome": text(facts["outcome"]), "mitigation": text(config.get("mitigation", ""))}
            tags |= {"fault": text(config["fault"]["name"]), "seed": text(config.get("seed", ""))}
            events = [*_struck(strikes.get(trial)), *self.incidents.get(trial, ())]
            words = [f"{name}={label(text(column[number]))}" for name, column in shown.items()]
            found.append(
                TrackedRun(
                    trial,
                    label(" ".join([trial[:8], *words])),
                    facts["complete"],
                    pack.attributes["steps_done"],
                    _seconds(pack.attributes["created"]) + rows[pack.id][trial] / 1000,
                    {key(path): parameter(value, path in nulls) for path, value in _flat(config)},
                    tags,
                    {name: column[number] for name, column in finals.items() if not np.isnan(column[number])},
                    sorted(events, key=lambda event: event.step) if facts["complete"] else [],
                    self.asked,
                )
            )
        return found

    def curves(self, numbers: Sequence[int], stops: Sequence[int]) -> Iterator[list[MeasuredCurve]]:
        """Those of the trials of these numbers, ascending, each up to its step in `stops`; a few are in memory."""
        sizes = [self.sweep[name].nbytes for name in self.signals]
        at_once = max(1, GROUP_BYTES * self.sweep.sizes["trial"] // max(1, sum(sizes)))
        for begin in range(0, len(numbers), at_once):
            group = list(numbers[begin : begin + at_once])
            # Of a slice dask reads those trials alone, of a list whole chunks of them.
            span = self.sweep[self.signals].isel(trial=slice(group[0], group[-1] + 1))
            is_dense = len(group) == span.sizes["trial"]
            part = span if is_dense else self.sweep[self.signals].isel(trial=group)
            arrays = {name: part[name].transpose("trial", "step", ...) for name in self.signals}
            values = {name: (array.dims[2:], array.values) for name, array in arrays.items()}
            for row, stop in enumerate(stops[begin : begin + at_once]):
                yield [
                    series
                    for name, (dims, array) in values.items()
                    for series in _series(name, dims, array[row, :stop])
                ]


def checksum(curves: Sequence[MeasuredCurve]) -> int:
    """Of names, steps and values."""
    found = 0
    for series in curves:
        if len(series.steps):
            for part in (series.name.encode(), series.steps.astype("<i8").tobytes(), series.values.tobytes()):
                found = google_crc32c.extend(found, part)
    return found


def _series(name: str, dims: tuple[Any, ...], values: np.ndarray) -> Iterator[MeasuredCurve]:
    """A signal of one trial, [steps(, layers(, ranks))], as curves; none of what was never measured."""
    for number, place in enumerate(np.ndindex(values.shape[1:])):
        column = values.reshape(len(values), -1)[:, number]
        steps = np.flatnonzero(~np.isnan(column))
        if len(steps):
            parts = [PARTS.get(dim, "{}").format(index) for dim, index in zip(dims, place, strict=True)]
            yield MeasuredCurve("/".join([key(name), *parts]), steps, column[steps])


def _varies(values: np.ndarray) -> bool:
    return len(pd.unique(values)) > 1


def _flat(config: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Path and value of every field that a stored trial has."""
    for name, value in config.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value


def _seconds(created: str) -> float:
    """Of a time in ISO 8601; 0 for one that is none."""
    try:
        return max(0.0, datetime.fromisoformat(created).timestamp())
    except (ValueError, OverflowError):
        return 0.0


def _step(value: Any) -> int:
    """Of an event; 0 for one that is none."""
    return int(value) if isinstance(value, int | float) and 0 <= value < 2**53 else 0


# --- events ------------------------------------------------------------------------------------------------------


def _struck(strikes: pd.DataFrame | None) -> Iterator[RunEvent]:
    for row in [] if strikes is None else strikes.to_dict("records"):
        detail = {str(name): value for name, value in row.items() if not _is_nothing(value)}
        place = f"{row.get('site')} {row.get('tensor')}"
        yield RunEvent("fault", _step(row.get("step")), text(f"fault struck {place}"), detail)


def _finite(value: Any) -> Any:
    """JSON's value with text for each number that is not finite."""
    if isinstance(value, float):
        return value if np.isfinite(value) else str(float(value))
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, Mapping):
        return {str(name): _finite(item) for name, item in value.items()}
    return value


def _is_nothing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and np.isnan(value))


def _logged(incident: Logged) -> RunEvent:
    """One that a playbook answered."""
    acts = ", ".join(dict.fromkeys(act.action for act in incident.acts)) or "no action"
    detail = {name: getattr(incident, name) for name in ("last", "closed", "alarms", "steps_lost")}
    acted = [{"step": act.step, "action": act.action, "to": act.to} for act in incident.acts]
    return RunEvent("incident", _step(incident.step), text(f"incident: {acts}"), {**detail, "acts": acted})


def _found(opened: SweepFolder, sweep: xr.Dataset) -> dict[str, list[RunEvent]]:
    """All incidents of the finished trials of `sweep`, by the golden twins of the whole one."""
    finished = sweep["trial"].values[sweep["complete"].values].tolist()
    found: dict[str, list[RunEvent]] = {trial: [] for trial in finished}
    wanted = {*finished, *sweep["golden"].values.tolist()}
    rows = [row for row, trial in enumerate(opened.sweep["trial"].values.tolist()) if trial in wanted]
    for one in all_incidents(opened.sweep.isel(trial=rows), opened.setups, opened.logs):
        if one.trial in found:
            words = one.row["symptoms"] or one.row["signs"] or one.row["detectors"]
            found[one.trial].append(RunEvent("incident", _step(one.first), text(f"incident: {words}"), one.row))
    return found
