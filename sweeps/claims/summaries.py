"""What a claim reads of a signal that was recorded at each step: one number of each trial."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import xarray as xr

from analysis.measures.spikes import share_of_finite, spike_score
from analysis.reading.twins import final_window
from harness.config import ConfigError, Trial
from harness.guards import GUARDS
from harness.objectives.outcome import WINDOW_SHARE, window_means
from harness.readings.table import READ_BY, READINGS
from harness.storage.store import SIGNALS
from harness.training.readings import stored_signals

OF_DETECTORS = ("alarm", "score")  # signals of each detector, before its name
_TEXT = re.compile(r"(\w+)\((\w+)(?:, *([-+.\de]+))?\)")


@dataclass(frozen=True)
class Form:
    """What is made of a signal [trial, step] and a number, if it takes one; whether it is compared as a ratio.

    `beside` is a second signal, which is given behind them. `version` is that of `sweeps.claims.measured.SeedMetric`.
    """

    of: Callable[..., np.ndarray]
    is_ratio: bool = True
    takes_number: bool = False
    beside: str = ""
    version: int = 1


@dataclass(frozen=True)
class SignalSummary:
    """A form of a signal, such as `largest(grad_norm)`. Of a ratio each trial has the logarithm."""

    name: str
    form: str
    signal: str
    number: float

    @property
    def is_ratio(self) -> bool:
        """Whether trials are compared by how many times as large it is."""
        return FORMS[self.form].is_ratio

    def of(self, sweep: xr.Dataset) -> np.ndarray:
        """[trial]; NaN where nothing was measured. Raises ConfigError for a signal that the trials lack."""
        values, form = self._values(sweep, self.signal), FORMS[self.form]
        beside = [self._values(sweep, form.beside)] if form.beside else []
        found = np.full(len(values), np.nan)
        lengths = sweep["steps"].values.astype(int)  # behind them is padding
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # of trials that have none
            if self.form != ENDS and values.ndim > 2:
                values = np.nanmax(np.abs(values.reshape(*values.shape[:2], -1)), axis=2)
            for steps in np.unique(lengths):
                rows = lengths == steps
                found[rows] = form.of(values[rows, :steps], self.number, *(other[rows, :steps] for other in beside))
            return np.log(found) if self.is_ratio else found

    def _values(self, sweep: xr.Dataset, signal: str) -> np.ndarray:
        if signal not in sweep.data_vars or "step" not in sweep[signal].dims:
            raise ConfigError(f"{self.name}: the trials have no such signal; allowed: {', '.join(_signals(sweep))}")
        values = sweep[signal].transpose("trial", "step", ...).values.astype(float)
        values[~np.isfinite(values)] = np.nan
        return np.asarray(values)

    def unmeasured_reason(self, trials: Sequence[Trial]) -> str:
        """Why these trials, once they are trained, will lack a signal in the store; empty if they will have it."""
        wanted = filter(None, (self.signal, FORMS[self.form].beside))
        return next(filter(None, (self._unmeasured(signal, trials) for signal in wanted)), "")

    def _unmeasured(self, signal: str, trials: Sequence[Trial]) -> str:
        if signal in SIGNALS:
            return ""
        known = set(SIGNALS).union(*(guard.signals for guard in GUARDS))
        for trial in trials:
            detectors = trial.section("detect").name.split("+")
            known |= set(stored_signals(trial)) | {f"{kind}_{name}" for kind in OF_DETECTORS for name in detectors}
        if signal in known:
            return ""
        if signal not in READ_BY:
            return f"{self.name}: the trials have no such signal; allowed: {', '.join(sorted(known))}"
        key = f"signals.{READ_BY[signal]}"
        if why := READINGS[READ_BY[signal]].missing(trials[0]):
            return f"{self.name}: {key}: {why}; allowed: another signal, or another model"
        return f"{self.name}: {key}=0 never reads it; allowed: {key} >= 1"


def _signals(sweep: xr.Dataset) -> list[str]:
    return sorted(str(name) for name, variable in sweep.data_vars.items() if {"trial", "step"} <= set(variable.dims))


def _largest(values: np.ndarray, number: float) -> np.ndarray:
    return np.asarray(np.nanmax(np.abs(values), axis=1))


def _mean(values: np.ndarray, number: float) -> np.ndarray:
    return np.asarray(np.nanmean(np.abs(values), axis=1))


def _last(values: np.ndarray, number: float) -> np.ndarray:
    """Mean over the final steps of the run; of a signal that is read more rarely, its last in the final quarter.

    What a run lacks that ended before is not made up for.
    """
    steps = values.shape[1]
    found = _mean(values[:, -int(final_window(steps)) :], number)
    quarter = np.abs(values[:, steps - -(-steps // 4) :])
    last = quarter[np.arange(len(values)), quarter.shape[1] - 1 - np.isfinite(quarter)[:, ::-1].argmax(axis=1)]
    return np.where(np.isfinite(found), found, last)


def _when_largest(values: np.ndarray, number: float) -> np.ndarray:
    """At which share of the run it is largest: 0 at the first step."""
    is_known = np.isfinite(values).any(axis=1)
    place = np.where(np.isfinite(values), np.abs(values), -np.inf).argmax(axis=1)
    return np.where(is_known, place / values.shape[1], np.nan)


def _above(values: np.ndarray, number: float) -> np.ndarray:
    """Share of the measured steps at which it is above the number."""
    return share_of_finite(values, values > number)


def _rises(values: np.ndarray, number: float) -> np.ndarray:
    """Share of the measured steps at which it is more than `number` times the lowest value before.

    Of the loss with 1.2 that is the loss ratio of Li et al. 2021 (arXiv 2108.06084), section 3.
    """
    ratio = values[:, 1:] / np.fmin.accumulate(values, axis=1)[:, :-1]
    return share_of_finite(ratio, ratio > number)


def _spikes(values: np.ndarray, number: float) -> np.ndarray:
    """The spike score with so many standard deviations (`analysis.measures.spikes.spike_score`)."""
    return spike_score(values, number)


def _last_over_first(values: np.ndarray, number: float) -> np.ndarray:
    """Of the last layer over the first, median over steps; values [trial, step, layer], NaN behind the last layer."""
    ends = np.full(len(values), np.nan)
    for row, own in enumerate(values.reshape(*values.shape[:2], -1)):
        here = np.flatnonzero(np.isfinite(own).any(axis=0))
        if len(here) > 1:
            ends[row] = np.nanmedian(own[:, here[-1]] / own[:, here[0]])
    return ends


def _end_over_best(values: np.ndarray, number: float) -> np.ndarray:
    """The mean over the last 5% of what was measured, over the largest mean of any such window."""
    found = np.full(len(values), np.nan)
    for row, own in enumerate(values):
        if len(known := own[np.isfinite(own)]):
            means = window_means(known, max(1, round(WINDOW_SHARE * len(known))))
            found[row] = means[-1] / means.max()
    return found


def _quality_at(values: np.ndarray, number: float, quality: np.ndarray) -> np.ndarray:
    """The quality where the signal first reaches the number, between means over windows of 5%; NaN: it never does."""
    found = np.full(len(values), np.nan)
    for row, both in enumerate(zip(values, quality, strict=True)):
        is_known = np.isfinite(both).all(axis=0)
        if not is_known.any():
            continue
        window = max(1, round(WINDOW_SHARE * int(is_known.sum())))
        signal, gold = (window_means(one[is_known], window) for one in both)
        place = int((signal >= number).argmax())
        if place:
            share = (number - signal[place - 1]) / (signal[place] - signal[place - 1])
            found[row] = gold[place - 1] + share * (gold[place] - gold[place - 1])
    return found


ENDS = "last_over_first"
FORMS = {
    "largest": Form(_largest),
    "mean": Form(_mean),
    "last": Form(_last, version=2),
    ENDS: Form(_last_over_first),
    "end_over_best": Form(_end_over_best),
    "quality_at": Form(_quality_at, takes_number=True, beside="quality"),
    "when_largest": Form(_when_largest, is_ratio=False),
    "above": Form(_above, is_ratio=False, takes_number=True),
    "rises": Form(_rises, is_ratio=False, takes_number=True),
    "spikes": Form(_spikes, is_ratio=False, takes_number=True),
}
"""By name. With a number it is written `above(grad_norm, 1)`."""


def summary_of(text: str, where: str) -> SignalSummary | None:
    """The summary that a text names; None if it is none. Raises ConfigError for a number too few or too many."""
    found = _TEXT.fullmatch(text)
    if found is None or found[1] not in FORMS:
        return None
    form = FORMS[found[1]]
    example = f"{found[1]}({found[2]}{', 1.5' if form.takes_number else ''})"
    if form.takes_number != (found[3] is not None):
        fault = "lacks its number" if form.takes_number else "takes no number"
        raise ConfigError(f"{where}={text}: {fault}; allowed: such as {example}")
    try:
        return SignalSummary(text, found[1], found[2], float(found[3] or 0))
    except ValueError:
        raise ConfigError(
            f"{where}={text}: {found[3]} is no number; allowed: such as {found[1]}({found[2]}, 1.5)"
        ) from None
