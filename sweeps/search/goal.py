"""What every search has in common: what it does with each axis, how it asks for points, and what it makes of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import optuna
import pandas as pd
import xarray as xr
from optuna.trial import TrialState

from analysis.reading.levels import overrides
from harness.config import Trial
from sweeps.compose.overrides import Axis
from sweeps.compose.settings import SearchSettings
from sweeps.search.space import Space
from sweeps.search.studies import DUPLICATE, Direction, Studies, key, known_points, sampler

MOST_DUPLICATES = 50  # points in a row that are known already: nothing is left, or too little to go on


@dataclass(frozen=True)
class Judged:
    """What came of a point: its objectives, or None if it cannot be told, and what else is worth keeping (JSON)."""

    values: Sequence[float] | None
    about: Mapping[str, Any] = field(default_factory=dict)


class Goal(ABC):
    """One kind of search."""

    kind: ClassVar[str]
    directions: ClassVar[tuple[Direction, ...]]
    objectives: ClassVar[tuple[str, ...]]  # with units, for figures
    wanted: ClassVar[str]  # what is searched, in words

    def __init__(self, axes: Sequence[Axis], settings: SearchSettings):
        self.settings = settings
        self.space = Space.of(self.kind, axes, self.role, self.wanted)

    @staticmethod
    @abstractmethod
    def role(key: str) -> str:
        """What is done with a swept axis: one of the constants of `sweeps.search.space`."""

    def check(self, trials: Sequence[Trial]) -> None:
        """Raises ConfigError where the trials at the corners of the space say that the search cannot work."""
        return None

    def first(self, trials: Sequence[Trial]) -> list[Trial]:
        """Of the trials at the corners of the space: those that are trained before all others."""
        return []

    def check_first(self, first: Sequence[Trial], sweep: xr.Dataset) -> None:
        """Raises ConfigError where what became of them says that the search cannot work."""
        return None

    def ask(self, studies: Studies, study: optuna.Study, batch: int) -> list[optuna.Trial]:
        """The next points of a study, as far as its number of trials allows, none of them known already."""
        known = known_points(study)
        left = self.settings.trials // len(self.space.repeats) - len(known)
        asked = len(study.get_trials(deepcopy=False))
        study.sampler = sampler(self.settings.sampler, self.settings.seed, asked)
        new: list[optuna.Trial] = []
        duplicates = 0
        while len(new) < min(batch, left) and duplicates < MOST_DUPLICATES:
            trial = studies.ask(study, self.space.distributions)
            old = known.get(key(trial.params))
            if old is None:
                new.append(trial)
                known[key(trial.params)] = study.get_trials(deepcopy=False)[trial.number]
                continue
            duplicates += 1
            trial.set_user_attr(DUPLICATE, old.number)
            is_told = old.state == TrialState.COMPLETE  # then the sampler learns that it has been here
            study.tell(trial, old.values, state=TrialState.COMPLETE if is_told else TrialState.FAIL)
        return new

    @abstractmethod
    def judge(self, trials: Sequence[Trial], sweep: xr.Dataset, events: pd.DataFrame) -> Judged:
        """What came of a point, from its trials and their golden twins, which are all in `sweep` and complete."""

    @abstractmethod
    def summary(self, study: optuna.Study) -> str:
        """What has been found in a cell."""


def is_seed(key: str) -> bool:
    """Whether the key is a seed."""
    return key.rpartition(".")[2] == "seed"


def is_faults(key: str) -> bool:
    """Whether the key chooses a fault, or is a field of one."""
    return key.partition(".")[0] == "fault"


def told(study: optuna.Study) -> list[optuna.trial.FrozenTrial]:
    """The points that were trained and judged, each once."""
    trials = study.get_trials(deepcopy=False, states=[TrialState.COMPLETE])
    return [trial for trial in trials if DUPLICATE not in trial.user_attrs]


def rows_of(trials: Sequence[Trial], sweep: xr.Dataset) -> np.ndarray:
    """Where the trials stand in `sweep`."""
    return np.asarray(pd.Index(sweep["trial"].values).get_indexer([trial.id for trial in trials]))


def named(params: Mapping[str, Any]) -> str:
    """A point, in words."""
    return overrides(params)
