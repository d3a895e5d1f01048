"""A store that is being written, followed: what has changed since the last look is read, and nothing else."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from analysis.pages.overview import columns_of
from analysis.pages.plain import shown
from analysis.reading.finals import final_loss, final_validation_loss
from analysis.reading.open_sweep import dataset_of
from harness.config import ConfigError
from harness.storage.progress_files import PROGRESS, read_asked, read_progress
from harness.storage.records import Unreadable
from harness.storage.results_folder import ResultsPath
from harness.storage.stored import STORE, PackInfo, pack_of, read_root, read_signal
from harness.storage.zarr_files import METADATA

MOST_MOVED = 500  # trials that are remembered as having moved
MOST_PACKS = 50  # in training, that are listed
LOOKS = 30  # after so many, packs that were complete are looked at again
LATEST = 5  # steps of which the latest loss is the mean
Signature = tuple[int, int, int]


@dataclass
class Store:
    """The packs of a results folder, each as it was when it was last read."""

    out: Path
    attributes: dict[str, Any] = field(default_factory=dict)
    packs: dict[str, PackInfo] = field(default_factory=dict)
    signatures: dict[str, Signature] = field(default_factory=dict)
    damaged: dict[str, str] = field(default_factory=dict)  # name -> what is wrong with it
    looks: int = 0

    def __post_init__(self) -> None:
        self.folder = ResultsPath.open(self.out)

    def refresh(self) -> list[str]:
        """Read what was written since; the ids of those packs. Raises ConfigError and FolderLost."""
        self.attributes = read_root(self.out)
        self.looks += 1
        store = self.folder / STORE
        names = [entry.name for entry in store.entries() if not entry.name.startswith(".") and entry.name != METADATA]
        for name in [name for name in (*self.packs, *self.damaged) if name not in names]:
            for known in (self.packs, self.signatures, self.damaged):
                known.pop(name, None)
        return [name for name in names if self._is_due(name) and self._has_changed(store / name)]

    def _is_due(self, name: str) -> bool:
        pack = self.packs.get(name)
        return pack is None or not pack.complete or self.looks % LOOKS == 0

    def _has_changed(self, place: ResultsPath) -> bool:
        status = (place / METADATA).status()
        if status is None:
            return False
        signature = (status.st_mtime_ns, status.st_size, status.st_ino)
        if self.signatures.get(place.name) == signature:
            return False
        try:
            self.packs[place.name] = pack_of(place)
        except FileNotFoundError:
            return False
        except (OSError, ConfigError) as error:
            self.packs.pop(place.name, None)
            self.damaged[place.name] = shown(str(error))
            self.signatures[place.name] = signature
            return True
        self.damaged.pop(place.name, None)
        self.signatures[place.name] = signature
        return True


@dataclass
class Overview:
    """The columns of all trials, in which losses that are known for good are worked out once."""

    finals: dict[tuple[str, Signature], tuple[float, float]] = field(default_factory=dict)

    def columns(self, store: Store) -> dict[str, Any]:
        """`columns_of` all trials of the store now. Raises ConfigError, as `open_sweep` does."""
        sweep = dataset_of(store.attributes, list(store.packs.values()))
        pairs = zip(sweep["trial"].values, sweep["pack"].values, strict=True)
        keys = [(str(trial), store.signatures[str(pack)]) for trial, pack in pairs]
        is_done = sweep["complete"].values
        new = np.array([n for n, key in enumerate(keys) if is_done[n] and key not in self.finals], int)
        if len(new):
            part = sweep.isel(trial=new)
            for number, *values in zip(new, final_loss(part).values, final_validation_loss(part).values, strict=True):
                self.finals[keys[number]] = (float(values[0]), float(values[1]))
        self.finals = {key: self.finals[key] for key in keys if key in self.finals}
        lost = np.isfinite(sweep["nonfinite_step"].values)
        known = np.array([self.finals.get(key, (np.nan, np.nan)) for key in keys]).reshape(-1, 2)
        final, validation = (np.where(lost, np.inf, known[:, column]) for column in (0, 1))
        latest = self._latest(store, sweep)
        return columns_of(
            sweep.drop_vars(["final_loss", "final_validation_loss"]),
            latest_loss=np.where(is_done, final, latest),
            final_loss=final,
            final_validation_loss=validation,
        )

    @staticmethod
    def _latest(store: Store, sweep: xr.Dataset) -> np.ndarray:
        """The mean of each trial's last finite losses, up to `LATEST`, of packs in training: [trial]."""
        values = np.full(sweep.sizes["trial"], np.nan)
        place = {trial: number for number, trial in enumerate(sweep["trial"].values)}
        for pack in store.packs.values():
            if pack.complete or not pack.attributes["steps_done"]:
                continue
            done = pack.attributes["steps_done"]
            try:
                losses = read_signal(pack, "loss", max(0, done - max(LATEST, pack.block)), done)
            except ConfigError:
                continue  # it is told where its curves are asked for
            for trial, row in zip(pack.attributes["ids"], losses, strict=True):
                last = row[np.isfinite(row)][-LATEST:]
                if len(last) and sweep["pack"].values[place[trial]] == pack.id:
                    values[place[trial]] = last.mean()
        return values


def progress_of(store: Store) -> dict[str, Any]:
    """How far the sweep is: trials done, in training and waiting, steps, and the packs in training."""
    complete = {trial for pack in store.packs.values() if pack.complete for trial in pack.attributes["ids"]}
    begun = {trial for pack in store.packs.values() for trial in pack.attributes["ids"]}
    try:
        asked = set(read_asked(store.out).trials)
    except Unreadable:
        asked = begun
    asked = asked or begun
    packs = list(_in_training(store))
    own = [store.packs[pack["id"]] for pack in packs if pack["id"] in store.packs]
    training = {trial for pack in own for trial in pack.attributes["ids"]}
    ahead = {pack["id"]: pack["steps"] for pack in packs}
    kept = store.packs.values()
    return {
        "asked": len(asked),
        "done": len(asked & complete),
        "training": len((asked & training) - complete),
        "waiting": len(asked - complete - training),
        "steps": sum(len(pack.attributes["ids"]) * pack.steps for pack in kept),
        "steps_done": sum(len(pack.attributes["ids"]) * _done(pack, ahead.get(pack.id, 0)) for pack in kept),
        "packs": packs[:MOST_PACKS],
    }


def _done(pack: PackInfo, ahead: int) -> int:
    """Steps; a pack counts those of unstored twins in its file, but not here."""
    return pack.steps if pack.complete else min(pack.steps, max(pack.attributes["steps_done"], ahead))


def _in_training(store: Store) -> Iterator[dict[str, Any]]:
    """The packs with a file of progress that are not complete, those that were heard of last first."""
    found, _ = read_progress(store.out / PROGRESS)
    now, kept = time.time(), []
    for name, far in found.items():
        status = (store.folder / PROGRESS / f"{name}.json").status()
        if status is not None and not (name in store.packs and store.packs[name].complete):
            kept.append((max(0.0, now - status.st_mtime), name, far))
    for age, name, far in sorted(kept, key=lambda one: one[:2]):
        yield {
            "id": shown(name),
            "trials": far.trials,
            "frozen": far.frozen,
            "steps": far.steps,
            "of": far.of,
            "is_stopped": far.is_stopped,
            "age": round(age, 1),
        }
