"""Margins of safety: how often a recipe fails without one of its parts, without two, and which of them matter most.

The trials are those of a leave-k-out study, such as `study=margins`: each part of a recipe is in or out, and is in for
most of them. Parts that are always out together, such as two keys of one format, are one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

import numpy as np
import pandas as pd
import xarray as xr
from scipy.stats import false_discovery_control

from analysis.measures.metrics import trial_table
from analysis.measures.statistics import bootstrap, draws, wilson_interval
from analysis.reading.groups import is_seed
from harness.config import ConfigError
from harness.objectives.outcome import TRAINED

WORSE = 0.1  # nat/token above the whole recipe, from which a run counts as failed
FEWEST = 2  # parts
Statistic = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class FailureEstimate:
    """A number with its 95% interval over seeds: Wilson's of a set's share, and of all else a bootstrap."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Margins:
    """`failed` [sets of parts left out, seeds]: the share of the stresses under which a seed's run failed.

    `sets[0]` is the whole recipe; the others are each part alone, then pairs, then whatever else there is.
    """

    parts: tuple[str, ...]
    sets: tuple[frozenset[str], ...]
    failed: np.ndarray
    stresses: int

    @cached_property
    def _place(self) -> dict[frozenset[str], int]:
        return {left_out: place for place, left_out in enumerate(self.sets)}

    @cached_property
    def pairs(self) -> list[tuple[str, str]]:
        """Those of which both parts and the pair were left out."""
        return [pair for pair in combinations(self.parts, 2) if frozenset(pair) in self._place]

    def _of(self, values: np.ndarray, *names: str) -> np.ndarray:
        """The share of failures without these parts, of values [sets, ..., seeds]."""
        share: np.ndarray = values[self._place[frozenset(names)]].mean(-1)
        return share

    def _estimated(self, statistic: Statistic) -> FailureEstimate:
        low, high = bootstrap(self.failed, statistic, interpolated=True)
        return FailureEstimate(float(statistic(self.failed)), low, high)

    def share(self, *names: str) -> FailureEstimate:
        """How often it fails without these parts. Wilson's interval, for where all seeds agree a bootstrap has none."""
        mean, seeds = float(self._of(self.failed, *names)), self.failed.shape[-1]
        low, high = wilson_interval(mean * seeds, seeds)
        return FailureEstimate(mean, float(low), float(high))

    def share_of(self, size: int) -> FailureEstimate:
        """How often it fails with so many parts left out, over all such sets."""
        places = [place for place, left_out in enumerate(self.sets) if len(left_out) == size]
        return self._estimated(lambda values: values[places].mean((0, -1)))

    def _excess(self, values: np.ndarray, one: str, other: str) -> np.ndarray:
        sound = 1 - self._of(values)  # of the whole recipe; what fails anyway fails without parts, too
        both = (1 - self._of(values, one)) * (1 - self._of(values, other))
        expected = np.clip(1 - both / np.maximum(sound, np.finfo(float).tiny), 0, 1)
        return np.asarray(self._of(values, one, other) - np.where(sound > 0, expected, 1.0))

    def excess(self, one: str, other: str) -> FailureEstimate:
        """By how much it fails more often without both than if each broke it by itself, independently.

        Then 1 - P(both out) = (1 - P(one out)) (1 - P(other out)) / (1 - P(none out)).
        """
        return self._estimated(lambda values: self._excess(values, one, other))

    @cached_property
    def discoveries(self) -> dict[tuple[str, str], bool]:
        """Whether a pair's excess is above 0, at 10% false discoveries (Benjamini & Hochberg 1995) of all pairs.

        Its p-value is the share of bootstrap samples in which it is not, and at least that of a sign test of n seeds
        that all agree, 2^-n: of few seeds a bootstrap thinks too well.
        """
        (which,) = draws((self.failed.shape[-1],))
        drawn = self.failed[..., which]
        below = [1 + int((self._excess(drawn, *pair) <= 0).sum()) for pair in self.pairs]
        if not below:
            return {}
        p = np.maximum(np.array(below) / (1 + len(which)), 2.0 ** -self.failed.shape[-1])
        found = false_discovery_control(p) <= 0.10
        return dict(zip(self.pairs, map(bool, found), strict=True))

    def importance(self, name: str) -> FailureEstimate:
        """What leaving out a part adds to the share of failures, as the first that is left out or the second.

        It is the mean of what it adds to the whole recipe, and of what it adds without another part, on average over
        those: with all pairs a semivalue (Dubey, Neyman and Weber 1981, doi 10.1287/moor.6.1.122), and with two parts
        Shapley's. With more Shapley's needs sets of three and more as well; where singles break the recipe already, a
        model of second order does not tell these, and its values do not add up to the share that fails without any.
        """
        others = [other for pair in self.pairs if name in pair for other in pair if other != name]

        def value(values: np.ndarray) -> np.ndarray:
            first = self._of(values, name) - self._of(values)
            if not others:
                return np.asarray(first)
            second = sum(self._of(values, name, other) - self._of(values, other) for other in others)
            return np.asarray((first + second / len(others)) / 2)

        return self._estimated(value)


