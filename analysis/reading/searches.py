"""What a search has asked for and found, from Optuna's journal in the results folder."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pandas as pd
from optuna.storages import JournalStorage
from optuna.storages.journal import BaseJournalBackend
from optuna.trial import TrialState

from analysis.reading.levels import overrides
from harness.basics.printing import label
from harness.config import ConfigError
from harness.storage.records import Missing, Unreadable, read_lines, record_of

JOURNAL = Path("search", "journal.jsonl")
MOST_BYTES = 2**28
ABOUT = {"kind", "cell", "objectives"}  # what a study that was made whole says of itself


@dataclass(frozen=True)
class StudyRecord:
    """What a study says of itself."""

    kind: str
    cell: str
    objectives: tuple[str, ...]


@dataclass(frozen=True)
class History(StudyRecord):
    """One study: a cell of a search.

    `points` has a row for each point that was trained and judged, in the order in which they were asked for: `number`,
    `objective 0` and so on, `is_good` (it trained, or it broke the run, as the search is after), `point` (what it is,
    in words), and each parameter as `param KEY`.
    """

    directions: Sequence[str]
    points: pd.DataFrame


@dataclass(frozen=True)
class PointRecord:
    """What was told of a point."""

    values: tuple[float, ...]
    params: dict[str, str | float]


class _Journal(BaseJournalBackend):
    """A journal that is read and never written: it needs no lock, and no right to write."""

    def __init__(self, logs: Sequence[dict[str, Any]]):
        self._logs = logs

    def read_logs(self, log_number_from: int) -> Sequence[dict[str, Any]]:
        return self._logs[log_number_from:]

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        raise NotImplementedError


@contextlib.contextmanager
def damage_is_told(file: Path) -> Iterator[None]:
    """Raises ConfigError for whatever is wrong with the journal that is read in the block.

    Optuna checks nothing of what it reads, so what fails may be anything.
    """
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        reason = error.reason if isinstance(error, Unreadable) else f"{type(error).__name__}: {error}"
        raise ConfigError(f"{file}: damaged, {reason}; allowed: the journal of a search as it was written") from None


def read_searches(out: Path | str) -> list[History]:
    """The studies of a results folder, those with a point; none without a search.

    Raises ConfigError for a journal that is damaged.
    """
    file = Path(out) / JOURNAL
    with damage_is_told(file):
        try:
            storage = JournalStorage(_Journal(read_lines(file, MOST_BYTES)))
        except Missing:
            return []
        names = optuna.get_all_study_names(storage)
        studies = [optuna.load_study(study_name=name, storage=storage) for name in names]
        histories = [_history(study, file) for study in studies if study.user_attrs.keys() >= ABOUT]
    return [history for history in histories if len(history.points)]


def _history(study: optuna.Study, file: Path) -> History:
    about = record_of(study.user_attrs, StudyRecord, file)
    told = study.get_trials(deepcopy=False, states=[TrialState.COMPLETE])
    told = [trial for trial in told if "duplicate" not in trial.user_attrs]
    points = [record_of({"values": trial.values, "params": trial.params}, PointRecord, file) for trial in told]
    if any(len(about.objectives) != len(values) for values in (study.directions, *(point.values for point in points))):
        raise Unreadable(file, f"{about.cell} has another number of objectives than of values")
    rows = [
        {
            "number": number,
            **{f"objective {place}": value for place, value in enumerate(point.values)},
            "is_good": bool(trial.user_attrs.get("breaks", trial.user_attrs.get("stable", 1.0) == 1.0)),
            "point": label(overrides(point.params)),
            **{f"param {key}": value for key, value in point.params.items()},
        }
        for number, (trial, point) in enumerate(zip(told, points, strict=True), start=1)
    ]
    directions = [direction.name.lower() for direction in study.directions]
    objectives = tuple(map(label, about.objectives))
    return History(label(about.kind), label(overrides(about.cell)), objectives, directions, pd.DataFrame(rows))


def front(points: pd.DataFrame, directions: Sequence[str]) -> pd.DataFrame:
    """Of points with two objectives: those that no other one beats in both, by the first objective."""
    signs = np.array([1 if direction == "minimize" else -1 for direction in directions])
    values = points[["objective 0", "objective 1"]].to_numpy() * signs
    order = np.lexsort((values[:, 1], values[:, 0]))
    lowest = np.minimum.accumulate(np.concatenate([[np.inf], values[order, 1][:-1]]))
    return points.iloc[order[values[order, 1] < lowest]]
