"""The results on disk: one Zarr v3 group a pack, written block by block while the pack trains.

    <out>/store.zarr/zarr.json               attributes: format, study, and the file's seal
    <out>/store.zarr/<pack>/zarr.json        the pack's attributes, its chunks' checksums and the file's seal among
                                             them, and the metadata of its arrays (consolidated)
    <out>/store.zarr/<pack>/<signal>/c.0.B   block B of a signal: [trial, step(, layer)], float32, NaN where unmeasured;
                                             then their CRC-32C
    <out>/store.zarr/<pack>/<end>/c.0.0      what is measured once: [trial, segment of the held-out text]

Every array has its final shape from the start, and a step that is not written yet reads as NaN, Zarr's fill value. Of a
block that is written every chunk is there, so that one that is missing was lost.
Appending by resize would rewrite an array's shape and its data in two files: a reader between the two, or a job that
is killed there, would see them torn. Here each file appears whole, under its final name, by an atomic rename.

A chunk that takes the place of another one is announced before, with the checksum that it will have, so whoever reads
meanwhile, or after a kill, knows both. A new one is listed once it is there.

A file is some hundred bytes, so going through zarr-python costs mostly its event loop: 1 ms a chunk and
25 ms a pack, against 0.1 ms and 3 ms for writing the same bytes directly. A pack of small models trains in two seconds,
so that counts. Reading goes through any Zarr library.
"""

from __future__ import annotations

import datetime
import os
import uuid
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from harness.config import ConfigError
from harness.config.limits import SEGMENTS
from harness.storage.json_seal import SEAL, UNSEALED, sealed
from harness.storage.pack_info import (
    CHECKSUMS,
    DIMS,
    NAME,
    OF_COMPLETE,
    PENDING,
    SINCE_6,
    checksums_in,
    chunk_shape,
    ranks_of,
    with_checksum,
)
from harness.storage.results_folder import ResultsPath, check_own, write_at
from harness.storage.stored import (
    FORMAT_VERSION,
    STORE,
    WRITABLE,
    PackInfo,
    checksum_in,
    damage,
    found_checksums,
    packed,
    read_pack,
    read_root,
)
from harness.storage.zarr_files import METADATA, array_metadata, chunk_key, group_metadata, strict_json


@dataclass(frozen=True)
class Signal:
    """What is measured at every step, for each trial and perhaps each layer."""

    dims: tuple[str, ...]
    units: str
    long_name: str


_STEP, _LAYER, _SEGMENT, _ = DIMS
SIGNALS: dict[str, Signal] = {
    "loss": Signal(_STEP, "nat/token", "training loss"),
    "validation_loss": Signal(_STEP, "nat/token", "validation loss"),
    "validation_loss_error": Signal(_STEP, "nat/token", "standard error of the validation loss"),
    "grad_norm": Signal(_STEP, "1", "global gradient norm before clipping"),
    "param_norm": Signal(_STEP, "1", "global norm of the weights"),
    "second_moment_norm": Signal(_STEP, "1", "global norm of the second moment"),
    "update_rms": Signal(_STEP, "1", "root mean square of the weights' change"),
    "learning_rate": Signal(_STEP, "1", "learning rate in force"),
    "scheduled_rate": Signal(_STEP, "1", "learning rate of the schedule, without faults"),
    "loss_scale": Signal(_STEP, "1", "loss scale in force"),
    "tokens": Signal(_STEP, "token", "tokens trained on so far, dropped sequences included"),
    "dropped": Signal(_STEP, "sequence", "sequences of the batch that were dropped"),
    "tokens_per_second": Signal(_STEP, "token/s", "training throughput of the trial"),
    "step_seconds": Signal(_STEP, "s", "time of one step of one trial: the pack's over its rows"),
    "activation_rms": Signal(_LAYER, "1", "root mean square of the block's output"),
    "attention_logit_max": Signal(_LAYER, "1", "largest attention logit"),
}

ENDS: dict[str, Signal] = {
    "initial_segment_loss": Signal(_SEGMENT, "nat/token", "validation loss before the first step, by segment"),
    "final_segment_loss": Signal(_SEGMENT, "nat/token", "validation loss after the last step, by segment"),
}
"""What is measured once, before and after all steps, and written before the pack is complete."""
EMPTY: dict[str, Any] = {"dropped": [], "incidents": [], "acts": {}, "idle": {}, "digest": "", "provenance": {}}
"""What a complete pack says of a trial where nobody tells it."""

