"""What the command `cross` says of one incident, or of all of a sweep, in lines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import xarray as xr

from analysis.again.batches import BatchesUnseen, BatchReader
from analysis.again.crossing import DATA, STATE, Crossed, crossed
from analysis.again.sweep_folder import SweepFolder
from analysis.measures.anomalies import TrialSignals
from analysis.measures.evidence import evidence_of, offending
from analysis.measures.incidents import Incident, of_one, runs, worst
from analysis.measures.metrics import coordinates
from analysis.reading.groups import is_seed
from analysis.reading.selection import selected
from analysis.reports.printed import table_lines
from harness.basics.printing import count
from harness.config import NO_FAULT, ConfigError
from harness.config.names import Site
from harness.objectives.outcome import TRAINED

NEVER = "", "none"  # sites of a fault that did not strike


@dataclass(frozen=True)
class CrossTest:
    """Incidents of a folder, fed to other trials of it."""

    folder: SweepFolder
    readings: Callable[[str], BatchReader]

    def of(self, run: TrialSignals, other: str) -> Crossed | None:
        """The worst incident of a trial, read by another one; None without one. Raises ConfigError."""
        reading = self.readings(run.trial)
        log = self.folder.logs.get(run.trial)
        incident: Incident | None = worst(of_one(run, log, is_asked=True, reading=reading))
        if incident is None:
            return None
        evidence = evidence_of(run, incident, reading)
        return crossed(reading, offending(evidence, incident), self.readings(other), evidence.begin)


def told_cross(out: Path, trial: str, other: str | None = None, data: Path | None = None) -> list[str]:
    """The worst incident of one trial, batch by batch. Without `other` one is chosen. Raises ConfigError."""
    folder = SweepFolder.open(out)
    for name in (trial, *([other] if other else [])):
        folder.check(name)
    if other is None and (other := others(folder.sweep).get(trial)) is None:
        raise ConfigError(f"TRIAL={trial}: no other run of its recipe was trained to the end; allowed: --from OTHER")
    (run,) = runs(folder.sweep, folder.setups, [trial])
    found = CrossTest(folder, folder.readings(data)).of(run, other)
    if found is None:
        raise ConfigError(f"TRIAL={trial}: has no incident; allowed: a trial that `incidents OUT` lists")
    steps = found.steps
    lines = [
        f"Batches of steps {steps[0]} to {steps[-1]} of {trial}, read by {other} as it stands at step {found.step}:"
    ]
    for step, loss, norm in zip(steps, found.losses, found.norms, strict=True):
        lines.append(f"  step {step}: loss {loss:.3f} nat/token, gradient norm {norm:.3g}")
    own, norm = np.median(found.own_losses), np.median(found.own_norms)
    span = f"{found.own_losses.min():.3f} to {found.own_losses.max():.3f}"
    lines.append(
        f"Its own {len(found.own_losses)} batches around there: loss {own:.3f} ({span}), gradient norm {norm:.3g}"
    )
    return [*lines, f"Verdict: {found.words}"]


def told_crossings(out: Path, most: int, data: Path | None = None, wheres: Sequence[str] = ()) -> list[str]:
    """Every trial with an incident, or the first `most`: read by another run of its recipe. Raises ConfigError."""
    if most < 1:
        raise ConfigError(f"--most={most}: out of range; allowed: 1 or more")
    folder = SweepFolder.open(out)
    chosen = selected(folder.sweep, wheres)
    test, by, truths = CrossTest(folder, folder.readings(data)), others(folder.sweep), _truths(chosen)
    rows: list[dict[str, object]] = []
    left_out: dict[str, str] = {}
    for run in runs(folder.sweep, folder.setups, list(map(str, chosen["trial"].values))):
        if len(rows) == most:
            left_out["the rest"] = f"beyond --most {most}, not looked at"
            break
        if not of_one(run, folder.logs.get(run.trial)):
            continue
        if (other := by.get(run.trial)) is None:
            left_out[run.trial] = "no other run of its recipe was trained to the end"
            continue
        try:
            found = test.of(run, other)
        except ConfigError as error:
            left_out[run.trial] = _why(error)
            continue
        if found is None:
            left_out[run.trial] = "its batches show no incident"
        else:
            rows.append(_row(run.trial, other, found, truths[run.trial]))
    if not rows and not left_out:
        return ["No incident: there is nothing to cross."]
    lines = table_lines(pd.DataFrame(rows)) if rows else []
    return [*lines, *(f"{trial} left out: {why}" for trial, why in left_out.items()), *_summed(rows)]


def _why(error: ConfigError) -> str:
    if isinstance(error, BatchesUnseen):
        return f"its batches cannot be made again: {error.sentence}"
    return str(error.reasons[0])


def _row(trial: str, other: str, found: Crossed, truth: tuple[str, str]) -> dict[str, object]:
    first, last = found.steps[0], found.steps[-1]
    return {
        "trial": trial,
        "fault": truth[0],
        "steps": f"{first} to {last}" if last > first else str(first),
        "other": other,
        "loss": float(found.losses.max()),
        "its own": float(np.median(found.own_losses)),
        "norm": float(found.norms.max()),
        "its own norm": float(np.median(found.own_norms)),
        "verdict": found.verdict,
        "truth": truth[1],
    }


def _summed(rows: Sequence[dict[str, object]]) -> list[str]:
    if not rows:
        return []
    table = pd.DataFrame(rows)
    of = {verdict: int((table["verdict"] == verdict).sum()) for verdict in (DATA, STATE)}
    known = table[table["truth"] != ""]
    right = (
        f" {int((known['verdict'] == known['truth']).sum())} of {len(known)} with a fault are right."
        if len(known)
        else ""
    )
    said = f"{count(len(rows), 'incident')}: {of[DATA]} data, {of[STATE]} state.{right}"
    return [said, "Loss and gradient norm of the other run: the largest on these batches, and the median on its own."]


def others(sweep: xr.Dataset) -> dict[str, str]:
    """Trial -> the one that reads its batches: a run of its recipe without a fault, trained to the end.

    One of another seed where there is one, since its batches are others; else its own golden twin.
    """
    table = coordinates(sweep)
    fields = {name: str(sweep[name].attrs.get("path", "")) for name in table}
    recipe = [name for name, path in fields.items() if path and not is_seed(path) and path.split(".")[0] != "fault"]
    table["place"] = table.groupby(recipe, dropna=False).ngroup() if recipe else 0
    sound = table[(table["fault"] == NO_FAULT.name) & table["complete"] & (table["outcome"] == TRAINED)]
    groups = {place: list(group["trial"]) for place, group in sound.groupby("place")}
    found = {}
    for trial, golden, place in table[["trial", "golden", "place"]].itertuples(index=False):
        candidates = [name for name in groups.get(place, []) if name not in (trial, golden)]
        if not candidates and golden != trial and golden in groups.get(place, []):
            candidates = [golden]
        if candidates:
            found[str(trial)] = str(candidates[0])
    return found


def _truths(sweep: xr.Dataset) -> dict[str, tuple[str, str]]:
    """Trial -> its fault, and what was at fault: data or state; nothing is known of what did not strike."""
    names = ("trial", "fault", "struck_site", "changes")
    found = {}
    for trial, fault, site, changes in zip(*(sweep[name].values for name in names), strict=True):
        is_known = fault != NO_FAULT.name and changes and site not in NEVER
        found[str(trial)] = str(fault), (DATA if site == Site.BATCH else STATE) if is_known else ""
    return found
