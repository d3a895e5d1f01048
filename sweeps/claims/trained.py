"""Claims that are decided by trials: registered in a results folder, trained there, and judged from what it holds."""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr
from hydra.core.config_loader import ConfigLoader

from analysis.measures.metrics import trial_table
from analysis.reading.open_sweep import config_coordinates, open_with_packs
from analysis.reading.selection import selected
from harness.basics.printing import count
from harness.config import ConfigError, Problems, Trial
from harness.storage.json_seal import sealed_json, sealed_record
from harness.storage.records import Missing, Unreadable, read_bytes
from harness.storage.results_folder import ResultsPath
from harness.storage.stored import PackInfo
from sweeps.claims.measured import SeedMetric, metric_of, per_doubling, poisoned_reason, with_outcomes
from sweeps.claims.registered import FIRST_SEED, RegisteredClaim, TrialTest
from sweeps.claims.registration import REGISTERED, Registration
from sweeps.claims.verdicts import NOT_HERE, JudgedEffect, interval, judge, together
from sweeps.compose.arguments import checked_overrides, expand
from sweeps.compose.grid import Composer
from sweeps.compose.hydra_calls import Call, calling, config_loader
from sweeps.planning.packs import PackPlan

LEAST_POINTS = 3  # of a slope
EXPLORATORY, NOT_TRAINED, UNFINISHED = "exploratory", "not trained", "unfinished"


@dataclass(frozen=True)
class CellEffect:
    """What came of a claim in one cell; `control` is the mean of the control's metric."""

    cell: str
    judged: JudgedEffect
    control: float
    is_acting: bool


@dataclass(frozen=True)
class Verdict:
    """That of a claim, and of each of its cells. `is_exploratory`: trials are older than the registration.

    `ended` is when its last pack was begun (UTC), and `commits` those of the harness that trained it, by name.
    """

    claim: RegisteredClaim
    verdict: str
    cells: Sequence[CellEffect]
    is_exploratory: bool
    ended: str = ""
    commits: Sequence[str] = ()

    @property
    def p(self) -> float:
        """The largest p-value of its cells; NaN of a margin, and without one that tells."""
        return max((cell.judged.p for cell in self.cells if cell.is_acting), default=float("nan"))


@dataclass(frozen=True)
class Wanted:
    """Trials of several claims as one sweep; a `Begun` of `sweeps/running/launch.py` that begins nothing."""

    trials: Sequence[Trial]
    notes: Sequence[str]
    claims: Sequence[RegisteredClaim] = field(default_factory=list)

    def packs(self, known: Sequence[PackPlan], settled: Set[str]) -> list[PackPlan]:
        return []

    def begin(self, folder: ResultsPath) -> None:
        """Register each claim, before its first trial is trained."""
        for claim in self.claims:
            register(folder, claim)


Recipes = dict[Path | None, tuple[ConfigLoader, dict[str, dict[str, Any]]]]
"""By folder, what composes its files, and the recipes that it has composed."""


def trials_of(claim: RegisteredClaim, look: int = 1, recipes: Recipes | None = None) -> list[Trial]:
    """The trials of a claim for its first look, or its second, with twice the seeds. Raises ConfigError as a sweep.

    `recipes` keeps what claims share: to compose a recipe takes most of the time.
    """
    test = _test_of(claim)
    recipes = {} if recipes is None else recipes
    seeds = look * test.seeds
    words = ["study=grid", *test.sweep, f"seed=range({FIRST_SEED},{FIRST_SEED + seeds})"]
    try:
        if claim.folder not in recipes:
            recipes[claim.folder] = config_loader(claim.folder), {}
        loader, composed = recipes[claim.folder]
        with calling(Call(claim.folder)):
            jobs = expand({}, checked_overrides(words, loader, claim.folder), loader)
            asked = frozenset(text.partition("=")[0] for text in words)
            composer = Composer(loader, "grid", asked, composed)
            trials = composer.trials(jobs)
            composer.notices(trials, "refuse")  # what cannot act has nothing to say
            _check_arms(test, trials)
            return trials
    except ConfigError as error:
        raise ConfigError(*(f"claim={claim.name}: {reason}" for reason in error.reasons)) from None


