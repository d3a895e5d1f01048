"""Incidents: what was wrong with a run, from the first alarm to its end, with its outcome and what it has cost.

A run with a playbook has its incidents in the store (`analysis.reading.incident_log`). Of any other, one begins with a
sign that healthy runs hardly ever have: a value that is not finite, a loss that does not come back, a jump of the
update, of an activation or of the loss scale, a rate that is not that of the schedule, a consistency check that fails
(`analysis.measures.anomalies`), or an alarm of `combined`, replayed where it did not watch, of at least `CERTAIN`. A
large gradient or a loss above the usual for a step is none by itself. Where `combined` has nothing to go by, each
symptom (`analysis.measures.symptoms`) and each odd loss is a sign. An incident goes on while anything is odd, alarmed
or ill at most `APART` steps after the last that was.

| outcome | rule |
|---|---|
| 3 divergent | the run ended in NaN, or the loss had not come down by half at the end |
| 2 lingering | it did, and more than `LEFT` nat are left of it, and two standard errors |
| 1 recoverable | neither |

What is left is the mean of the last `BEFORE` steps up to `AFTER` steps from the first alarm, less that of the `BEFORE`
steps before; of the loss over that of the undisturbed run, where the sweep has its golden twin, else of the loss
itself. A spike of 0.06 nat that came back to +0.015 was a real loss (Marin, issue 1390).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from analysis.again.batches import BatchReader, Setup
from analysis.again.odd_batches import odd_batches
from analysis.again.sweep_folder import SweepFolder
from analysis.measures.anomalies import TrialSignals
from analysis.measures.detectors import TRIALS_AT_ONCE, alarms, carried, measured, taken
from analysis.measures.symptoms import Symptom, of_run
from analysis.reading.incident_log import Act, Logged, number
from analysis.reading.loss_words import unit
from analysis.reading.padding import cut, own_sizes
from analysis.reading.selection import selected, with_company

WATCHING = ("finite", "combined", "skip_step", "loss_ratio", "spiky_loss")
CERTAIN = 2.0  # score of `combined` from which on an alarm is a sign of an incident
SIGNS = {  # anomaly that is one by itself -> in words
    "update_rms": "jump of the update",
    "activation_rms": "jump of activations",
    "learning_rate": "rate not of the schedule",
    "loss_scale": "jump of the loss scale",
    "second_moment_norm check": "second-moment consistency check",
    "param_norm check": "weight-norm consistency check",
    "weights check": "weights that changed before the update",
    "moments check": "moments that changed before the update",
}
LASTING = ("non-finite", "divergence", "lingering")  # symptoms that are one
ALARMS = ("finite", "spiky_loss")  # detectors of which each alarm is one
APART, BEFORE, AFTER, LEFT = 30, 50, 500, 0.015
LEAST = 10  # steps that there have to be before the first of an incident
NOTHING: Mapping[str, Setup] = {}
NO_LOG: Mapping[str, Sequence[Logged]] = {}
TYPES = {1: "recoverable", 2: "lingering", 3: "divergent"}
IGNORED = ("plateau", "vanishing gradients")  # of symptoms: no incident by themselves
COLUMNS: tuple[str, ...] = (
    "trial",
    "first",
    "last",
    "symptoms",
    "signs",
    "detectors",
    "action",
    "outcome",
    "is_logged",
    "loss_before",
    "loss_peak",
    "loss_after",
    "grad_norm_peak",
    "steps",
    "tokens",
    "seconds",
    "money",
)


@dataclass(frozen=True)
class FirstAlarm:
    """What one detector said of an incident: its first alarm, and the largest score."""

    detector: str
    step: int
    score: float


@dataclass(frozen=True)
class Incident:
    """One of a trial. Losses in nat/token, peaks infinite where a value is not finite; `outcome` is a key of `TYPES`.

    `steps` were trained in vain or skipped.
    """

    trial: str
    first: int
    last: int
    symptoms: tuple[Symptom, ...]
    signs: tuple[str, ...]  # of `SIGNS`, in words
    alarms: tuple[FirstAlarm, ...]
    acts: tuple[Act, ...]
    is_logged: bool
    outcome: int
    loss_before: float
    loss_peak: float
    peak_step: int
    loss_after: float
    after_step: int
    left: float  # nat/token of loss that are left after it, over the undisturbed run's or over what was before
    grad_norm_peak: float
    steps: int
    tokens: float
    seconds: float
    money: float
    size: float = field(repr=False)  # by which incidents of a trial are told apart
    is_sure: bool = True  # False: healthy runs have such steps, too
    batches: tuple[tuple[int, str], ...] = ()  # steps whose batches alone say that there is one, and what they are

    @property
    def row(self) -> dict[str, Any]:
        """As `incidents` has it."""
        texts = {
            "symptoms": ", ".join(dict.fromkeys(one.symptom for one in self.symptoms)),
            "signs": ", ".join(self.signs),
            "detectors": ", ".join(f"{one.detector} at {one.step} ({one.score:.3g})" for one in self.alarms),
            "action": ", ".join(dict.fromkeys(act.action for act in self.acts)) or "none",
            "outcome": TYPES[self.outcome],
        }
        return {name: texts[name] if name in texts else getattr(self, name) for name in COLUMNS}


def incidents(results: Path | str | xr.Dataset, cost_per_hour: float = 0.0, wheres: Sequence[str] = ()) -> pd.DataFrame:
    """One row an incident of each trial.

    Args:
        results: A results folder, or a sweep as `analysis.open_sweep` gives it. A log of playbooks is read from a
            folder alone.
        cost_per_hour: What an hour of training costs, in any currency.
        wheres: Which trials of a folder, such as `("mitigation=qk_norm",)`; all, if there is none.

    Returns:
        Columns: `trial`, its `first` and `last` step, `symptoms`, `signs` (what else says so), `detectors` (those that
        mark incidents, and those that watched) with their first alarm and largest score, the `action` taken, `outcome`
        (recoverable, lingering, divergent), `is_logged` (by a playbook; else it was found afterwards), `loss_before`,
        `loss_peak` and `loss_after` (in the unit of the loss, which is `attrs["loss_unit"]`), `grad_norm_peak` (before
        clipping; peaks are infinite where a value is not finite), and the cost in `steps`, `tokens`, `seconds` of the
        trial and `money`.

    Raises:
        ConfigError: As `open_sweep`, and for a condition that holds for no trial.
    """
    if isinstance(results, xr.Dataset):
        sweep, found = results, all_incidents(results, cost_per_hour=cost_per_hour)
    else:
        folder = SweepFolder.open(results)
        sweep = folder.sweep
        found = all_incidents(with_company(folder.sweep, wheres), folder.setups, folder.logs, cost_per_hour)
        chosen = set(selected(folder.sweep, wheres)["trial"].values)
        found = [one for one in found if one.trial in chosen]
    table = pd.DataFrame([one.row for one in found], columns=list(COLUMNS))
    table.attrs["loss_unit"] = unit(sweep)
    return table


def all_incidents(
    sweep: xr.Dataset,
    setups: Mapping[str, Setup] = NOTHING,
    logs: Mapping[str, Sequence[Logged]] = NO_LOG,
    cost_per_hour: float = 0.0,
) -> list[Incident]:
    """The same, as they are."""
    of_runs = (of_one(run, logs.get(run.trial), cost_per_hour) for run in runs(sweep, setups))
    return [one for found in of_runs for one in found]


def runs(
    sweep: xr.Dataset,
    setups: Mapping[str, Setup] = NOTHING,
    chosen: Sequence[str] | None = None,
    heard: Sequence[str] | None = WATCHING,
) -> Iterator[TrialSignals]:
    """The `chosen` trials of a sweep, or all, with what is known of their recipes; some are in memory at a time.

    The detectors that are `heard` are replayed where they did not watch: those that mark incidents, or with None all
    whose signals were measured. Those that watched some of the trials are heard too.
    """
    names = list(map(str, sweep["trial"].values)) if chosen is None else list(chosen)
    for begin in range(0, len(names), TRIALS_AT_ONCE):
        yield from _block(sweep, setups, names[begin : begin + TRIALS_AT_ONCE], heard)


def _block(
    sweep: xr.Dataset, setups: Mapping[str, Setup], chosen: Sequence[str], heard: Sequence[str] | None
) -> Sequence[TrialSignals]:
    part = sweep.sel(trial=list(chosen))
    known = [name for name in measured(part) if heard is None or name in heard or f"alarm_{name}" in part]
    said = {name: _said(part, name) for name in known}
    of_steps = [str(name) for name in part.data_vars if "step" in part.variables[name].dims]
    names = [name for name in of_steps if not name.startswith(("alarm_", "score_"))]
    read = {name: part.variables[name].transpose("trial", "step", ...) for name in names}
    values = {name: signal.values.astype(float) for name, signal in read.items()}
    of_all, outcome, twins = taken(part), part["outcome"].values, part["golden"].values
    has_twin = np.isin(twins, sweep["trial"].values) & (twins != part["trial"].values)
    golden = _losses(sweep, np.unique(twins[has_twin]))

    dims = {name: signal.dims[1:] for name, signal in read.items()}
    sizes = own_sizes(part)

    def signals(row: int) -> dict[str, np.ndarray]:
        own: dict[Hashable, int] = {dim: int(size[row]) for dim, size in sizes.items()}
        return {name: carried(cut(of[row], dims[name], own), of_all[row]) for name, of in values.items()}

    return [
        TrialSignals(
            str(trial),
            signals(row),
            of_all[row],
            {name: (alarm[row], score[row]) for name, (alarm, score) in said.items()},
            str(outcome[row]),
            setups.get(str(trial)),
            golden.get(twins[row]) if has_twin[row] else None,
            unit(sweep),
        )
        for row, trial in enumerate(part["trial"].values)
    ]


def _losses(sweep: xr.Dataset, trials: np.ndarray) -> dict[str, np.ndarray]:
    """Trial -> its loss [steps]."""
    losses = sweep["loss"].sel(trial=trials).transpose("trial", "step").values.astype(float)
    return dict(zip(trials, losses, strict=True))


def _said(sweep: xr.Dataset, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Alarms and scores [trial, step] of a detector: what it has said where it watched, else what it would have."""
    shape = sweep.sizes["trial"], sweep.sizes["step"]
    is_alarm, score = np.full(shape, np.nan), np.full(shape, np.nan)
    if f"alarm_{name}" in sweep:
        of_both = (sweep[f"{what}_{name}"].transpose("trial", "step").values for what in ("alarm", "score"))
        is_alarm[:], score[:] = of_both
    if len(unwatched := np.flatnonzero(np.isnan(is_alarm).all(axis=1))):
        again = alarms(sweep.isel(trial=unwatched), name)
        is_alarm[unwatched], score[unwatched] = again["alarm"].values, again["score"].values
    return is_alarm == 1, score


