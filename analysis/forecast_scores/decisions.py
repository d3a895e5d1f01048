"""Which of two recipes is better: whether small models say so rightly, by size and cost; and what turns around."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from scipy.stats import false_discovery_control, kendalltau, t

from analysis.forecast_scores.scores import FLOOR, Truth
from analysis.forecasts.base import MIDDLE, Size, log_parameters
from analysis.measures.forecast_targets import TARGETS, Observations, parameters
from analysis.measures.statistics import CONFIDENCE

DRAWS = 400
FALSE = 0.10  # discoveries
LOSS = "loss"  # the target in which regret is told
DECIDED = tuple(name for name, target in TARGETS.items() if target.better)
Interval = tuple[float, float, float]  # value, low, high


@dataclass(frozen=True)
class Ranked:
    """`truth` [recipes, seeds] of one target at one size, and what was said of it: `points` [recipes]."""

    target: str
    size: Size
    recipes: tuple[str, ...]
    truth: np.ndarray
    points: np.ndarray


@dataclass(frozen=True)
class Decision:
    """How often the better of two recipes was told, over all pairs and over *resolved* ones; Kendall's tau-b; regret.

    A pair is resolved where the 95% t interval of its difference, seed by seed, has no 0 in it. `regret` is by how much
    the recipe that was said to have the lowest loss is worse than the best, nat/token; NaN without losses.
    """

    pairs: int
    resolved: int
    accuracy: Interval
    on_resolved: Interval
    tau: float
    regret: float


def ranked(truth: Truth, said: np.ndarray) -> list[Ranked]:
    """Of each size of a target of cells, from quantiles [units, levels] of its units."""
    found = []
    for (width, depth), part in truth.units.groupby(["width", "depth"]):
        places = part.index.to_numpy()
        values, points = truth.values[places], said[places, MIDDLE]
        is_known = np.isfinite(points)
        if is_known.sum() > 1:
            recipes = tuple(part["recipe"].to_numpy()[is_known])
            found.append(Ranked(truth.target, (width, depth), recipes, values[is_known], points[is_known]))
    return found


def by_size(truth: Truth, observations: Observations) -> dict[Size, list[Ranked]]:
    """The same with what each smaller size has shown itself for a forecast, by that size."""
    found: dict[Size, list[Ranked]] = {}
    if truth.target not in observations.tables:
        return found
    table = observations.tables[truth.target]
    for size in observations.sizes:
        own = table[(table["width"] == size[0]) & (table["depth"] == size[1])]
        means = own.groupby("recipe")["value"].mean()
        said = np.tile(means.reindex(truth.units["recipe"]).to_numpy()[:, None], (1, MIDDLE + 1))
        if np.isfinite(said).any():
            found[size] = ranked(truth, said)
    return found


def decision(parts: list[Ranked]) -> Decision:
    """Over several targets and sizes, with bootstrap intervals over recipes and seeds: pairs share recipes."""
    known = [(one, *_pairs(one)) for one in parts]
    right = np.concatenate([right for _, right, _, _ in known])
    is_resolved = np.concatenate([resolved for _, _, resolved, _ in known])
    taus = [_tau(one) for one in parts]
    regrets = [_regret(one) for one in parts if one.target == LOSS]
    drawn = np.array([_redrawn(known, np.random.default_rng(number)) for number in range(DRAWS)])
    return Decision(
        len(right),
        int(is_resolved.sum()),
        _interval(float(right.mean()), drawn[:, 0]),
        _interval(float(right[is_resolved].mean()) if is_resolved.any() else np.nan, drawn[:, 1]),
        _mean(taus),
        _mean(regrets),
    )


def _mean(values: list[float]) -> float:
    """Of those that are known."""
    known = [value for value in values if value == value]
    return sum(known) / len(known) if known else np.nan


def _pairs(one: Ranked) -> tuple[np.ndarray, np.ndarray, list[tuple[int, int]]]:
    """Of each pair whether it was told rightly (1/2: no difference), whether it is resolved, and which it is."""
    pairs = list(itertools.combinations(range(len(one.recipes)), 2))
    right, resolved = [], []
    for first, second in pairs:
        apart = one.truth[first] - one.truth[second]
        apart = apart[np.isfinite(apart)]
        said = np.sign(one.points[first] - one.points[second])
        right.append(0.5 if not said else float(said == np.sign(apart.mean())) if len(apart) else 0.5)
        resolved.append(is_resolved(apart))
    return np.array(right), np.array(resolved, bool), pairs


def is_resolved(apart: np.ndarray) -> bool:
    """Whether 0 is outside of the 95% t interval of the mean of differences [seeds]."""
    if len(apart) < 2:
        return False
    reach = t.ppf((1 + CONFIDENCE) / 2, len(apart) - 1) * apart.std(ddof=1) / len(apart) ** 0.5
    return bool(abs(apart.mean()) > reach)


def _redrawn(
    known: list[tuple[Ranked, np.ndarray, np.ndarray, list[tuple[int, int]]]], generator: np.random.Generator
) -> tuple[float, float]:
    """Accuracy over all and over resolved pairs in a sample of recipes and of seeds."""
    recipes = sorted({recipe for one, *_ in known for recipe in one.recipes})
    times = dict(
        zip(recipes, generator.multinomial(len(recipes), np.full(len(recipes), 1 / len(recipes))), strict=True)
    )
    which: dict[int, np.ndarray] = {}
    sums = np.zeros((2, 2))
    for one, _, resolved, pairs in known:
        seeds = one.truth.shape[1]
        picked = which.setdefault(seeds, np.asarray(generator.integers(seeds, size=seeds)))
        means = np.nanmean(one.truth[:, picked], axis=1)
        weight = np.array([times[one.recipes[i]] * times[one.recipes[j]] for i, j in pairs], float)
        first, second = np.array(pairs).T
        said, true = np.sign(one.points[first] - one.points[second]), np.sign(means[first] - means[second])
        right = np.where(said == 0, 0.5, said == true)
        sums[0] += (weight * right).sum(), weight.sum()
        sums[1] += (weight * right * resolved).sum(), (weight * resolved).sum()
    with np.errstate(invalid="ignore"):
        return tuple(sums[:, 0] / sums[:, 1])


def _interval(value: float, drawn: np.ndarray) -> Interval:
    known = drawn[np.isfinite(drawn)]
    if not len(known) or value != value:
        return value, np.nan, np.nan
    low, high = np.quantile(known, [0.025, 0.975])
    return value, float(low), float(high)


def _tau(one: Ranked) -> float:
    return float(kendalltau(one.points, np.nanmean(one.truth, axis=1), variant="b").statistic)


def _regret(one: Ranked) -> float:
    better, means = TARGETS[one.target].better, np.nanmean(one.truth, axis=1)
    chosen = int(np.argmax(better * one.points))
    return float(np.max(better * means) - better * means[chosen])


def cost_ratio(size: Size, other: Size) -> float:
    """Parameters of a size over those of another: about the cost of a step."""
    return float(parameters(*size) / parameters(*other))


# --- what turns around ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reversal:
    """Two recipes of which one is better at the smallest size and the other at the largest.

    `slope` of their difference for each decade of parameters, with its p-value; `small`, `large`: that difference at
    both ends, with 95% t intervals.
    """

    target: str
    one: str
    other: str
    slope: float
    p: float
    small: Interval
    large: Interval


def interactions(observations: Observations, target: str) -> Iterator[Reversal]:
    """Of each pair of recipes, how their difference changes with size, over all seeds and sizes."""
    table = observations.tables.get(target)
    if table is None:
        return
    wide = table.pivot_table(index=["width", "depth", "seed"], columns="recipe", values="value")
    x = log_parameters(wide.index.to_frame())
    for one, other in itertools.combinations(wide.columns, 2):
        apart = (wide[one] - wide[other]).to_numpy()
        known = np.isfinite(apart)
        if known.sum() < 4 or np.ptp(x[known]) == 0 or np.ptp(apart[known]) == 0:
            continue
        slope, p = _slope(x[known], apart[known])
        ends = [known & np.isclose(x, end) for end in (x[known].min(), x[known].max())]
        small, large = (_mean_interval(apart[end]) for end in ends)
        yield Reversal(target, one, other, slope, p, small, large)


def reversals(observations: Observations, target: str) -> list[Reversal]:
    """Those whose slope is a discovery among all pairs (Benjamini and Hochberg 1995), with both ends sure."""
    found = list(interactions(observations, target))
    if not found:
        return []
    is_found = false_discovery_control([one.p for one in found]) <= FALSE
    return [one for one, is_one in zip(found, is_found, strict=True) if is_one and turns(one)]


def turns(one: Reversal) -> bool:
    """Whether the intervals of both ends are on either side of 0."""
    return one.small[1] * one.small[2] > 0 and one.large[1] * one.large[2] > 0 and one.small[0] * one.large[0] < 0


def _slope(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Of the least-squares line, and its p-value (t test)."""
    centred = x - x.mean()
    slope = float((centred * y).sum() / (centred**2).sum())
    left = y - y.mean() - slope * centred
    freedom = len(x) - 2
    error = np.sqrt((left**2).sum() / freedom / (centred**2).sum())
    return slope, float(2 * t.sf(abs(slope) / error, freedom)) if error else 0.0


def _mean_interval(values: np.ndarray) -> Interval:
    mean = float(values.mean())
    if len(values) < 2:
        return mean, np.nan, np.nan
    reach = float(t.ppf((1 + CONFIDENCE) / 2, len(values) - 1) * values.std(ddof=1) / len(values) ** 0.5)
    return mean, mean - reach, mean + reach


def of_forecasters(said: Mapping[str, Mapping[str, np.ndarray]], truth: Mapping[str, Truth]) -> dict[str, list[Ranked]]:
    """By forecaster what it said of all targets of which more or less is better; the floor is not among them."""
    found: dict[str, list[Ranked]] = {}
    for target in DECIDED:
        if target in truth:
            for name, quantiles in said[target].items():
                if name != FLOOR:
                    found.setdefault(name, []).extend(ranked(truth[target], quantiles))
    return found
