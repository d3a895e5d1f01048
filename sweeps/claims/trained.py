"""Claims that are decided by trials: registered in a results folder, trained there, and judged from what it holds."""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd
import xarray as xr

from analysis.measures.metrics import clean_trials, trial_table
from analysis.reading.open_sweep import open_with_packs
from analysis.reading.selection import selected
from harness.config import ConfigError, Trial
from harness.storage.json_seal import sealed_json, sealed_record
from harness.storage.records import Missing, Unreadable, read_bytes
from harness.storage.results_folder import ResultsPath
from harness.storage.stored import PackInfo
from sweeps.claims.measured import METRICS, SeedMetric
from sweeps.claims.registered import FIRST_SEED, RegisteredClaim, TrialTest
from sweeps.claims.registration import REGISTERED, Registration
from sweeps.claims.verdicts import NOT_HERE, JudgedEffect, interval, judge, together
from sweeps.compose.arguments import check_command_line, expand
from sweeps.compose.grid import Composer
from sweeps.compose.hydra_calls import Call, calling, config_loader
from sweeps.planning.packs import PackPlan

EXPLORATORY = "exploratory"


@dataclass(frozen=True)
class CellEffect:
    """What came of a claim in one cell; `control` is the mean of the control's metric."""

    cell: str
    judged: JudgedEffect
    control: float
    is_acting: bool


@dataclass(frozen=True)
class Verdict:
    """That of a claim, and of each of its cells. `is_exploratory`: trials are older than the registration."""

    claim: RegisteredClaim
    verdict: str
    cells: Sequence[CellEffect]
    is_exploratory: bool


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


def trials_of(claim: RegisteredClaim, look: int = 1) -> list[Trial]:
    """The trials of a claim for its first look, or its second, with twice the seeds. Raises ConfigError as a sweep."""
    test = _test_of(claim)
    seeds = look * test.seeds
    words = ["study=grid", *test.sweep, f"seed=range({FIRST_SEED},{FIRST_SEED + seeds})"]
    try:
        own = [f"--config-dir={claim.folder.absolute()}"] if claim.folder else []
        config, _ = check_command_line([*own, *words])
        loader = config_loader(claim.folder)
        with calling(Call(claim.folder)):
            jobs = expand(config.hydra.sweeper.params, list(config.hydra.overrides.task), loader)
            asked = frozenset(text.partition("=")[0] for text in words)
            composer = Composer(loader, "grid", asked)
            trials = composer.trials(jobs)
            composer.notices(trials, "refuse")  # what cannot act has nothing to say
            return trials
    except ConfigError as error:
        raise ConfigError(*(f"claim={claim.name}: {reason}" for reason in error.reasons)) from None


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


def verdicts(out: Path, tested: Sequence[RegisteredClaim]) -> list[Verdict]:
    """What a folder says of these claims. Raises ConfigError as `open_sweep` does."""
    sweep, packs = open_with_packs(out)
    made = {trial: pack for pack in packs for trial in pack.attributes["ids"]}
    return [verdict_of(claim, sweep, made, ResultsPath.open(out)) for claim in tested]


def verdict_of(claim: RegisteredClaim, sweep: xr.Dataset, made: Mapping[str, PackInfo], folder: ResultsPath) -> Verdict:
    """That of one claim; `made` has the pack of each trial."""
    test = _test_of(claim)
    ids = {trial.id for trial in trials_of(claim, look=2)}
    own = clean_trials(sweep.isel(trial=np.flatnonzero(np.isin(sweep["trial"].values, sorted(ids)))))
    cells = list(_cells(test, own)) if own.sizes["trial"] else []
    told = together([cell.judged.verdict if cell.is_acting else NOT_HERE for cell in cells])
    known = registration_of(folder, claim)
    first = min((made[trial].attributes["created"] for trial in own["trial"].values), default="")
    is_early = known is not None and known.registration == claim.registration and known.at <= first
    return Verdict(claim, told if cells else "not trained", cells, not is_early and bool(cells))


def _cells(test: TrialTest, own: xr.Dataset) -> Iterator[CellEffect]:
    table = trial_table(own)
    table = table[table["complete"]]
    metric, control = METRICS[test.metric], METRICS[test.control.metric]
    arms = {}
    for name, wheres in (("of", test.of), ("against", test.against)):
        try:
            chosen = set(selected(own, wheres)["trial"].values)
        except ConfigError:
            return  # no trial of that arm yet
        arms[name] = table[table["trial"].isin(chosen)]
    for key, group in arms["against"].groupby(list(test.cells), dropna=False, sort=True):
        names = key if isinstance(key, tuple) else (key,)
        here = dict(zip(test.cells, names, strict=True))
        other = arms["of"]
        for name, value in here.items():
            other = other[other[name] == value]
        cell = ", ".join(f"{name}={value}" for name, value in here.items())
        yield _effect(cell, test, metric, control, other, group)


def _effect(
    cell: str, test: TrialTest, metric: SeedMetric, control: SeedMetric, of: pd.DataFrame, against: pd.DataFrame
) -> CellEffect:
    one, other = (metric.bounds(arm).add_prefix(name) for name, arm in (("of_", of), ("against_", against)))
    pairs = one.join(other, how="inner").dropna().sort_index()
    low = (pairs["of_low"] - pairs["against_high"]).to_numpy(float)
    high = (pairs["of_high"] - pairs["against_low"]).to_numpy(float)
    threshold = float(np.log(test.threshold)) if metric.is_ratio else test.threshold
    judged = judge(low, high, test.claimed, threshold, test.seeds)
    if metric.is_ratio:
        mean, least, most = (float(np.exp(x)) for x in (judged.mean, judged.low, judged.high))
        judged = dataclasses.replace(judged, mean=mean, low=least, high=most)
    seen = control.bounds(against)["low"].to_numpy(float)
    least, _ = interval(seen, 0.95)
    mean = float(seen.mean()) if len(seen) else np.nan
    is_acting = bool((least if least == least else mean) > test.control.above)
    return CellEffect(cell, judged, mean, is_acting)


def _test_of(claim: RegisteredClaim) -> TrialTest:
    if claim.trials is None:
        raise ConfigError(f"claim={claim.name}: is decided by arithmetic; allowed: a claim with trials")
    return claim.trials