# --- the store of a sweep ----------------------------------------------------------------------------------------


def open_store(out: Path, study: str) -> ResultsPath:
    """Make `out` ready for the results of `study`: a results folder and its store, or check those it has.

    Raises ConfigError, and leaves everything as it was, if `check_store` does or if it cannot be written to.
    """
    check_store(out, study)
    folder = ResultsPath.make(out)
    store = folder / STORE
    store.make_folder()
    if not (store / METADATA).exists():
        if any(not place.name.startswith(".") for place in store.entries()):
            warnings.warn(f"{store / METADATA}: is missing; written anew, with study {study}", stacklevel=2)
        (store / METADATA).write(_group({"format": FORMAT_VERSION, "study": study}))
    return folder


def _group(attributes: Mapping[str, Any], arrays: Mapping[str, Any] | None = None) -> bytes:
    """The file of a group, sealed."""
    return sealed(strict_json(group_metadata({**attributes, SEAL: UNSEALED}, arrays)))


def check_store(out: Path, study: str) -> None:
    """Raises ConfigError if `out` is neither new, nor empty, nor a results folder of `study`. Changes nothing."""
    check_own(out)
    if out.exists() and (ResultsPath.at(out) / STORE / METADATA).exists():
        root = read_root(out)
        if root["format"] not in WRITABLE:
            reason = f"holds a store of format {root['format']}, which can be read but not added to"
            raise ConfigError(f"out={out}: {reason}; allowed: a new folder, or one of format {FORMAT_VERSION}")
        if root["study"] != study:
            allowed = f"an empty or new folder, or study={root['study']}"
            raise ConfigError(f"out={out}: holds results of study {root['study']}; allowed: {allowed}")


def guarded_in(pack: PackInfo) -> dict[str, Signal]:
    """The signals of a stored pack that its guards show and its readings give, and its loss, beside `SIGNALS`."""
    return {
        name: Signal(tuple(array["dimension_names"]), **array["attributes"])
        for name, array in pack.arrays.items()
        if name == "loss" or name not in SIGNALS | ENDS
    }


# --- one pack, written -------------------------------------------------------------------------------------------


class Described(Protocol):
    """A trial as a store describes it: one of ours, or a run of one's own."""

    @property
    def id(self) -> str:
        """A hash of all that it is."""

    @property
    def golden(self) -> Described:
        """The same without its fault."""

    def to_dict(self) -> dict[str, Any]:
        """Sections of plain values."""


