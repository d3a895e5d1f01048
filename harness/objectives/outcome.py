"""How a single training run ended: one written criterion, the same for every trial."""

from __future__ import annotations

import numpy as np

from harness.detectors.windows import MAD_TO_STD

TRAINED, NEVER_LEARNED, DIVERGENT, NON_FINITE = "trained", "never learned", "divergent", "non-finite"
ENDED_BADLY = (NEVER_LEARNED, DIVERGENT, NON_FINITE)
TRAINING_LOSS = ("training loss", "nat/token")  # what the loss of a run is, and its unit; "1" for none
LOSSES = {"policy": ("minus the mean quality", "1")}  # the same of objectives by name, where it is another
WINDOW_SHARE = 0.05  # of the steps: the loss is averaged over windows of this length
LOST_SHARE = 0.5  # of what the run had learned
LEARNED = 4.0  # standard errors below the first loss that the best window of a run that has learned something is
GAINED = 3.0  # standard errors by which the reward of the best window of a policy is above that of the first
BEYOND = 10.0  # standard errors of a window above the best one, which is the least of many
ABOVE_FIRST = 5.0  # standard errors of a single loss above the first
IN_LOGARITHMS = 8.0  # deviations of its logarithm
BEYOND_ALL = 10.0  # times the usual size of the first losses: no noise explains that
LEAST = 10  # steps, below which nothing is known of the noise
BROKEN = 1.5  # times the usual move of a loss from one step to the next, from which on a run is not what it was
BLOCKS = 6  # windows, below which nothing is known of how they differ


def judge(loss: np.ndarray, nonfinite_step: int | None, is_untrained: bool = True) -> str:
    """The outcome of a run from its training loss, [steps], and the step at which it stopped being finite, if it did.

    With L_0 the loss at the first step, L_end the mean over the last 5% of the steps and L_best the smallest mean over
    any such window, a finite run is divergent if L_end > L_best + 0.5 (L_0 - L_best): it ended having lost more than
    half of all it had ever learned. Such a run has *never learned* where L_best is not below L_0 by four standard
    errors of their difference, and L_end at most 1.5 L_0.

    L_0 is known almost without noise where the model begins `is_untrained`. Elsewhere the model may have little left to
    learn, and L_0 is one batch's: then L_end has to be above L_best by ten standard errors of a window, too, or above
    L_0 by five of a single loss, or by eight of its logarithm, since what explodes is as noisy as it is large; or it is
    above L_best by ten times the size of the first losses.

    Steps whose whole batch was dropped have no loss, but NaN; they are left out, and a run that has no others learned
    nothing and lost nothing: it is trained.
    """
    if nonfinite_step is not None:
        return NON_FINITE
    loss = loss[~np.isnan(loss)].astype(np.float64)
    if not len(loss):
        return TRAINED
    window = max(1, round(WINDOW_SHARE * len(loss)))
    means = window_means(loss, window)
    first, last, best = loss[0], means[-1], means.min()
    if is_untrained or len(loss) < LEAST:
        best = min(first, best)
        if last <= best + LOST_SHARE * (first - best):
            return TRAINED
        error = (1 + window) ** 0.5 * _standard_error(loss, means, window)  # of the difference to a single loss
        has_learned = first - best > LEARNED * error
        is_near = last <= first + LOST_SHARE * abs(first)
        return NEVER_LEARNED if is_untrained and is_near and not has_learned else DIVERGENT
    error = _standard_error(loss, means, window)
    has_exploded = loss.min() > 0 and np.log(last / first) > IN_LOGARITHMS * _spread(np.log(loss))
    if has_exploded or last > first + ABOVE_FIRST * window**0.5 * error:
        return DIVERGENT
    by_noise = min(BEYOND * error, BEYOND_ALL * float(np.abs(loss[: max(window, LEAST)]).mean()))
    return DIVERGENT if last > best + max(LOST_SHARE * (first - best), by_noise) else TRAINED


def judge_rewards(reward: np.ndarray, nonfinite_step: int | None) -> str:
    """The outcome of a policy's run from the mean quality of each rollout, [rollouts], by the rule below.

    With g_0, g_end and g_best the mean over the first 5% of the rollouts, the last 5%, and the largest such mean, a
    finite run has *never learned* where g_best - g_0 is at most three standard errors of their difference. Otherwise it
    is divergent, which is a policy that has collapsed, if g_end < g_best - 0.5 (g_best - g_0).
    """
    if nonfinite_step is not None:
        return NON_FINITE
    reward = reward[~np.isnan(reward)].astype(np.float64)
    if len(reward) < 2:
        return TRAINED
    window = max(1, round(WINDOW_SHARE * len(reward)))
    means = window_means(reward, window)
    first, last, best = means[0], means[-1], means.max()
    error = float(np.sqrt(np.mean(np.diff(reward) ** 2) / window))  # moves have twice the variance, as differences do
    if best - first <= GAINED * error:
        return NEVER_LEARNED
    return DIVERGENT if last < best - LOST_SHARE * (best - first) else TRAINED


def window_means(values: np.ndarray, window: int) -> np.ndarray:
    """The mean over each window of [n] values, [n - window + 1]."""
    return np.convolve(values, np.full(window, 1 / window), mode="valid")


def _standard_error(loss: np.ndarray, means: np.ndarray, window: int) -> float:
    """Of the mean over a window, from moves between neighbours, which know of no trend.

    Where losses move much more from step to step than they did up to the best window, the run was broken since, and
    counts only up to there. Elsewhere windows' own moves count, too, since losses that follow each other may be alike.
    """
    well = max(int(means.argmin()) + window, 2 * window, LEAST)
    usual, before = _spread(loss), _spread(loss[:well])
    if usual > BROKEN * before:
        return float(before / window**0.5)
    every = means[::-window]
    half = len(every) // 2
    apart = min(_spread(every[: half + 1]), _spread(every[half:])) if len(every) >= BLOCKS else 0.0
    return float(max(usual / window**0.5, apart))


def _spread(values: np.ndarray) -> float:
    """The standard deviation about a trend, [n], from the median of the sizes of moves."""
    return MAD_TO_STD * float(np.median(np.abs(np.diff(values)))) / 2**0.5 if len(values) > 1 else 0.0
