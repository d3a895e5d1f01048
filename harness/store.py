"""The results on disk: one Zarr v3 group a pack, written block by block while the pack trains.

    <out>/store.zarr/zarr.json               attributes: format, study
    <out>/store.zarr/<pack>/zarr.json        the pack's attributes, and the metadata of its arrays (consolidated)
    <out>/store.zarr/<pack>/<signal>/c.0.B   block B of a signal: [trial, step(, layer)], float32, NaN where unmeasured

Every array has its final shape from the start, and a step that is not written yet reads as NaN, Zarr's fill value.
Appending by resize would rewrite an array's shape and its data in two files: a reader between the two, or a job that
is killed there, would see them torn. Here each file appears whole, under its final name, by an atomic rename.

A file is some hundred bytes of raw float32, so going through zarr-python costs mostly its event loop: 1 ms a chunk and
25 ms a pack, against 0.1 ms and 3 ms for writing the same bytes directly. A pack of small models trains in two seconds,
so that counts. Reading goes through any Zarr library.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import os
import shutil
import tempfile
import uuid
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from harness.config import ConfigError, Trial
from harness.zarr_files import (
    METADATA,
    array_metadata,
    chunk_key,
    group_metadata,
    strict_json,
    write_atomically,
    write_json,
)

FORMAT_VERSION = 3
STORE = "store.zarr"


@dataclass(frozen=True)
class Signal:
    """What is measured at every step, for each trial and perhaps each layer."""

    dims: tuple[str, ...]
    units: str
    long_name: str


_STEP, _LAYER = ("trial", "step"), ("trial", "step", "layer")
SIGNALS: dict[str, Signal] = {
    "loss": Signal(_STEP, "nat/token", "training loss"),
    "validation_loss": Signal(_STEP, "nat/token", "validation loss"),
    "grad_norm": Signal(_STEP, "1", "global gradient norm before clipping"),
    "param_norm": Signal(_STEP, "1", "global norm of the weights"),
    "second_moment_norm": Signal(_STEP, "1", "global norm of the second moment"),
    "update_rms": Signal(_STEP, "1", "root mean square of the weights' change"),
    "learning_rate": Signal(_STEP, "1", "learning rate in force"),
    "loss_scale": Signal(_STEP, "1", "loss scale in force"),
    "tokens": Signal(_STEP, "token", "tokens trained on so far, dropped sequences included"),
    "dropped": Signal(_STEP, "sequence", "sequences of the batch that were dropped"),
    "tokens_per_second": Signal(_STEP, "token/s", "training throughput of the trial"),
    "step_seconds": Signal(_STEP, "s", "time of one step of one trial: the pack's over its rows"),
    "activation_rms": Signal(_LAYER, "1", "root mean square of the block's output"),
    "attention_logit_max": Signal(_LAYER, "1", "largest attention logit"),
}


# --- the store of a sweep ----------------------------------------------------------------------------------------


def open_store(out: Path, study: str) -> None:
    """Make `out` ready for the results of `study`: create its store, or check the one it has.

    Raises ConfigError, and leaves everything as it was, if `out` is a file, holds another study's results or a store
    of another format, or cannot be written to. A folder with other files in it is fine: none of them is touched.
    """
    out = Path(out)
    if out.exists() and not out.is_dir():
        raise ConfigError(f"out={out}: is a file; allowed: a folder")
    store = out / STORE
    is_new = not (store / METADATA).exists()
    if is_new and store.exists() and (not store.is_dir() or any(not e.name.startswith(".") for e in store.iterdir())):
        raise ConfigError(f"out={out}: its {STORE} was not written by a sweep; allowed: an empty or new folder")
    if not is_new:
        found = read_root(out)["study"]
        if found != study:
            raise ConfigError(
                f"out={out}: holds results of study {found}; allowed: an empty or new folder, or study={found}"
            )
    _make_writable_folder(store, out)
    if is_new:
        write_json(store / METADATA, group_metadata({"format": FORMAT_VERSION, "study": study}))


def read_root(out: Path) -> dict[str, Any]:
    """The attributes of the store in `out`: format and study.

    Raises ConfigError if there is no store, or one that this version cannot read.
    """
    try:
        attributes = json.loads((Path(out) / STORE / METADATA).read_text())["attributes"]
        version = attributes["format"]
        attributes["study"]
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(f"out={out}: holds no results; allowed: a folder that a sweep has written") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"out={out}: its {STORE} cannot be read ({type(error).__name__}: {error}); allowed: another folder"
        ) from None
    if version != FORMAT_VERSION:
        raise ConfigError(
            f"out={out}: holds a store of format {version}; allowed: format {FORMAT_VERSION}, or an empty or new folder"
        )
    return attributes


def _make_writable_folder(folder: Path, out: Path) -> None:
    """Create `folder` and its parents, and prove that files can be made in it (root may lack that right too)."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        for path in missing:
            with contextlib.suppress(OSError):
                path.rmdir()
        raise ConfigError(f"out={out}: no write permission ({error.strerror}); allowed: a writable folder") from None