def of_one(
    run: TrialSignals,
    log: Sequence[Logged] | None,
    cost_per_hour: float = 0.0,
    is_asked: bool = False,
    reading: BatchReader | None = None,
) -> list[Incident]:
    """The incidents of one trial, by their first steps: those of its log, if it has one.

    `is_asked`: somebody wants to know of this very trial; where no sign is sure, its batches tell, if `reading` gives
    them and some are odd, and else whatever is odd counts as one.
    """
    if not run.steps:
        return []
    told = of_run(run["loss"], run["grad_norm"])
    if log:
        return [_incident(run, told, one.step, max(one.last, one.closed or 0), one, cost_per_hour) for one in log]
    sure, odd = _marks(run, told)
    is_sure = bool(sure.any())
    steps = np.flatnonzero(sure if is_sure or not is_asked else odd)
    of_batches = odd_batches(reading, run.steps) if is_asked and not is_sure and reading is not None else {}
    if of_batches := {step: word for step, word in of_batches.items() if step >= LEAST}:
        steps = np.array(list(of_batches))
    groups = np.split(steps, np.flatnonzero(np.diff(steps) > APART) + 1) if len(steps) else []
    found = []
    for group in groups:
        one = _incident(run, told, int(group[0]), int(group[-1]), None, cost_per_hour)
        batches = tuple((int(step), of_batches[int(step)]) for step in group if of_batches)
        found.append(replace(one, is_sure=is_sure, batches=batches))
    return found