def margins(sweep: xr.Dataset, worse: float = WORSE) -> Margins:
    """Of the finished trials of a leave-k-out study.

    A trial has failed if it did not train, or ended with a loss more than `worse` above that of the whole recipe with
    the same seed under the same stress; stresses are all that varies beside parts and seeds, such as faults. Sets that
    lack a trial for some seed and stress are left out. Raises ConfigError for a sweep that is no such study.
    """
    table = trial_table(sweep)
    table = table[table["complete"] & table["capped_loss"].notna()]
    keys = _left_out(sweep, table)
    out = {" and ".join(together): is_out for together, is_out in keys.items()}
    rest = [name for name in _varied(sweep, table) if not any(name in together for together in keys)]
    sets = [frozenset(name for name in out if out[name][row]) for row in range(len(table))]
    stresses = table[rest].apply(_words).agg(" ".join, axis=1) if rest else pd.Series("", index=table.index)
    columns = {"sets": sets, "seed": table["seed"].to_numpy(), "stress": stresses.to_numpy()}
    rows = pd.DataFrame(columns | {"loss": table["capped_loss"].to_numpy()})
    rows["lost"] = table["outcome"].to_numpy() != TRAINED
    whole = rows[rows["sets"] == frozenset()].groupby(["seed", "stress"])["loss"].mean().rename("whole")
    if whole.empty:
        raise ConfigError("the sweep has no trial of the whole recipe; allowed: one such as study=margins")
    rows = rows.join(whole, on=["seed", "stress"]).dropna(subset="whole")
    rows["failed"] = (rows["lost"] | (rows["loss"] > rows["whole"] + worse)).astype(float)
    wide = rows.pivot_table(index="sets", columns=["seed", "stress"], values="failed", aggfunc="mean").dropna()
    names = tuple(name for name in out if frozenset([name]) in wide.index)
    kept = [left_out for left_out in wide.index if left_out <= set(names)]
    kept.sort(key=lambda left_out: (len(left_out), sorted(map(list(out).index, left_out))))
    failed = wide.loc[kept].T.groupby(level="seed").mean().T.to_numpy()
    return Margins(names, tuple(kept), failed, int(rows["stress"].nunique()))


def _varied(sweep: xr.Dataset, table: pd.DataFrame) -> Sequence[str]:
    """The keys that the sweep has varied beside seeds."""
    paths = {name: sweep[name].attrs.get("path") for name in table.columns if name in sweep.coords}
    return [name for name, path in paths.items() if path and not is_seed(path) and _words(table[name]).nunique() > 1]


def _words(values: pd.Series) -> pd.Series:
    """A text for each value, because null is one."""
    return values.map(repr)


def _left_out(sweep: xr.Dataset, table: pd.DataFrame) -> dict[tuple[str, ...], np.ndarray]:
    """By part, as its keys, the trials [trial] in which it is out: it has one of two values, and not the usual one."""
    found: dict[bytes, tuple[list[str], np.ndarray]] = {}
    for name in _varied(sweep, table):
        values = _words(table[name])
        counts = values.value_counts()
        if len(counts) == 2 and counts.iloc[0] > counts.iloc[1] and not name.startswith("fault"):
            is_out = (values == counts.index[1]).to_numpy()
            found.setdefault(is_out.tobytes(), ([], is_out))[0].append(name)
    if len(found) < FEWEST:
        allowed = f"{FEWEST} at least that have two values each, one of them in most trials, as in study=margins"
        raise ConfigError(f"the sweep varies {len(found)} parts of a recipe; allowed: {allowed}")
    return {tuple(names): is_out for names, is_out in found.values()}
