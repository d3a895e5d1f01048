"""Optuna's studies of a search, shared by all processes that search in one folder.

    <out>/search/journal.jsonl     Optuna's journal: a study for each cell
    <out>/search/turn.lock         held while points are asked for or told
    <out>/search/journal.lock      held while the journal is written
    <out>/search/owners/<token>    held by a process as long as it searches

A point that is asked for is running until it is told. One whose owner has ended is asked for again by whoever comes
next: what was trained of it is in the store. Nothing here is ever unpickled.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import optuna
from optuna.distributions import BaseDistribution
from optuna.exceptions import ExperimentalWarning
from optuna.samplers import BaseSampler, NSGAIISampler, RandomSampler, TPESampler
from optuna.storages import BaseStorage, InMemoryStorage, JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.storages.journal._file import BaseJournalFileLock
from optuna.trial import FrozenTrial, TrialState

from analysis.reading.searches import JOURNAL, MOST_BYTES, damage_is_told
from harness.storage.records import Unreadable, read_bytes, read_lines
from harness.storage.results_folder import ResultsPath
from sweeps.running.locks import Turn, is_locked, owned

_TOKEN = re.compile(r"[0-9a-f]{16}")  # of an owner
OWNER, DUPLICATE, REASON = "owner", "duplicate", "reason"
Direction = Literal["minimize", "maximize"]
Key = tuple[tuple[str, Any], ...]


class JournalLock(Turn, BaseJournalFileLock):
    """What Optuna locks its journal with: unlike its own, it ends with the process."""


class Studies:
    """The studies of a folder; in memory alone without one."""

    def __init__(self, out: ResultsPath | None):
        self.token = secrets.token_hex(8)
        self.turn: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        """Held by the only process that may ask and tell."""
        self._folder = out / JOURNAL.parent.name if out else None
        if self._folder:
            (self._folder / "owners").make_folder()
            self.turn = Turn(self._folder / "turn.lock")
        self._storage: BaseStorage = InMemoryStorage()

    @contextlib.contextmanager
    def open(self) -> Iterator[Studies]:
        """For as long as the search lasts. Raises ConfigError for a journal that is damaged."""
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        if self._folder is None:
            yield self
            return
        with owned(self._folder / "owners" / self.token):
            with self.turn:
                self._storage = journal(self._folder, mend=True)
            yield self

    def study(self, name: str, directions: Sequence[Direction], about: Mapping[str, Any]) -> optuna.Study:
        """The study of that name; `about` is kept with it."""
        study = optuna.create_study(
            storage=self._storage, study_name=name, directions=list(directions), load_if_exists=True
        )
        if study.user_attrs != about:
            for key, value in about.items():
                study.set_user_attr(key, value)
        return study

    def take_over(self, study: optuna.Study) -> None:
        """Ask again for the points whose owner has ended."""
        for trial in study.get_trials(deepcopy=False, states=[TrialState.RUNNING]):
            owner = str(trial.user_attrs.get(OWNER))
            is_alive = self._folder and _TOKEN.fullmatch(owner) and is_locked(self._folder / "owners" / owner)
            if owner != self.token and not is_alive:
                study.tell(trial.number, state=TrialState.FAIL)
                if trial.params:
                    study.enqueue_trial(trial.params)

    def ask(self, study: optuna.Study, distributions: Mapping[str, BaseDistribution]) -> optuna.Trial:
        """A point of the study's sampler, or one that is enqueued; it belongs to this process."""
        trial = study.ask(dict(distributions))
        trial.set_user_attr(OWNER, self.token)
        return trial


def journal(folder: ResultsPath, mend: bool = False) -> JournalStorage:
    """The journal of a folder of searches. `mend`: cut off a last line that a killed process left half written.

    Optuna opens it by its name; that it is a file of this folder is looked at before. Raises ConfigError for one that
    is damaged.
    """
    file = folder / JOURNAL.name
    with damage_is_told(file.path), os.fdopen(file.descriptor(os.O_RDWR | os.O_CREAT), "r+b") as handle:
        read_lines(file.path, MOST_BYTES)
        _, _, last = (text := read_bytes(file.path, MOST_BYTES)).rpartition(b"\n")
        if last and not last.startswith(b"{"):
            raise Unreadable(file.path, "its last line is no JSON object")
        if last and mend:
            handle.truncate(len(text) - len(last))
        return JournalStorage(JournalFileBackend(str(file), lock_obj=JournalLock(folder / "journal.lock")))


def sampler(name: str, seed: int, asked: int) -> BaseSampler:
    """Optuna's sampler of that name, for a study of which `asked` points have been asked for.

    Its random numbers depend on these alone, so that a search that was stopped goes on as if it had not been.
    """
    seed = (1_000_003 * seed + asked) % 2**32
    if name == "random":
        return RandomSampler(seed=seed)
    if name == "nsga2":
        return NSGAIISampler(seed=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        return TPESampler(seed=seed, multivariate=True, constant_liar=True)


def known_points(study: optuna.Study) -> dict[Key, FrozenTrial]:
    """The points that are asked for or told, by their parameters; those that failed for a reason of their own, too."""
    points: dict[Key, FrozenTrial] = {}
    for trial in study.get_trials(deepcopy=False):
        is_known = trial.state in (TrialState.RUNNING, TrialState.COMPLETE) or REASON in trial.user_attrs
        if is_known and DUPLICATE not in trial.user_attrs:
            points[key(trial.params)] = trial
    return points


def key(params: Mapping[str, Any]) -> Key:
    """A point, whatever the order of its parameters."""
    return tuple(sorted(params.items()))
