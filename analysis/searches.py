"""What a search has asked for and found, from Optuna's journal in the results folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pandas as pd
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

JOURNAL = Path("search", "journal.jsonl")
ABOUT = {"kind", "cell", "objectives"}  # what a study that was made whole says of itself


@dataclass(frozen=True)
class History:
    """One study: a cell of a search.

    `points` has a row for each point that was trained and judged, in the order in which they were asked for: `number`,
    `objective 0` and so on, `is_good` (it trained, or it broke the run, as the search is after), `point` (what it is,
    in words), and each parameter as `param KEY`.
    """

    kind: str
    cell: str
    objectives: Sequence[str]
    directions: Sequence[str]
    points: pd.DataFrame


def read_searches(out: Path | str) -> list[History]:
    """The studies of a results folder, those with a point; none without a search."""
    file = Path(out) / JOURNAL
    if not file.exists():
        return []
    storage = JournalStorage(JournalFileBackend(str(file)))
    studies = [optuna.load_study(study_name=name, storage=storage) for name in optuna.get_all_study_names(storage)]
    found = [_history(study) for study in studies if study.user_attrs.keys() >= ABOUT]
    return [history for history in found if len(history.points)]


def _history(study: optuna.Study) -> History:
    about: dict[str, Any] = study.user_attrs
    told = study.get_trials(deepcopy=False, states=[TrialState.COMPLETE])
    told = [trial for trial in told if "duplicate" not in trial.user_attrs]
    rows = [
        {
            "number": number,
            **{f"objective {place}": value for place, value in enumerate(trial.values)},
            "is_good": _is_good(trial),
            "point": " ".join(f"{key}={_short(value)}" for key, value in trial.params.items()),
            **{f"param {key}": value for key, value in trial.params.items()},
        }
        for number, trial in enumerate(told, start=1)
    ]
    directions = [direction.name.lower() for direction in study.directions]
    return History(about["kind"], about["cell"], about["objectives"], directions, pd.DataFrame(rows))


def _is_good(trial: optuna.trial.FrozenTrial) -> bool:
    attributes = trial.user_attrs
    return bool(attributes.get("breaks", attributes.get("stable", 1.0) == 1.0))


def _short(value: Any) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"


def front(points: pd.DataFrame, directions: Sequence[str]) -> pd.DataFrame:
    """Of points with two objectives: those that no other one beats in both, by the first objective."""
    signs = np.array([1 if direction == "minimize" else -1 for direction in directions])
    values = points[["objective 0", "objective 1"]].to_numpy() * signs
    order = np.lexsort((values[:, 1], values[:, 0]))
    lowest = np.minimum.accumulate(np.concatenate([[np.inf], values[order, 1][:-1]]))
    return points.iloc[order[values[order, 1] < lowest]]
