"""What was wrong with a run, told by written rules from what is stored: intervals of steps, each with a name.

| symptom | rule, with the names of `Rules` |
|---|---|
| non-finite | the loss or the gradient norm is NaN or infinite |
| spike | the loss rises above the usual, and is back within `lingers` steps |
| lingering | it does, and is back later, or has come down by half at the end of the run |
| divergence | it does, and has not even come down by half when the run ends, or ends in NaN |
| exploding gradients | the gradient norm is above `exploding` times its median |
| vanishing gradients | it is below `vanishing` times its median |
| oscillation | the loss turns round at each of `swings` steps, each time by more than half of `sigma` deviations |
| plateau | the loss moves by less than `slope` a step over `flat` steps |

The usual is the median of the last `before` values. A deviation is taken of the steps from one to the next, which
knows nothing of a trend: 1.4826 times the median of their sizes, over the root of 2.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import pandas as pd
import xarray as xr

from analysis.measures.detectors import carried, last_step, taken
from harness.detectors.windows import MAD_TO_STD


@dataclass(frozen=True)
class Rules:
    """Thresholds; losses in nat/token, times in steps."""

    before: int = 50  # steps before, of which the usual and a deviation are taken
    least: int = 10  # of these that there have to be
    sigma: float = 6.0  # deviations above the usual at which a loss has risen
    rise: float = 0.1  # and at least so much
    settled: float = 2.0  # deviations, or half of `rise`, within which it is back
    calm: int = 5  # steps in a row for which it has to be
    lingers: int = 50
    exploding: float = 10.0
    vanishing: float = 0.01
    swings: int = 6
    flat: int = 100
    slope: float = 1e-4


@dataclass(frozen=True)
class Symptom:
    """From the first step to the last, both included; the usual loss or norm, and the one farthest from it."""

    symptom: str
    begin: int
    end: int
    usual: float
    peak: float


def symptoms(sweep: xr.Dataset, rules: Rules = Rules()) -> pd.DataFrame:
    """A row a symptom.

    Args:
        sweep: As `analysis.open_sweep` gives it.
        rules: The limits of each symptom.

    Returns:
        Columns: `trial`, and the fields of `Symptom`.
    """
    rows = []
    losses, norms = (sweep[name].transpose("trial", "step").values for name in ("loss", "grad_norm"))
    for trial, loss, norm, is_taken in zip(sweep["trial"].values, losses, norms, taken(sweep), strict=True):
        loss, norm = (carried(values, is_taken)[: last_step(is_taken) + 1] for values in (loss, norm))
        rows += [{"trial": trial} | vars(one) for one in of_run(loss, norm, rules)]
    return pd.DataFrame(rows, columns=["trial", *Symptom.__annotations__])


def of_run(loss: np.ndarray, norm: np.ndarray, rules: Rules = Rules()) -> list[Symptom]:
    """The symptoms of one run, by their first steps; `loss` and `norm` are [steps], up to its last."""
    usual, deviation = _usual(loss, rules)
    typical, _ = _usual(norm, rules)
    is_broken = ~(np.isfinite(loss) & np.isfinite(norm))
    told = [Symptom("non-finite", begin, end, np.nan, np.nan) for begin, end in _intervals(is_broken)]
    told += _rises(loss, usual, deviation, rules)
    with np.errstate(invalid="ignore"):
        names = {"exploding gradients": norm > rules.exploding * typical}
        names["vanishing gradients"] = norm < rules.vanishing * typical
    for name, is_so in names.items():
        for begin, end in _intervals(is_so & np.isfinite(norm)):
            values = norm[begin : end + 1]
            peak = values.max() if name.startswith("exploding") else values.min()
            told.append(Symptom(name, begin, end, float(typical[begin]), float(peak)))
    told += _swings(loss, usual, deviation, rules)
    told += _plateaus(loss, rules)
    return sorted(told, key=lambda one: (one.begin, one.symptom))


def _usual(values: np.ndarray, rules: Rules) -> tuple[np.ndarray, np.ndarray]:
    """Median of the values before each step, and their deviation; NaN where there are too few."""
    series = pd.Series(np.where(np.isfinite(values), values, np.nan))
    middle = series.rolling(rules.before, min_periods=rules.least).median()
    moved = series.diff().abs().rolling(rules.before, min_periods=rules.least // 2).median()
    return middle.shift(1).to_numpy(), MAD_TO_STD / 2**0.5 * moved.shift(1).to_numpy()


def _intervals(is_so: np.ndarray) -> Iterator[tuple[int, int]]:
    """First and last step of each run of True."""
    for value, steps in groupby(range(len(is_so)), key=lambda step: bool(is_so[step])):
        if value:
            run = list(steps)
            yield run[0], run[-1]


def _rises(loss: np.ndarray, usual: np.ndarray, deviation: np.ndarray, rules: Rules) -> Iterator[Symptom]:
    """Spikes, and what becomes of them. The usual is that of the first step, as long as one lasts."""
    deviation = np.nan_to_num(deviation)
    step = 0
    while step < len(loss):
        if not loss[step] - usual[step] > max(rules.sigma * deviation[step], rules.rise):
            step += 1
            continue
        begin, level = step, float(usual[step])
        within = level + max(rules.settled * deviation[begin], rules.rise / 2)
        is_back = np.convolve(loss[begin:] <= within, np.ones(rules.calm), "valid") == rules.calm
        end = begin + int(is_back.argmax()) if is_back.any() else len(loss)
        part = loss[begin:end]
        finite = np.flatnonzero(np.isfinite(part))
        top = int(finite[part[finite].argmax()]) if len(finite) else 0
        has_halved = bool((part[top:] <= level + (part[top] - level) / 2).any())
        if end < len(loss):
            name = "spike" if end - begin <= rules.lingers else "lingering"
        elif len(finite) < len(part):
            name = "divergence"
        else:
            name = "lingering" if has_halved else "divergence"
        yield Symptom(name, begin, end - 1, level, float(part[top]))
        step = end


def _swings(loss: np.ndarray, usual: np.ndarray, deviation: np.ndarray, rules: Rules) -> Iterator[Symptom]:
    """Oscillations: steps at which the loss has turned round, each time by much."""
    with np.errstate(invalid="ignore"):
        moves = np.diff(loss)
        is_large = np.abs(moves) > np.maximum(rules.sigma / 2 * np.nan_to_num(deviation[1:]), rules.rise)
        turns = is_large[1:] & is_large[:-1] & (np.sign(moves[1:]) != np.sign(moves[:-1]))
    for begin, end in _intervals(turns):
        if end - begin + 1 >= rules.swings:
            part = loss[begin + 1 : end + 3]
            level = float(usual[begin + 1])
            yield Symptom("oscillation", begin + 1, end + 2, level, float(part[np.abs(part - level).argmax()]))


def _plateaus(loss: np.ndarray, rules: Rules) -> Iterator[Symptom]:
    """Stretches in which medians of a quarter of `flat` steps, three quarters apart, are nearly equal."""
    quarter = max(1, rules.flat // 4)
    smooth = pd.Series(loss).rolling(quarter).median().to_numpy()
    apart = rules.flat - quarter
    if len(loss) < rules.flat:
        return
    with np.errstate(invalid="ignore"):
        is_flat = np.abs(smooth[rules.flat - 1 :] - smooth[quarter - 1 : len(loss) - apart]) < rules.slope * apart
    for begin, end in _intervals(is_flat):
        part = loss[begin : end + rules.flat]
        level = float(np.median(part))
        yield Symptom("plateau", begin, end + rules.flat - 1, level, float(part[np.abs(part - level).argmax()]))
