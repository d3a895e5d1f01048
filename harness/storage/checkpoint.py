"""The whole state of a pack on disk, so that one that was killed goes on where it was, bit for bit on a CPU.

    <folder>/<step>.safetensors   every tensor
    <folder>/<step>.json          everything else, with the SHA-256 of both

The JSON comes last and each file appears whole, so that a checkpoint is there altogether or not at all; what is damaged
later shows by its checksum, and then the checkpoint before it is used. Nothing is unpickled. A checkpoint has little to
hold, because random streams are functions of a seed and the step: the arrays of `harness/model/state.py`, which rows
are whose, what faults remember, and what has been recorded so far.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from harness.config import ConfigError
from harness.storage.results_folder import ResultsPath

VERSION = 1
KEPT = 2  # the newest, and the one before it in case the newest is damaged
TENSORS, REST = ".safetensors", ".json"
_STEP = re.compile(r"[0-9]{1,12}")
_STRAY = re.compile(r"\.[0-9]+\.(safetensors|json)\.[0-9a-f]{32}")


@dataclass(frozen=True)
class Saved:
    """A checkpoint, read: `step` is the next one to train."""

    step: int
    tensors: dict[str, Tensor]
    values: dict[str, Any]


class Damaged(Exception):
    """A checkpoint that cannot be used, and why."""


class Stopped(Exception):
    """The process was asked to stop, and has saved a checkpoint before this step."""

    def __init__(self, step: int):
        super().__init__(step)
        self.step = step

    def __str__(self) -> str:
        return f"asked to stop before step {self.step}"


@dataclass
class Checkpoints:
    """The checkpoints of one pack, in a folder of its own.

    One is due every `every` steps, and once `seconds` have passed since the last; None: not for that reason. `about` is
    kept with each: what is needed to find out whose it is. `is_stopping` may be set at any time, by a signal's handler,
    or `asked` begin to answer yes: a checkpoint is saved after the step that is under way, and `Stopped` is raised.
    """

    folder: ResultsPath
    every: int | None = None
    seconds: float | None = None
    about: Mapping[str, Any] = field(default_factory=dict)
    is_stopping: bool = False
    asked: Callable[[], bool] = lambda: False

    def __post_init__(self) -> None:
        self._last = time.monotonic()

    def is_due(self, step: int) -> bool:
        """Whether to save before this step."""
        is_late = self.seconds is not None and time.monotonic() - self._last >= self.seconds
        self.is_stopping = self.is_stopping or self.asked()
        return self.is_stopping or is_late or (self.every is not None and step % self.every == 0)

    def save(self, step: int, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Keep this state, from which `step` is the next to train, and remove all but the newest checkpoints.

        Where that fails, a full disk for one, it warns and the checkpoints before it stay. Raises Stopped after that if
        the process `is_stopping`.
        """
        try:
            self._write(step, tensors, values)
        except (OSError, ConfigError, SafetensorError) as error:
            warnings.warn(f"{self.folder}: no checkpoint at step {step} ({error}); training goes on", stacklevel=2)
            self._remove(step)
        else:
            for old in self._steps()[KEPT:]:
                self._remove(old)
        self._last = time.monotonic()
        if self.is_stopping:
            raise Stopped(step)

    def newest(self) -> Saved | None:
        """The newest checkpoint that is whole, or None; each that is not is a warning."""
        for step in self._steps():
            try:
                return self._read(step)
            except (Damaged, OSError, ConfigError) as error:
                warnings.warn(f"{self._path(step, REST)}: {error}; the checkpoint before it is used", stacklevel=2)
        return None

    @property
    def latest(self) -> int | None:
        """The step of the last one that was saved, whole or not."""
        return next(iter(self._steps()), None)

    def drop(self, step: int) -> None:
        """Remove that of a step, and those after it: something that the store had before it is lost."""
        for later in self._steps():
            if later >= step:
                self._remove(later)

    def remove(self) -> None:
        """Remove all: the pack is complete, or begins anew."""
        self.folder.remove_tree()

    def _path(self, step: int, suffix: str) -> ResultsPath:
        return self.folder / f"{step}{suffix}"

    def _steps(self) -> list[int]:
        """The steps of all checkpoints, the newest first."""
        found = (entry.stem for entry in self.folder.entries() if entry.name.endswith(REST))
        return sorted((int(stem) for stem in found if _STEP.fullmatch(stem)), reverse=True)

    def _remove(self, step: int) -> None:
        for suffix in (REST, TENSORS):  # what says that it is there goes first
            with contextlib.suppress(OSError):
                self._path(step, suffix).unlink()

    def _write(self, step: int, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        self.folder.make_folder()
        for entry in self.folder.entries():
            if _STRAY.fullmatch(entry.name):  # only one process trains a pack, so nobody is writing it
                entry.unlink()
        with self._path(step, TENSORS).whole_file(is_synced=True) as path:
            save_file({name: values.contiguous() for name, values in tensors.items()}, path)
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        body = json.dumps({"step": step, "about": self.about, "values": values})
        checksum = hashlib.sha256(body.encode()).hexdigest()
        outer = json.dumps({"version": VERSION, "tensors": digest, "body": body, "sha256": checksum})
        self._path(step, REST).write(outer.encode(), is_synced=True)

    def _read(self, step: int) -> Saved:
        outer = _outer(self._path(step, REST))
        file = self._path(step, TENSORS)
        if not file.exists():
            raise Damaged(f"{file.name} is missing")
        if _digest(file) != outer["tensors"]:
            raise Damaged(f"{file.name} is damaged: its checksum is another")
        try:
            body = json.loads(outer["body"])
            return Saved(body["step"], load_file(file.path), body["values"])
        except (ValueError, KeyError, TypeError, RecursionError, SafetensorError) as error:
            raise Damaged(f"is damaged ({type(error).__name__}: {error})") from None


def about(folder: ResultsPath) -> dict[str, Any] | None:
    """What the newest readable checkpoint in a pack's folder says it is `about`; None if there is none."""
    checkpoints = Checkpoints(folder)
    for step in checkpoints._steps():
        with contextlib.suppress(Damaged, OSError, ValueError, KeyError, TypeError, RecursionError):
            found = json.loads(_outer(checkpoints._path(step, REST))["body"])["about"]
            return found if isinstance(found, dict) else None
    return None


def _outer(file: ResultsPath) -> dict[str, Any]:
    try:
        outer = json.loads(file.read_bytes())
        version, body, checksum, _ = outer["version"], outer["body"], outer["sha256"], outer["tensors"]
        body.encode()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(f"is damaged ({type(error).__name__}: {error})") from None
    if version != VERSION:
        raise Damaged(f"is of version {version}, and {VERSION} is read")
    if hashlib.sha256(body.encode()).hexdigest() != checksum:
        raise Damaged("is damaged: its checksum is another")
    return outer


def _digest(file: ResultsPath) -> str:
    with os.fdopen(file.descriptor(os.O_RDONLY), "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