# --- one pack, written -------------------------------------------------------------------------------------------


class PackStore:
    """The writer of one pack's group. Only one process writes a pack."""

    def __init__(self, path: Path, attributes: dict[str, Any], steps: int, layers: int, block: int):
        self.path, self.attributes = path, attributes
        self.steps, self.layers, self.block = steps, layers, block
        self.trials = len(attributes["ids"])
        self._arrays = {name: self._metadata(name) for name in SIGNALS}

    def _metadata(self, name: str) -> dict[str, Any]:
        signal, shape = SIGNALS[name], self.shape(name)
        attributes = {"units": signal.units, "long_name": signal.long_name}
        return array_metadata(shape, (shape[0], self.block, *shape[2:]), signal.dims, attributes)

    def shape(self, signal: str) -> tuple[int, ...]:
        """[R, steps] or [R, steps, layers]."""
        sizes = {"trial": self.trials, "step": self.steps, "layer": self.layers}
        return tuple(sizes[dim] for dim in SIGNALS[signal].dims)

    @classmethod
    def create(
        cls,
        out: Path,
        pack_id: str,
        trials: Sequence[Trial],
        steps: int,
        layers: int,
        corpus: Mapping[str, Any],
        environment: Mapping[str, Any],
        block: int,
    ) -> PackStore:
        """A new group for `trials`, which takes the place of an unfinished one of that id.

        `block` is the number of steps in a chunk. Raises ValueError if the pack is complete: results are not redone.
        """
        attributes = {
            "trials": [trial.to_dict() for trial in trials],
            "ids": [trial.id for trial in trials],
            "golden": [trial.golden.id for trial in trials],
            "corpus": dict(corpus),
            "environment": dict(environment),
            "created": datetime.datetime.now(datetime.UTC).isoformat(),
            "steps_done": 0,
            "complete": False,
        }
        path = Path(out) / STORE / pack_id
        old = _read_pack(path)
        if old is not None and old.complete:
            raise ValueError(f"{path}: this pack is complete already")
        pack = cls(path, attributes, steps, layers, block=min(block, steps))
        pack._install()
        return pack

    @classmethod
    def resume(cls, out: Path, pack_id: str, step: int) -> PackStore | None:
        """The group of that id, to go on with from `step`; None if it is not there, or lacks values before that step.

        Raises ValueError if the pack is complete.
        """
        old = _read_pack(Path(out) / STORE / pack_id)
        if old is None:
            return None
        if old.complete:
            raise ValueError(f"{old.path}: this pack is complete already")
        shape, layers = old.arrays["learning_rate"]["shape"], old.arrays["activation_rms"]["shape"][2]
        block = old.arrays["learning_rate"]["chunk_grid"]["configuration"]["chunk_shape"][1]
        pack = cls(old.path, old.attributes, shape[1], layers, block)
        size = 4 * shape[0] * block
        # Every step that was trained has a learning rate. Files may be lost where a machine lost power.
        files = [old.path / "learning_rate" / chunk_key(number, 2) for number in range(step // block)]
        return pack if all(file.exists() and file.stat().st_size == size for file in files) else None

    def _install(self) -> None:
        """Build the empty group aside and move it into place, so that no reader finds half of one."""
        for stray in self.path.parent.glob(f".{self.path.name}.*"):
            shutil.rmtree(stray, ignore_errors=True)
        aside = self.path.with_name(f".{self.path.name}.{uuid.uuid4().hex}")
        for name, array in self._arrays.items():
            (aside / name).mkdir(parents=True)
            (aside / name / METADATA).write_text(strict_json(array))
        (aside / METADATA).write_text(strict_json(group_metadata(self.attributes, self._arrays)))
        if self.path.exists():
            replaced = aside.with_name(f"{aside.name}.old")
            self.path.rename(replaced)
            shutil.rmtree(replaced)
        aside.rename(self.path)

    def write(self, first_step: int, signals: Mapping[str, np.ndarray]) -> None:
        """Store the values of steps `first_step`, `first_step` + 1, ...: each signal is [R, n] or [R, n, layers].

        Blocks are written whole, so `first_step` is a multiple of `block`. A last block that is not full is padded
        with NaN; it may be written again, longer. Raises ValueError if a signal or a shape is not the store's.
        """
        lengths = {np.shape(values)[1] for values in signals.values()}
        if len(lengths) != 1 or first_step % self.block:
            raise ValueError(
                f"steps {sorted(lengths)} from {first_step}: expected one length, from a multiple of {self.block}"
            )
        for name, values in signals.items():
            if name not in SIGNALS:
                raise ValueError(f"signal {name}: unknown; expected one of {', '.join(SIGNALS)}")
            self._write_signal(name, first_step, np.asarray(values))
        self._update(steps_done=max(self.attributes["steps_done"], first_step + lengths.pop()))

    def _write_signal(self, name: str, first_step: int, values: np.ndarray) -> None:
        whole = self.shape(name)
        allowed = (whole[0], min(values.shape[1], self.steps - first_step), *whole[2:])
        if values.shape != allowed:
            raise ValueError(f"{name} from step {first_step}: shape {values.shape}; expected {allowed}")
        for offset in range(0, values.shape[1], self.block):
            chunk = np.full((whole[0], self.block, *whole[2:]), np.nan, dtype="<f4")
            part = values[:, offset : offset + self.block]
            with np.errstate(over="ignore"):
                chunk[:, : part.shape[1]] = part
            # A chunk of nothing but the fill value need not exist.
            if not np.isnan(chunk).all():
                key = chunk_key((first_step + offset) // self.block, len(whole))
                write_atomically(self.path / name / key, chunk.tobytes())

    def finish(
        self,
        outcome: Sequence[str],
        nonfinite_step: Sequence[int | None],
        masked_step: Sequence[int | None],
        faults: Sequence[Sequence[Mapping[str, Any]]],
        strikes: Sequence[int],
        changes: Sequence[int],
        dropped: Sequence[Sequence[Mapping[str, Any]]] | None = None,
    ) -> None:
        """Mark the pack complete, with one value of each of these for each of the R trials.

        `outcome` is the harness's word for how the run ended, `nonfinite_step` the first step with a non-finite value,
        `masked_step` the step after which the whole state of a faulty trial was again bitwise that of its golden twin;
        both steps are None where there is none. `faults` lists the fault's events, perhaps not all of them; `strikes`
        counts its strikes, and `changes` those of them that changed something. `dropped` lists the first sequences that
        were dropped from its batches; None: none were. Raises ValueError for a wrong number of values.
        """
        results: dict[str, list[Any]] = {
            "outcome": list(outcome),
            "nonfinite_step": list(nonfinite_step),
            "masked_step": list(masked_step),
            "faults": [list(events) for events in faults],
            "strikes": list(strikes),
            "changes": list(changes),
            "dropped": [[]] * self.trials if dropped is None else [list(records) for records in dropped],
        }
        for name, values in results.items():
            if len(values) != self.trials:
                raise ValueError(f"{name}: {len(values)} values; expected one for each of {self.trials} trials")
        self._update(**results, complete=True)

    def _update(self, **attributes: Any) -> None:
        self.attributes |= attributes
        write_json(self.path / METADATA, group_metadata(self.attributes, self._arrays))


# --- packs, read -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PackInfo:
    """What one pack's group says about itself: its attributes, and the Zarr metadata of each of its arrays."""

    path: Path
    attributes: dict[str, Any]
    arrays: dict[str, dict[str, Any]] = dataclasses.field(repr=False)

    @property
    def id(self) -> str:
        return self.path.name

    @property
    def complete(self) -> bool:
        return self.attributes["complete"]


def read_store(out: Path) -> tuple[dict[str, Any], Iterator[PackInfo]]:
    """`read_root` and `read_packs`, for one read of each file. Raises ConfigError as `read_root` does, at once."""
    return read_root(out), _packs(out)


def read_packs(out: Path) -> Iterator[PackInfo]:
    """Every pack in the store of `out`, in the order of their ids, for one file read each.

    A pack that is being put into place at this moment is left out. Raises ConfigError as `read_root` does.
    """
    read_root(out)
    yield from _packs(out)


def _packs(out: Path) -> Iterator[PackInfo]:
    with os.scandir(Path(out) / STORE) as entries:
        names = sorted(entry.name for entry in entries if not entry.name.startswith(".") and entry.name != METADATA)
    for name in names:
        pack = _read_pack(Path(out) / STORE / name)
        if pack is not None:
            yield pack


def read_pack_attrs(out: Path, pack_id: str) -> dict[str, Any]:
    """The attributes of one pack. Raises KeyError if the store has none of that id."""
    pack = _read_pack(Path(out) / STORE / pack_id)
    if pack is None:
        raise KeyError(pack_id)
    return pack.attributes


def is_complete(out: Path, pack_id: str) -> bool:
    """Whether the store has this pack, finished."""
    pack = _read_pack(Path(out) / STORE / pack_id)
    return pack is not None and pack.complete


def written_at(out: Path, pack_id: str) -> int | None:
    """When the attributes of a pack were last written, in nanoseconds: where it began, and where it was finished."""
    try:
        return (Path(out) / STORE / pack_id / METADATA).stat().st_mtime_ns
    except OSError:
        return None


def complete_trials(out: Path) -> set[str]:
    """The ids of the trials whose pack is finished."""
    return {trial for pack in read_packs(out) if pack.complete for trial in pack.attributes["ids"]}


def _read_pack(path: Path) -> PackInfo | None:
    try:
        group = json.loads((path / METADATA).read_bytes())
        return PackInfo(path, group["attributes"], group["consolidated_metadata"]["metadata"])
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, KeyError, TypeError) as error:
        warnings.warn(f"{path}: not a pack, left out ({type(error).__name__}: {error})", stacklevel=3)
        return None