def _check_arms(test: TrialTest, trials: Sequence[Trial]) -> None:
    """Raise ConfigError for arms without trials or with the same ones, a cell that is no axis, and an unread signal."""
    fields = config_coordinates([trial.to_dict() for trial in trials], [trial.train.steps for trial in trials])
    planned = xr.Dataset(coords=fields | {"trial": [trial.id for trial in trials]})
    problems, arms = Problems(), {}
    for name, wheres in (("of", test.of), ("against", test.against), ("control.of", test.control.of)):
        with problems.collect(), _said_of(name):
            arms[name] = set(selected(planned, wheres)["trial"].values) if wheres else set()
    of, against, seen = (arms.get(name, set()) for name in ("of", "against", "control.of"))
    if shared := of & against:
        told = f"of={', '.join(test.of)}: shares {count(len(shared), 'trial')} with {', '.join(test.against)}"
        problems.reasons[f"{told}; allowed: two arms"] = None
    for cell in test.cells:
        if cell not in fields:
            allowed = ", ".join(sorted(map(str, fields)))
            problems.reasons[f"cells: {cell}: is no coordinate of these trials; allowed: {allowed}"] = None
    if test.slope:
        problems.reasons |= dict.fromkeys(_against_slope(test, planned))
    control = test.control.metric
    for key, text, arm in (("metric", test.metric, of | against), ("control.metric", control, seen or against or of)):
        summary, of_arm = metric_of(text).summary if arm else None, [trial for trial in trials if trial.id in arm]
        if (summary and (why := summary.unmeasured_reason(of_arm))) or (why := poisoned_reason(text, of_arm)):
            problems.reasons[f"{key}={why}"] = None
    problems.check()


def _against_slope(test: TrialTest, planned: xr.Dataset) -> Iterator[str]:
    """Why an arm shows no slope: two points have one without telling whether it is one."""
    if test.slope in test.cells:
        yield f"slope: {test.slope}: is one of the cells, and has one value in each; allowed: another coordinate"
        return
    values = planned.coords.get(test.slope)
    for name, wheres in (("of", test.of), ("against", test.against)):
        if values is None or not np.issubdtype(values.dtype, np.number) or not (values > 0).all():
            yield f"slope: {test.slope}: is no coordinate of positive numbers; allowed: such as width, depth, batch"
            return
        if wheres and len(np.unique(selected(planned, wheres)[test.slope])) < LEAST_POINTS:
            told = f"slope: {test.slope}: has fewer than {LEAST_POINTS} values in {name}={', '.join(wheres)}"
            yield f"{told}; allowed: at least {LEAST_POINTS} in the sweep"