def _marks(run: TrialSignals, told: Sequence[Symptom]) -> tuple[np.ndarray, np.ndarray]:
    """The steps of incidents, bool [steps]: signs that are sure, and what follows from one to the next; and all odd."""
    said = {name: alarm[: run.steps] for name, (alarm, _) in run.said.items() if name in WATCHING}
    told = [one for one in told if one.symptom not in IGNORED]
    is_ill, is_lasting = np.zeros((2, run.steps), bool)
    for one in told:
        is_ill[one.begin : one.end + 1] = True
        is_lasting[one.begin : one.end + 1] |= one.symptom in LASTING
    signs = [is_lasting, *(run.anomalies[name] for name in SIGNS), *(said[name] for name in ALARMS if name in said)]
    if "combined" in said:
        signs.append(said["combined"] & ~(run.said["combined"][1][: run.steps] < CERTAIN))
    else:
        signs += [is_ill, run.anomalies["loss"]]
    sign = np.any(signs, axis=0)
    odd = np.any([is_ill, *run.anomalies.values(), *said.values()], axis=0)
    if run.outcome != "non-finite":
        sign[:LEAST] = odd[:LEAST] = False
    marks, since = sign.copy(), APART + 1
    for step in range(run.steps):
        marks[step] |= odd[step] and since <= APART
        since = 1 if marks[step] else since + 1
    for one in told:  # one that a sign falls into has begun before it
        marks[one.begin : one.end + 1] |= sign[one.begin : one.end + 1].any()
    return marks, odd


