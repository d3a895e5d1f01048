"""A sweep's results as one lazy dataset, trial by step by layer."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import json
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import dask
import dask.array
import numpy as np
import pandas as pd
import xarray as xr
from dask.delayed import delayed

from analysis.reading.acted import Acting, acting
from analysis.reading.finals import FINALS
from analysis.reading.levels import ABSENT, column, is_set, varies
from analysis.reading.loss_words import final_name, loss_attributes
from analysis.reading.provenances import NAMES as PROVENANCES
from analysis.reading.provenances import provenance_variables
from analysis.reading.stored_variables import stored_variables
from harness.basics.printing import encodable
from harness.config import CORE, NO_FAULT, ConfigError, Fault, Trial, field_types, sections
from harness.config.trial import default_of, younger
from harness.readings.table import SHOWN
from harness.storage.store import ENDS, SIGNALS
from harness.storage.stored import PackInfo, read_packs, read_store

ALWAYS = ("model.width", "model.depth", "optim.lr", "optim.clip", "train.steps", "mitigation", "fault.name", "seed")
RESULTS: tuple[str, ...] = ("trial", "golden", "outcome", "complete", "nonfinite_step", "masked_step", "strikes")
RESULTS += ("changes", "pack", "acted", "idle_parts")
STRUCK = ("struck_site", "struck_tensor", "struck_bit", "struck_format", "struck_zero")
TAKEN = {*RESULTS, *STRUCK, "step", "layer", "segment", "rank", "fault", *SIGNALS, *SHOWN, *ENDS, *FINALS}
TAKEN |= {*PROVENANCES}
YOUNGER = ("policy.",)  # sections that came later than others, whose fields have short names already
NAMES = {"fault.name": "fault", "optim.name": "optimizer", "detect.name": "detect", "playbook.name": "playbook"}
IN_STEPS = {"steps", "fault_start", "fault_duration", "fault_period", "warmup", "validate_every"}
IN_STEPS |= {"nonfinite_step", "masked_step"}
BEGUN = {"ids", "golden", "trials"}  # what a pack says of its trials before it is finished
SEVERAL = "several"
ZEROS = "share of the struck elements that were zero in the fault's format"
UNFINISHED = "unfinished"
ADDRESS = ("site", "tensor", "index", "bit", "mask", "format", "step", "rank")
EVENT_COLUMNS = ("trial", "pack", *ADDRESS, "before", "after", "changed", "was_zero")


def open_sweep(out: Path | str) -> xr.Dataset:
    """The sweep in folder `out`, finished or not, as a dataset that reads its values when they are needed.

    Dims are `trial` (all packs, in the order they were begun), `step`, `layer` and `segment` (equal parts of the
    held-out text); a trial with fewer than the longest or deepest is padded with NaN. Along `trial` lies a coordinate
    for each field of the config that varies in this sweep, and of its faults, under its short name (`lr`, `beta2`;
    `data_seed` where a part before it in the config has that name already; a fault's begin with it: `fault_bit`), with
    its full path in `attrs["path"]`; `fault` is the fault's name, and its class is `fault_kind`. What a trial does not
    have, such as the bit of a trial without a fault, is NaN or "". A field that is null has the word "none" there, a
    level among its numbers (`optim.clip=null,0.5`: an array of objects) or texts; `analysis.numbers` has NaN for it.

    `final_loss`, `final_validation_loss` and its standard error [trial] are those of each trial's own last steps,
    whatever the longest trial has; `initial_validation_loss` is that before the first (`analysis/reading/finals.py`).

    Also there: `golden` (the twin's trial id), `outcome` ("unfinished" until the pack is complete), `complete`,
    `nonfinite_step`, `masked_step` (the step after which a faulty trial was again its twin, bit for bit; both NaN where
    there is none), `strikes` and `changes` (how often the fault struck, and how often that changed something; 0 until
    the pack is complete), `struck_site`, `struck_tensor` and `struck_bit` (the address in the fault's events; "several"
    or NaN if they differ, "" or NaN if it never fired), `struck_format` (the number format in which they are counted,
    "" where the events do not say it), `struck_zero` (the share of the struck elements that were zero
    in the fault's number format before), `acted` and `idle_parts` (whether the mitigation acted in the trial,
    and which parts of it did not: `analysis/reading/acted.py`), and `pack`. A trial in several packs is taken from the
    complete one, else from the newest. The coordinates `provenance_step`, `provenance_site`, ..., `provenance_blamed`
    [trial] say where its first non-finite value came from (`analysis/reading/provenances.py`).

    Args:
        out: A results folder.

    Returns:
        The dataset, whose values are read when they are needed.

    Raises:
        ConfigError: `out` holds no store, or one of another format. It is a ValueError.
    """
    return open_with_packs(out)[0]


def fault_events(out: Path | str) -> pd.DataFrame:
    """What each fault of the sweep in `out` did, one row an event: the trial's id, its pack, and the event's fields.

    Args:
        out: A results folder.

    Returns:
        Columns are at least site, tensor, index, bit, mask, format, step, rank, before, after and changed; `before` and
        `after` are floats where the event has numbers, and its own words, such as a batch's digest, elsewhere. A faulty
        trial without a row never fired; of one that struck often the store keeps the first events alone, and the
        coordinate `strikes` of `open_sweep` the number of all. Only finished packs have events.

    Raises:
        ConfigError: As `open_sweep`.
    """
    return events_of(list(read_packs(Path(out))))


def open_with_events(out: Path | str) -> tuple[xr.Dataset, pd.DataFrame]:
    """`open_sweep` and `fault_events` of the same moment of a sweep that may go on, for one read of each file."""
    sweep, packs = open_with_packs(out)
    return sweep, events_of(packs)


def open_with_packs(out: Path | str) -> tuple[xr.Dataset, list[PackInfo]]:
    """`open_sweep`, and the packs that it was made of."""
    with _uncollected():
        attributes, packs = read_store(Path(out))
        known = list(packs)
        return dataset_of(attributes, known), known


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """No garbage collection in the block: JSON makes very many objects, none of which is garbage."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def dataset_of(attributes: dict[str, Any], packs: Sequence[PackInfo]) -> xr.Dataset:
    """`open_sweep` of these packs of a store with these attributes."""
    packs = sorted(packs, key=lambda pack: (pack.attributes["created"], pack.id))
    trials = kept_trials(packs)
    coordinates = _coordinates(trials)
    variables = stored_variables(packs, [(trial.number, trial.row) for trial in trials])
    sizes = {dim: size for variable in variables.values() for dim, size in variable.sizes.items()}
    for dim in ("step", "layer", "segment", *(["rank"] if "rank" in sizes else [])):
        coordinates[dim] = xr.Variable(dim, np.arange(sizes[dim]), {"long_name": dim, "units": dim})
    provenance = {name: _distinct(pack.attributes[name] for pack in packs) for name in ("corpus", "environment")}
    variables["loss"].attrs = loss_attributes(packs)
    return _with_finals(xr.Dataset(variables, coordinates, {**attributes, **provenance}))


def _with_finals(sweep: xr.Dataset) -> xr.Dataset:
    """The sweep with the losses at which its trials ended, each taken when it is asked for."""
    finals = {}
    for name, (long_name, final) in FINALS.items():
        values = delayed(lambda final=final: final(sweep).values, name=f"{name}-{uuid.uuid4().hex}")()
        lazy = dask.array.from_delayed(values, (sweep.sizes["trial"],), np.float64)
        attributes = {"units": "nat/token", "long_name": long_name}
        if name == "final_loss":
            attributes = {"units": sweep["loss"].attrs["units"], "long_name": final_name(sweep)}
        finals[name] = xr.Variable("trial", lazy, attributes)
    return sweep.assign(finals)


def events_of(packs: Sequence[PackInfo]) -> pd.DataFrame:
    """`fault_events` of these packs."""
    rows = []
    for trial in kept_trials(packs):
        for event in trial.of("faults", []):
            numbers = {name: _number(event[name]) for name in ("before", "after") if name in event}
            rows.append({"trial": trial.of("ids"), "pack": trial.pack.id, **event, **numbers})
    columns = list(dict.fromkeys([*EVENT_COLUMNS, *(name for row in rows for name in row)]))
    return pd.DataFrame(rows, columns=columns)


def _number(text: Any) -> Any:
    """The number for one that is stored as text, since JSON has no word for NaN and infinity."""
    try:
        # A digest could be all digits, but no number is as long.
        return float(text) if isinstance(text, str) and len(text) < 32 else text
    except ValueError:
        return text


def _distinct(values: Any) -> str:
    """The different ones of some JSON values, as the text of a JSON list: a netCDF file's attrs know no dicts."""
    return json.dumps([json.loads(text) for text in dict.fromkeys(json.dumps(v, sort_keys=True) for v in values)])


# --- which trials, and what is known of each ---------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Stored:
    """A trial as the store has it: in which row of which pack."""

    pack: PackInfo
    number: int  # of the pack
    row: int

    def of(self, name: str, missing: Any = None) -> Any:
        """What an attribute of the pack says of the trial; `missing` where the pack is not finished, or is older."""
        is_there = name in self.pack.attributes and (self.pack.complete or name in BEGUN)
        value = self.pack.attributes[name][self.row] if is_there else missing
        return value if name == "trials" else encodable(value)  # those are read section by section

    @property
    def acting(self) -> Acting | None:
        """None where it is not known: of an unfinished pack, and of one of an older format."""
        if not self.pack.complete or "acts" not in self.pack.attributes:
            return None
        return Acting(self.of("acts"), self.of("idle"), self.of("digest"))


def kept_trials(packs: Sequence[PackInfo]) -> list[Stored]:
    """Every trial once, in the order of `packs` and their rows."""
    best: dict[str, tuple[tuple[bool, str, str], Stored]] = {}
    for number, pack in enumerate(packs):
        rank = (pack.complete, pack.attributes["created"], pack.id)
        for row, trial in enumerate(pack.attributes["ids"]):
            if trial not in best or best[trial][0] < rank:
                best[trial] = (rank, Stored(pack, number, row))
    return sorted((stored for _, stored in best.values()), key=lambda stored: (stored.number, stored.row))


def _coordinates(trials: Sequence[Stored]) -> dict[str, xr.Variable]:
    events, logs = ([trial.of(name, []) for trial in trials] for name in ("faults", "incidents"))

    def results(name: str, missing: Any) -> list[Any]:
        return [trial.of(name, missing) for trial in trials]

    fixed: dict[str, tuple[list[Any], type, str]] = {
        "trial": (results("ids", ""), str, "trial id"),
        "golden": (results("golden", ""), str, "trial id of the golden twin"),
        "outcome": (results("outcome", UNFINISHED), str, "outcome"),
        "complete": ([trial.pack.complete for trial in trials], bool, "whether the trial's pack is finished"),
        "nonfinite_step": (results("nonfinite_step", None), float, "first step with a non-finite value"),
        "masked_step": (results("masked_step", None), float, "step after which it was its twin again"),
        "strikes": (results("strikes", 0), int, "number of the fault's strikes"),
        "changes": (results("changes", 0), int, "number of strikes that changed something"),
        "incidents": (list(map(len, logs)), int, "incidents that its playbook has answered"),
        "incidents_open": ([_sum(log, _is_open) for log in logs], int, "incidents that were not over at the end"),
        "acts": ([_sum(log, _answers) for log in logs], int, "answers to alarms"),
        "steps_lost": ([_sum(log, itemgetter("steps_lost")) for log in logs], int, "steps trained in vain or skipped"),
        "struck_site": ([_common(e, "site", "", SEVERAL) for e in events], str, "site that the fault struck"),
        "struck_tensor": ([_common(e, "tensor", "", SEVERAL) for e in events], str, "tensor that the fault struck"),
        "struck_bit": ([_common(e, "bit", None, None) for e in events], float, "bit that the fault struck"),
        "struck_format": (
            [_common(e, "format", "", SEVERAL) or "" for e in events],
            str,
            "number format of the bits that the fault struck",
        ),
        "struck_zero": ([_share_of_zeros(e) for e in events], float, ZEROS),
        "pack": ([trial.pack.id for trial in trials], str, "group in the store"),
    }
    coordinates = {
        name: xr.Variable("trial", np.array(values, dtype=kind), {"long_name": text} | _units(name, kind))
        for name, (values, kind, text) in fixed.items()
    }
    steps = [trial.pack.arrays["loss"]["shape"][1] for trial in trials]
    config = config_coordinates(results("trials", {}), steps)
    fields = pd.DataFrame({name: variable.values for name, variable in config.items()}, index=range(len(trials)))
    acted, idle = acting(fields, [trial.acting for trial in trials])
    return {
        **coordinates,
        **config,
        **provenance_variables([trial.of("provenance", {}) for trial in trials]),
        "acted": xr.Variable("trial", acted, {"long_name": "whether the mitigation acted", "units": "1"}),
        "idle_parts": xr.Variable("trial", idle, {"long_name": "parts of the mitigation that did not act"}),
    }


def _common(events: Sequence[Mapping[str, Any]], field: str, none: Any, several: Any) -> Any:
    """The one value that all events have in a field, or a word for there being none or several."""
    values = {event.get(field) for event in events}
    return none if not values else values.pop() if len(values) == 1 else several


def _sum(log: Sequence[Mapping[str, Any]], count: Callable[[Mapping[str, Any]], int]) -> int:
    """Over the incidents of a trial."""
    return sum(int(count(incident)) for incident in log)


def _answers(incident: Mapping[str, Any]) -> int:
    return len(incident["acts"])


def _is_open(incident: Mapping[str, Any]) -> int:
    return int(incident["closed"] is None)


def _share_of_zeros(events: Sequence[Mapping[str, Any]]) -> float:
    """Of the recorded elements of which it is known; NaN without any."""
    known = [event["was_zero"] for event in events if event.get("was_zero") is not None]
    return sum(known) / len(known) if known else np.nan


def config_coordinates(trials: Sequence[dict[str, Any]], steps: Sequence[int]) -> dict[str, xr.Variable]:
    """A coordinate for each field that varies, and for those that every reader expects; `steps` are those trained."""
    columns = {**_columns(trials), "train.steps": column(steps)}
    paths = list(dict.fromkeys([*_described(), *columns]))
    names, nothing = short_names(paths), column([ABSENT] * len(trials))
    coordinates = {}
    for path in paths:
        values = columns.get(path, nothing)
        if path in ALWAYS or varies(values) or (path.startswith("fault.") and is_set(values)):
            attributes = {"path": path, "long_name": _described().get(path, path.split(".")[-1].replace("_", " "))}
            kind = float if values.dtype.kind in "ifO" else str
            coordinates[names[path]] = xr.Variable("trial", values, attributes | _units(names[path], kind))
    return coordinates


def _columns(trials: Sequence[dict[str, Any]]) -> dict[str, np.ndarray]:
    """Path -> the field's value in each trial [trial]. Trials share most sections: each different one is read once."""
    left_out = _left_out()
    columns: dict[str, np.ndarray] = {}
    for name in dict.fromkeys([*left_out, *(name for trial in trials for name in trial)]):
        texts = np.array([repr(trial[name]) if name in trial else "" for trial in trials], dtype=object)
        which = pd.factorize(texts)[0]
        rows = np.unique(which, return_index=True)[1]
        parts = [_flat(name, trials[row][name]) if texts[row] else left_out.get(name, {}) for row in rows]
        parts = [{**_younger(name), **part} for part in parts]
        for part in parts:
            _check_numbers(part)
        paths = dict.fromkeys(path for part in (left_out.get(name, {}), *parts) for path in part)
        columns |= {path: column([part.get(path, ABSENT) for part in parts])[which] for path in paths}
    return columns


def short_names(paths: Sequence[str]) -> dict[str, str]:
    """Path -> name: its last part.

    It is `part_name` for a fault's field, and where an earlier path or a variable has that name; fields of a section
    that came later, `YOUNGER`, leave the others theirs.
    """
    names = {path: name for path, name in NAMES.items() if path in paths or path == "fault.name"}
    for path in sorted(paths, key=lambda path: path.startswith(YOUNGER)):
        part, _, last = path.rpartition(".")
        is_taken = part in ("fault", "signals") or last in TAKEN or last in names.values()
        names.setdefault(path, path.replace(".", "_") if is_taken else last)
    return names


def _parts() -> dict[str, type]:
    """What has fields that do not belong to one injector, by the name before them, the trial's own first."""
    return {"": Trial, **sections(), "fault": Fault}


@functools.cache
def _described() -> dict[str, str]:
    """Path -> what the field is."""
    texts = {"recipe": "recipe", "mitigation": "mitigation", "fault.name": "fault", "fault.kind": "class of the fault"}
    for part, cls in _parts().items():
        known = {field.name: field.metadata["help"] for field in dataclasses.fields(cls) if "help" in field.metadata}
        texts |= {f"{part}.{name}".lstrip("."): text for name, text in known.items()}
    return texts | {"train.steps": "optimizer steps of the run"}


@functools.cache
def _left_out() -> dict[str, dict[str, Any]]:
    """Section -> its fields, of those that a stored trial leaves out where they are at their defaults."""
    return {name: _flat(name, vars(cls())) for name, cls in sections().items() if name not in CORE}


@functools.cache
def _younger(section: str) -> dict[str, Any]:
    """Path -> default of the fields of a section that a stored trial leaves out where they are at their defaults."""
    return {f"{section}.{field}": default_of(section, field) for field in younger(section)}


def _flat(name: str, value: Any) -> dict[str, Any]:
    """Path -> value of a section, or of a field that belongs to none. No fault has none of its fields but the name."""
    if not isinstance(value, dict):
        return {encodable(name): value}
    if name == "fault" and value["name"] == NO_FAULT.name:
        return {"fault.name": NO_FAULT.name}
    return {encodable(f"{name}.{field}"): item for field, item in value.items()}


@functools.cache
def _numbers() -> frozenset[str]:
    """The paths of the fields that are numbers."""
    return frozenset(
        f"{part}.{name}".lstrip(".")
        for part, cls in _parts().items()
        for name, (kind, _) in field_types(cls).items()
        if kind in (int, float)
    )


def _check_numbers(values: Mapping[str, Any]) -> None:
    """Raises ConfigError for a stored value that is no number where figures and tables reckon with one."""
    for path, value in values.items():
        if path in _numbers() and not isinstance(value, int | float | None):
            stored = f"a stored trial has {path}={value!r:.60}"
            raise ConfigError(f"{stored}, which is no number; allowed: a store as a sweep has written it")


def _units(name: str, kind: type) -> dict[str, str]:
    return {"units": "step" if name in IN_STEPS else "1"} if kind in (int, float) else {}