@contextmanager
def _said_of(name: str) -> Iterator[None]:
    """A reason against a selection of trials is one against this key."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(*(f"{name}: {reason.removeprefix('--where ')}" for reason in error.reasons)) from None


def register(folder: ResultsPath, claim: RegisteredClaim) -> None:
    """Write down that a claim is going to be tested, unless it stands there as it is."""
    known = registration_of(folder, claim)
    if known is None or known.registration != claim.registration:
        now = datetime.datetime.now(datetime.UTC).isoformat()
        record = Registration(name=claim.name, registration=claim.registration, at=now)
        (folder / REGISTERED).make_folder()
        (folder / REGISTERED / f"{claim.name}.json").write(sealed_json(dataclasses.asdict(record)))


def registration_of(folder: ResultsPath, claim: RegisteredClaim) -> Registration | None:
    """What a folder says of a claim; None if it says nothing. Raises ConfigError for a damaged file."""
    path = (folder / REGISTERED / f"{claim.name}.json").path
    try:
        return sealed_record(read_bytes(path), Registration, path)
    except (Missing, FileNotFoundError):
        return None
    except (Unreadable, OSError, json.JSONDecodeError) as error:
        raise ConfigError(f"{path}: {error}; allowed: as `claims run` has written it") from None


@dataclass(frozen=True)
class _StoredTrials:
    """What is in a results folder: its trials, the pack of each, and the folder itself."""

    sweep: xr.Dataset
    made: Mapping[str, PackInfo]
    folder: ResultsPath
    recipes: Recipes = field(default_factory=dict)


def verdicts(out: Path, tested: Sequence[RegisteredClaim]) -> list[Verdict]:
    """What a folder says of these claims. Raises ConfigError as `open_sweep` does."""
    sweep, packs = open_with_packs(out)
    sweep = with_outcomes(sweep, [metric_of(test.metric) for claim in tested if (test := claim.trials) is not None])
    made = {trial: pack for pack in packs for trial in pack.attributes["ids"]}
    stored = _StoredTrials(sweep, made, ResultsPath.open(out))
    return [verdict_of(claim, stored) for claim in tested]


def verdict_of(claim: RegisteredClaim, stored: _StoredTrials) -> Verdict:
    """That of one claim."""
    test = _test_of(claim)
    try:
        own = _whole_look(claim, stored)
        cells = list(_cells(test, own))
    except _Untold as reason:
        return Verdict(claim, str(reason), (), is_exploratory=False)
    told = together([cell.judged.verdict if cell.is_acting else NOT_HERE for cell in cells])
    known = registration_of(stored.folder, claim)
    packs = [stored.made[trial].attributes for trial in own["trial"].values]
    begun = sorted(pack["created"] for pack in packs)
    is_registered = known is not None and known.registration == claim.registration
    is_early = known is not None and is_registered and known.at <= begun[0]
    commits = sorted({str(pack["environment"].get("commit", "")) for pack in packs})
    return Verdict(claim, told, cells, not is_early, begun[-1], commits)


class _Untold(Exception):
    """Why there is no verdict."""


def _whole_look(claim: RegisteredClaim, stored: _StoredTrials) -> xr.Dataset:
    """The trials of the second look if all are complete, else those of the first. Raises _Untold if they are not.

    A part would compare what was trained at some rates with what was trained at others.
    """
    sweep = stored.sweep
    there = set(sweep["trial"].values[sweep["complete"].values])
    second = trials_of(claim, look=2, recipes=stored.recipes)
    first = [trial for trial in second if trial.seed < FIRST_SEED + _test_of(claim).seeds]
    for trials in (second, first):
        if (ids := {trial.id for trial in trials}) <= there:
            return sweep.isel(trial=np.flatnonzero(np.isin(sweep["trial"].values, sorted(ids))))
    done = len(ids & there)
    raise _Untold(f"{UNFINISHED}: {done} of {len(ids)} trials" if done else NOT_TRAINED)


def _cells(test: TrialTest, own: xr.Dataset) -> Iterator[CellEffect]:
    metric, control = metric_of(test.metric), metric_of(test.control.metric)
    try:
        table = control.with_columns(metric.with_columns(trial_table(own), own), own)
    except ConfigError as error:
        raise _Untold(f"not measured: {error}") from None
    of, last, seen = (_arm(table, own, wheres) for wheres in _wheres_of(test))
    for arm, read in ((of, metric), (last, metric), (seen, control)):
        if read.summary is not None and arm[read.summary.name].isna().all():
            raise _Untold(f"not measured: {read.summary.name}")
    for key, group in last.groupby(list(test.cells), dropna=False, sort=True):
        names = key if isinstance(key, tuple) else (key,)
        here = dict(zip(test.cells, names, strict=True))
        cell = ", ".join(f"{name}={value}" for name, value in here.items())
        judged = _judged(test, metric, _in_cell(of, here), group)
        yield _with_control(cell, test, control, judged, _in_cell(seen, here))


def _wheres_of(test: TrialTest) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """What selects the trials that are compared, those they are compared with, and those of the control."""
    last = test.against or test.of
    return test.of, last, test.control.of or last


def _arm(table: pd.DataFrame, own: xr.Dataset, wheres: Sequence[str]) -> pd.DataFrame:
    return table[table["trial"].isin(set(selected(own, wheres)["trial"].values))]


def _in_cell(table: pd.DataFrame, cell: Mapping[str, Any]) -> pd.DataFrame:
    for name, value in cell.items():
        table = table[table[name].isna() if pd.isna(value) else table[name] == value]
    return table


def _judged(test: TrialTest, metric: SeedMetric, of: pd.DataFrame, against: pd.DataFrame) -> JudgedEffect:
    pairs = _bounds(test, metric, of)
    if test.against:
        other = _bounds(test, metric, against)
        pairs = pd.DataFrame({"low": pairs["low"] - other["high"], "high": pairs["high"] - other["low"]})
    pairs = pairs.dropna().sort_index()
    low, high = pairs["low"].to_numpy(float), pairs["high"].to_numpy(float)
    threshold = float(np.log(test.threshold)) if metric.is_ratio else test.threshold
    judged = judge(low, high, test.claimed, threshold, test.seeds)
    if metric.is_ratio:
        mean, least, most = (float(np.exp(x)) for x in (judged.mean, judged.low, judged.high))
        judged = dataclasses.replace(judged, mean=mean, low=least, high=most)
    return judged


def _bounds(test: TrialTest, metric: SeedMetric, table: pd.DataFrame) -> pd.DataFrame:
    return per_doubling(metric, table, test.slope) if test.slope else metric.bounds(table)


def _with_control(
    cell: str, test: TrialTest, control: SeedMetric, judged: JudgedEffect, trials: pd.DataFrame
) -> CellEffect:
    seen = control.bounds(trials)["low"].to_numpy(float)
    least, mean = interval(seen, 0.95)[0], float(seen.mean()) if len(seen) else np.nan
    if control.is_ratio:
        least, mean = float(np.exp(least)), float(np.exp(mean))
    is_acting = bool((least if least == least else mean) > test.control.above)
    return CellEffect(cell, judged, mean, is_acting)


def _test_of(claim: RegisteredClaim) -> TrialTest:
    if claim.trials is None:
        raise ConfigError(f"claim={claim.name}: is decided by arithmetic; allowed: a claim with trials")
    return claim.trials
