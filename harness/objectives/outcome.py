"""How a single training run ended: one written criterion, the same for every trial."""

from __future__ import annotations

import numpy as np

TRAINED, DIVERGENT, NON_FINITE = "trained", "divergent", "non-finite"
WINDOW_SHARE = 0.05  # of the steps: the loss is averaged over windows of this length
LOST_SHARE = 0.5  # of what the run had learned
BEYOND = 10.0  # standard errors of a window above the best one, which is the least of many
ABOVE_FIRST = 5.0  # standard errors of a single loss above the first
BEYOND_ALL = 10.0  # times the usual size of the first losses: no noise explains that
LEAST = 10  # steps, below which nothing is known of the noise
BROKEN = 1.5  # times the usual move of a loss from one step to the next, from which on a run is not what it was
BLOCKS = 6  # windows, below which nothing is known of how they differ
MAD_TO_STD = 1.4826  # of a normal distribution


def judge(loss: np.ndarray, nonfinite_step: int | None) -> str:
    """The outcome of a run from its training loss, [steps], and the step at which it stopped being finite, if it did.

    With L_0 the loss at the first step, L_end the mean over the last 5% of the steps, L_best the smallest mean over any
    such window and s the standard error of one, a finite run is divergent if L_end > L_best + max(0.5 (L_0 - L_best),
    10 s): it ended having lost more than half of all it had ever learned, and more than its noise explains. So is a run
    that ends above the loss at initialisation by five standard errors of a single loss, and one that ends ten times the
    size of its first losses above the best, whatever its noise. Steps whose whole batch was dropped have no loss, but
    NaN; they are left out, and a run that has no others learned nothing and lost nothing: it is trained.
    """
    if nonfinite_step is not None:
        return NON_FINITE
    loss = loss[~np.isnan(loss)].astype(np.float64)
    if not len(loss):
        return TRAINED
    window = max(1, round(WINDOW_SHARE * len(loss)))
    means = np.convolve(loss, np.full(window, 1 / window), mode="valid")
    first, last, best = loss[0], means[-1], means.min()
    error = _standard_error(loss, means, window)
    if last > first + ABOVE_FIRST * window**0.5 * error:
        return DIVERGENT
    by_noise = min(BEYOND * error, BEYOND_ALL * float(np.abs(loss[: max(window, LEAST)]).mean()))
    return DIVERGENT if last > best + max(LOST_SHARE * (first - best), by_noise, 0.0) else TRAINED


def _standard_error(loss: np.ndarray, means: np.ndarray, window: int) -> float:
    """Of the mean over a window, from moves between neighbours, which know of no trend.

    Where losses move much more from step to step than they did up to the best window, the run was broken since, and
    counts only up to there. Elsewhere windows' own moves count, too, since losses that follow each other may be alike.
    """
    if len(loss) < LEAST:
        return 0.0
    well = max(int(means.argmin()) + window, 2 * window, LEAST)
    usual, before = _spread(loss), _spread(loss[:well])
    if usual > BROKEN * before:
        return before / window**0.5
    every = means[::-window]
    half = len(every) // 2
    apart = min(_spread(every[: half + 1]), _spread(every[half:])) if len(every) >= BLOCKS else 0.0
    return max(usual / window**0.5, apart)


def _spread(values: np.ndarray) -> float:
    """The standard deviation about a trend, [n], from the median of the sizes of moves."""
    return MAD_TO_STD * float(np.median(np.abs(np.diff(values)))) / 2**0.5 if len(values) > 1 else 0.0