class PackStore:
    """The writer of one pack's group. Only one process writes a pack.

    `guarded` are the signals that its guards show and its readings give, beside `SIGNALS`, or its own "loss".
    """

    def __init__(
        self,
        place: ResultsPath,
        attributes: dict[str, Any],
        steps: int,
        layers: int,
        block: int,
        guarded: Mapping[str, Signal],
    ):
        self.place, self.attributes = place, attributes
        self.steps, self.layers, self.block = steps, layers, block
        self.trials = len(attributes["ids"])
        self.signals = SIGNALS | dict(guarded)
        self._measured = self.signals | ENDS
        self._arrays: dict[str, dict[str, Any]] = {}
        for name, signal in self._measured.items():
            shape, about = self.shape(name), {"units": signal.units, "long_name": signal.long_name}
            chunk = chunk_shape(shape, signal.dims, block)
            self._arrays[name] = array_metadata(shape, chunk, signal.dims, about)
        self._has_ends = False

    def shape(self, signal: str) -> tuple[int, ...]:
        """[R, steps], [R, steps, layers], [R, steps, layers, ranks] or [R, segments]."""
        sizes = {"trial": self.trials, "step": self.steps, "layer": self.layers, "segment": SEGMENTS}
        sizes["rank"] = ranks_of(self.attributes)
        return tuple(sizes[dim] for dim in self._measured[signal].dims)

    @classmethod
    def create(
        cls,
        folder: ResultsPath,
        pack_id: str,
        trials: Sequence[Described],
        steps: int,
        layers: int,
        corpus: Mapping[str, Any],
        environment: Mapping[str, Any],
        block: int,
        guarded: Mapping[str, Signal] | None = None,
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
            NAME: pack_id,
            CHECKSUMS: {},
        }
        place = folder / STORE / pack_id
        old = read_pack(place)
        if old is not None and old.complete:
            raise ValueError(f"{place}: this pack is complete already")
        pack = cls(place, attributes, steps, layers, min(block, steps), guarded or {})
        pack.install()
        return pack

    @classmethod
    def resume(cls, folder: ResultsPath, pack_id: str, step: int) -> PackStore | None:
        """The group of that id, to go on with from `step`; None if it is not there, or lacks values before that step.

        What is damaged of those is told in a warning. Raises ValueError if the pack is complete.
        """
        old = read_pack(folder / STORE / pack_id)
        if old is None:
            return None
        if old.complete:
            raise ValueError(f"{old.path}: this pack is complete already")
        whole_blocks = step // old.block * old.block
        if damaged := next(damage(old, whole_blocks), None):
            warnings.warn(f"{damaged[1]}; what its pack has trained since is trained again", stacklevel=2)
            return None
        attributes = {name: value for name, value in old.attributes.items() if name != SEAL}
        if not old.is_listed:
            attributes |= {NAME: old.id, CHECKSUMS: found_checksums(old)}
        return cls(old.place, attributes, old.steps, old.layers, old.block, guarded_in(old))

    def damage(self) -> tuple[int, str] | None:
        """Of all that a complete pack has, the first chunk that is not as it was written: its first step, and words."""
        return next(damage(PackInfo(self.place, self.attributes | {"complete": True}, self._arrays)), None)

    def install(self) -> None:
        """Build the empty group aside and move it into place, so that no reader finds half of one."""
        store = self.place.parent
        for stray in store.entries():
            if stray.name.startswith(f".{self.place.name}."):
                stray.remove_tree()
        aside = store / f".{self.place.name}.{uuid.uuid4().hex}"
        for name, array in self._arrays.items():
            (aside / name).make_folder()
            (aside / name / METADATA).write(strict_json(array).encode())
        (aside / METADATA).write(_group(self.attributes, self._arrays))
        self.remove()
        aside.rename(self.place.name)

    def remove(self) -> None:
        """Take the group away, at once for whoever reads."""
        if self.place.exists():
            replaced = self.place.parent / f".{self.place.name}.{uuid.uuid4().hex}.old"
            self.place.rename(replaced.name)
            replaced.remove_tree()
            replaced.unlink()

    def write(self, first_step: int, signals: Mapping[str, np.ndarray]) -> None:
        """Store the values of steps `first_step`, `first_step` + 1, ...: each signal is [R, n], [R, n, layers], ...

        Blocks are written whole, so `first_step` is a multiple of `block`. A last block that is not full is padded
        with NaN; it may be written again, longer. Raises ValueError if a signal or a shape is not the store's.
        """
        lengths = {np.shape(values)[1] for values in signals.values()}
        if len(lengths) != 1 or first_step % self.block:
            expected = f"expected one length, from a multiple of {self.block}"
            raise ValueError(f"steps {sorted(lengths)} from {first_step}: {expected}")
        length = lengths.pop()
        for name, values in signals.items():
            if name not in self.signals:
                raise ValueError(f"signal {name}: unknown; expected one of {', '.join(self.signals)}")
            allowed = (self.trials, min(length, self.steps - first_step), *self.shape(name)[2:])
            if np.shape(values) != allowed:
                raise ValueError(f"{name} from step {first_step}: shape {np.shape(values)}; expected {allowed}")
        try:
            with self.place.opened() as folder:
                for offset in range(0, length, self.block):
                    part = {name: values[:, offset : offset + self.block] for name, values in signals.items()}
                    chunks = {name: self._chunk(name, part.get(name)) for name in self.signals}
                    self._write_chunks(folder, (first_step + offset) // self.block, chunks)
                self._update(folder, steps_done=max(self.attributes["steps_done"], first_step + length))
        except FileNotFoundError:
            raise self.place.lost() from None

    def note(self, name: str, text: str) -> None:
        """Add to what the pack says of its environment; after what stands there already under that name."""
        known = self.attributes["environment"]
        texts = dict.fromkeys([*known.get(name, "").split("; "), text]) if known.get(name) else [text]
        with self.place.opened() as folder:
            self._update(folder, environment={**known, name: "; ".join(texts)})

    def write_ends(self, ends: Mapping[str, np.ndarray]) -> None:
        """Store what is measured once, [R, segments] each; NaN if it is not given. Raises ValueError as `write`."""
        for name, values in ends.items():
            if name not in ENDS or np.shape(values) != self.shape(name):
                allowed = ", ".join(f"{end} {self.shape(end)}" for end in ENDS)
                raise ValueError(f"{name} {np.shape(values)}: expected one of {allowed}")
        with self.place.opened() as folder:
            self._write_chunks(folder, 0, {name: self._chunk(name, ends.get(name)) for name in ENDS})
            self._update(folder)
        self._has_ends = True

    def _chunk(self, name: str, values: np.ndarray | None) -> bytes:
        """Every chunk of a block is there, also one of nothing but NaN: so what is missing is lost."""
        chunk = np.full(chunk_shape(self.shape(name), self._measured[name].dims, self.block), np.nan, dtype="<f4")
        if values is not None:
            with np.errstate(over="ignore"):
                chunk[:, : values.shape[1]] = values
            chunk[np.isnan(chunk)] = np.nan  # one NaN: which of them it was is a matter of how ranks were joined
        return packed(chunk)

    def _write_chunks(self, folder: int, number: int, chunks: Mapping[str, bytes]) -> None:
        """Chunk `number` of these signals. They are in the list, which the next `_update` writes."""
        checksums = {name: checksum_in(content) for name, content in chunks.items()}
        replaced = {}
        for name, checksum in checksums.items():
            known = checksums_in(self.attributes, name, number)
            if known and known != (checksum,):
                replaced[name] = {str(number): [*known[1:], checksum]}
        if replaced:
            pending = self.attributes.get(PENDING, {})
            merged = {name: {**pending.get(name, {}), **replaced.get(name, {})} for name in {**pending, **replaced}}
            self._update(folder, **{PENDING: merged})
        for name, content in chunks.items():
            inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
            try:
                write_at(inner, chunk_key(number, len(self.shape(name))), content)
            finally:
                os.close(inner)
        listed = self.attributes[CHECKSUMS]
        new = {name: with_checksum(listed.get(name, ""), number, checksum) for name, checksum in checksums.items()}
        self.attributes[CHECKSUMS] = {**listed, **new}
        self._settle(number, chunks)

    def _settle(self, number: int, names: Iterable[str]) -> None:
        """These chunks are no longer being replaced."""
        pending = {name: dict(chunks) for name, chunks in self.attributes.pop(PENDING, {}).items()}
        for name in names:
            pending.get(name, {}).pop(str(number), None)
        if pending := {name: chunks for name, chunks in pending.items() if chunks}:
            self.attributes[PENDING] = pending

    def finish(self, **columns: Sequence[Any]) -> None:
        """Mark the pack complete, with one value of each of these for each of the R trials; after `write_ends`, if any.

        `outcome` is the harness's word for how the run ended, `nonfinite_step` the first step with a non-finite value,
        `masked_step` the step after which the whole state of a faulty trial was again bitwise that of its golden twin;
        both steps are None where there is none. `faults` lists the fault's events, perhaps not all of them; `strikes`
        counts its strikes, and `changes` those of them that changed something. `dropped` lists the first sequences that
        were dropped from its batches, and `incidents` what its playbook has answered, both by default none. `acts`,
        `idle`, `digest` and `provenance` are those of `harness.loop.loop.Result`; by default nothing acts now and
        then, nothing is idle, and the rest is unknown.
        Raises ValueError for a wrong number of values, TypeError for another name, and KeyError for one that lacks.
        """
        names = OF_COMPLETE | SINCE_6
        if unknown := columns.keys() - names:
            raise TypeError(f"{', '.join(sorted(unknown))}: unknown; expected some of {', '.join(names)}")
        columns = {name: [empty] * self.trials for name, empty in EMPTY.items()} | columns
        results = {name: list(columns[name]) for name in names}
        for name, values in results.items():
            if len(values) != self.trials:
                raise ValueError(f"{name}: {len(values)} values; expected one for each of {self.trials} trials")
        if not self._has_ends:
            self.write_ends({})
        with self.place.opened() as folder:
            self._update(folder, **results, complete=True)

    def _update(self, folder: int, **attributes: Any) -> None:
        self.attributes |= attributes
        write_at(folder, METADATA, _group(self.attributes, self._arrays))
