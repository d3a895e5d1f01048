"""How far a sweep is, for people alone: which trials were asked for, and a small file for each pack in training.

<out>/plan.json                 the trials that the last command that had any to train asked for
<out>/progress/<pack>.json      how far that pack is, written by whoever trains it, here or on Slurm
<out>/errors/<pack>.txt         the trace of a pack that has failed
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.config import ConfigError
from harness.storage.json_seal import read_sealed_record, sealed_json
from harness.storage.records import Missing, Unreadable, read_record
from harness.storage.results_folder import ResultsPath

PROGRESS, PLAN, ERRORS = "progress", "plan.json", "errors"
WRITE_SECONDS = 0.25  # between two writes of one file
MOST_BYTES, MOST_PLAN = 2**12, 2**26


@dataclass(frozen=True)
class PlannedIds:
    """plan.json: the ids of the trials that the last command asked for, what its study asks, and its words."""

    trials: tuple[str, ...]
    question: str = ""
    words: tuple[str, ...] | None = None  # None: not known


@dataclass(frozen=True)
class PackProgress:
    """`steps` of `of` are done, counted from the pack's first; this process began with step `begun`."""

    begun: int
    steps: int
    of: int
    trials: int
    frozen: int
    is_stopped: bool = False  # by its user; its checkpoint is as far

    def __post_init__(self) -> None:
        if not 0 <= self.begun <= self.steps <= self.of or not 0 <= self.frozen <= self.trials:
            raise ValueError("its numbers contradict each other")


class ProgressFile:
    """The file of one pack of so many steps and trials."""

    def __init__(self, file: ResultsPath, of: int, trials: int):
        self._file, self._of, self._trials = file, of, trials
        self._begun, self._frozen, self._next = 0, 0, 0.0

    def begin(self, step: int) -> None:
        """Training begins, or goes on, with this step."""
        self._begun = step
        with contextlib.suppress(OSError, ConfigError):
            self._file.parent.make_folder()
        self._write(step)

    def __call__(self, steps: int, frozen: int) -> None:
        """So many steps are done, and so many trials have frozen. May be called as often as there are steps."""
        self._frozen = frozen
        if time.monotonic() >= self._next:
            self._write(steps)

    def stopped(self, step: int) -> None:
        """The user has stopped it; it goes on with this step."""
        self._write(step, is_stopped=True)

    def _write(self, steps: int, is_stopped: bool = False) -> None:
        begun = min(self._begun, steps)  # a row may have gone back since
        values = PackProgress(begun, steps, self._of, self._trials, self._frozen, is_stopped)
        with contextlib.suppress(OSError, ConfigError):
            self._file.write(json.dumps(dataclasses.asdict(values)).encode())
        self._next = time.monotonic() + WRITE_SECONDS


def read_progress(folder: Path) -> tuple[dict[str, PackProgress], dict[str, Unreadable]]:
    """Of the files in `folder`, by pack: how far each is, and what is wrong with those that are damaged."""
    progress: dict[str, PackProgress] = {}
    damaged: dict[str, Unreadable] = {}
    for file in sorted(folder.glob("*.json")):
        try:
            progress[file.stem] = read_record(file, PackProgress, MOST_BYTES)
        except Missing:
            continue  # it was just removed
        except Unreadable as error:
            damaged[file.stem] = error
    return progress, damaged


def read_asked(out: Path) -> PlannedIds:
    """What the last command that trained into `out` asked for. Raises Unreadable; Missing in an older store."""
    return read_sealed_record(out / PLAN, PlannedIds, MOST_PLAN)


def write_plan(
    folder: ResultsPath, trials: Iterable[str], question: str = "", words: Sequence[str] | None = None
) -> None:
    """Keep what was asked for, and in which words, for those who ask how far it is and for the report."""
    asked = PlannedIds(tuple(sorted(trials)), question, None if words is None else tuple(words))
    (folder / PLAN).write(sealed_json(dataclasses.asdict(asked)))