def worst(found: Sequence[Incident]) -> Incident | None:
    """The divergent one, else the one that fails a consistency check, else the largest; the first of equals."""
    return max(found, key=lambda one: (one.outcome == 3, one.size), default=None)


def _incident(
    run: TrialSignals, told: Sequence[Symptom], first: int, last: int, log: Logged | None, cost_per_hour: float
) -> Incident:
    first = min(first, run.steps - 1)  # a step that the run went back from, and never came to again
    last = min(max(first, last), run.steps - 1)
    loss, norm = run["loss"], run["grad_norm"]
    here = slice(first, last + 1)
    acts = log.acts if log else ()
    heard = []
    for name, (is_alarm, score) in run.said.items():
        with_next = slice(first, last + 2)  # where what is known of a step when it is over is judged
        at = np.flatnonzero(is_alarm[with_next])
        if len(at):
            scores = score[with_next][at]
            scores = scores[~np.isnan(scores)]
            heard.append(FirstAlarm(name, first + int(at[0]), float(scores.max()) if len(scores) else np.nan))
    for act in acts:  # of an act whose alarm is not in the signals any more, since the row went back
        known = {one.detector for one in heard}
        heard += [
            FirstAlarm(name, act.step, number(value)) for name, value in act.detectors.items() if name not in known
        ]
    earlier = slice(max(0, first - BEFORE), first)
    before = _finite(loss[earlier])
    end = min(run.steps, first + AFTER)
    after = loss[max(first, end - BEFORE) : end]
    peak, place = _peak(loss[here])
    seen = [(loss, act.step) for act in acts for loss in _logged([act.loss])]
    peak, peak_step = max([(peak, first + place), *seen], key=lambda one: one[0])
    shown = (one for one in told if one.begin <= last and one.end >= first)
    symptoms = tuple(one for one in shown if one.symptom != "plateau")
    signs = tuple(words for name, words in SIGNS.items() if run.anomalies[name][here].any())
    outcome, left = _outcome(run, symptoms, earlier, slice(max(first, end - BEFORE), end), last)
    norms = [_peak(norm[here])[0], *_logged(act.grad_norm for act in acts)]
    steps = log.steps_lost if log else (run.steps - first if outcome == 3 else last - first + 1)
    seconds = run["step_seconds"]
    usual = float(np.nanmedian(seconds)) if np.isfinite(seconds).any() else np.nan
    counts = np.diff(run["tokens"], prepend=0)
    tokens = steps * float(np.nanmedian(counts)) if np.isfinite(counts).any() else np.nan
    spent = steps * usual
    return Incident(
        run.trial, first, last, symptoms, signs, tuple(sorted(heard, key=lambda one: one.step)), tuple(acts),
        log is not None, outcome, _mean(before), peak, peak_step, _mean(_finite(after)), end - 1, left,
        float(np.max(norms)), steps, tokens, spent, spent / 3600 * cost_per_hour, float(run.sizes[here].max()),
    )  # fmt: skip


def _outcome(
    run: TrialSignals, symptoms: Sequence[Symptom], before: slice, after: slice, last: int
) -> tuple[int, float]:
    """By the rules above; and the loss that is left."""
    if run.golden is None:
        kept, others = _finite(run["loss"][after]), _finite(run["loss"][before])
    else:
        apart = run["loss"] - run.golden[: run.steps]
        kept, others = _finite(apart[after]), _finite(apart[before])
    left = _mean(kept) - _mean(others)
    ends_in_nan = run.outcome == "non-finite" and last >= run.steps - 2
    if ends_in_nan or any(one.symptom == "divergence" for one in symptoms) or not len(kept):
        return 3, left
    if len(kept) < LEAST or not len(others):
        return 1, left
    error = np.hypot(others.std() / len(others) ** 0.5, kept.std() / len(kept) ** 0.5)
    return (2 if left > max(LEFT, 2 * error) else 1), left


def _peak(values: np.ndarray) -> tuple[float, int]:
    """The largest value and where it is; NaN is infinite."""
    if not len(values):
        return np.nan, 0
    values = np.where(np.isnan(values), np.inf, values)
    return float(values.max()), int(values.argmax())


def _logged(values: Iterable[float | str | None]) -> list[float]:
    """Those that are known; what is not finite is infinite."""
    return [float(np.nan_to_num(number(value), nan=np.inf)) for value in values if value is not None]


def _finite(values: np.ndarray) -> np.ndarray:
    return np.asarray(values[np.isfinite(values)])


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else np.nan
