"""The whole state of a pack on disk, so that one that was killed goes on where it was, bit for bit on a CPU.

    <folder>/<step>.safetensors   every tensor, and in its metadata everything else as JSON, with the SHA-256 of both

The file appears whole, so that a checkpoint is there altogether or not at all; what is damaged later shows by its
checksum, and then the checkpoint before it is used. Nothing is unpickled. A checkpoint has little to
hold, because random streams are functions of a seed and the step: the arrays of `harness/model/state.py`, which rows
are whose, what faults remember, and what has been recorded so far.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from harness.config import ConfigError
from harness.storage.results_folder import ResultsPath
from harness.storage.sealed import Damaged, read_sealed, values_of, write_sealed

VERSION = 4  # 1 had the JSON in a file of its own, 2 other names, 3 no readings
KEPT = 2  # the newest, and the one before it in case the newest is damaged
_NAME = re.compile(r"([0-9]{1,12})\.safetensors")
_STRAY = re.compile(r"\.[0-9]+\.safetensors\.[0-9a-f]{32}")


@dataclass(frozen=True)
class Saved:
    """A checkpoint, read: `step` is the next one to train."""

    step: int
    tensors: dict[str, Tensor]
    values: dict[str, Any]


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
        from safetensors import SafetensorError  # a pack that saves nothing is trained without it

        try:
            self.write(step, tensors, values)
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
                warnings.warn(f"{self._path(step)}: {error}; the checkpoint before it is used", stacklevel=2)
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

    def _path(self, step: int) -> ResultsPath:
        return self.folder / f"{step}.safetensors"

    def _steps(self) -> list[int]:
        """The steps of all checkpoints, the newest first."""
        matches = (_NAME.fullmatch(entry.name) for entry in self.folder.entries())
        return sorted((int(match[1]) for match in matches if match), reverse=True)

    def _remove(self, step: int) -> None:
        with contextlib.suppress(OSError):
            self._path(step).unlink()

    def write(self, step: int, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Have a checkpoint of this step. Raises OSError, ConfigError and SafetensorError."""
        self.folder.make_folder()
        for entry in self.folder.entries():
            if _STRAY.fullmatch(entry.name):  # only one process trains a pack, so nobody is writing it
                entry.unlink()
        with self._path(step).whole_file(is_synced=True) as path:
            write_sealed(path, tensors, {"step": step, "about": self.about, "values": values}, VERSION)

    def _read(self, step: int) -> Saved:
        return saved_in(*read_sealed(checked_path(self._path(step)), VERSION))


def saved_in(tensors: dict[str, Tensor], content: Any) -> Saved:
    """What the tensors and the values of a file are. Raises Damaged."""
    try:
        return Saved(content["step"], tensors, content["values"])
    except (KeyError, TypeError) as error:
        raise Damaged(f"is damaged ({type(error).__name__}: {error})") from None


def about(folder: ResultsPath) -> dict[str, Any] | None:
    """What the newest readable checkpoint in a pack's folder says it is `about`; None if there is none."""
    checkpoints = Checkpoints(folder)
    for step in checkpoints._steps():
        with contextlib.suppress(Damaged, OSError, KeyError, TypeError):
            told = values_of(checked_path(checkpoints._path(step)), VERSION)["about"]
            return told if isinstance(told, dict) else None
    return None


def checked_path(file: ResultsPath) -> Path:
    """Its path, to read from. Raises ConfigError for a link, or whatever is no file."""
    os.close(file.descriptor(os.O_RDONLY))
    return file.path
