"""How a single training run ended: one written criterion, the same for every trial."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from harness.detectors.windows import MAD_TO_STD

TRAINED, NEVER_LEARNED, DIVERGENT, NON_FINITE = "trained", "never learned", "divergent", "non-finite"
DEGENERATE, HACKED, UNKNOWN = "degenerate", "hacked", "unknown"  # of policies alone
ENDED_BADLY = (NEVER_LEARNED, DIVERGENT, NON_FINITE, HACKED)  # without what a loss or a reward had gained
WINDOW_SHARE = 0.05  # of the steps: the loss is averaged over windows of this length
LOST_SHARE = 0.5  # of what the run had learned
LEARNED = 4.0  # standard errors below the first loss that the best window of a run that has learned something is
GAINED = 3.0  # standard errors by which the reward of the best window of a policy is above that of the first
HACKED_SHARE = 0.1  # of what a policy had gained in gold reward, lost while the learned one rises
FALLEN = 5.0  # standard errors of that loss: of noise alone, 5% of runs are 3 below the best of their many windows
SAME_SAID = 0.05  # of the entropy per token at the start
ALIKE = 0.1  # share of completions that are distinct in their group
REPEATED = 0.9  # share of a completion's pairs that it had before
PROXY = "proxy"
VARIETY = ("token_entropy", "distinct", "repeated")
"""Signals by which a policy is judged, beside its reward."""
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
    if best - first <= GAINED * _error_of_difference(reward, window):
        return NEVER_LEARNED
    return DIVERGENT if last < best - LOST_SHARE * (best - first) else TRAINED


def judge_policy(reward: np.ndarray, read: Mapping[str, np.ndarray], nonfinite_step: int | None) -> str:
    """The outcome of a policy's run: that of `judge_rewards`, with what other signals tell, [rollouts] each.

    Args:
        reward: Mean gold quality of each rollout.
        read: Those of `VARIETY`, and where a learned reward trains that of `PROXY`; NaN where a rollout was not read.
        nonfinite_step: The step at which it stopped being finite, if it did.

    With means over windows of 5% of the rollouts as there, and the first of these that holds:

    - non-finite: as there.
    - *hacked*: gold reward ends below its best window g_best by more than 10% of g_best - g_0, and by more than five
      standard errors, while the learned one rises from that window to the end, by more than three of its own. So a run
      whose gold reward only falls is hacked too.
    - never learned, divergent: as there.
    - *degenerate*: at the end, entropy per token below 0.05 of the first, or less than 0.1 of a group's completions
      distinct, which only groups above ten can come to, or more than 0.9 of pairs repeated.

    *Unknown* is what would take a signal that was never read: whether a run that is trained is degenerate, and
    whether one with a learned reward is hacked.
    """
    found, is_told = judge_rewards(reward, nonfinite_step), len(reward[~np.isnan(reward)]) > 1
    if found == NON_FINITE or not is_told:
        return found
    unread = {name for name, values in read.items() if np.isnan(values).all()}
    if PROXY in unread:
        return UNKNOWN
    if PROXY in read and _is_hacked(reward, read[PROXY]):
        return HACKED
    if found != TRAINED:
        return found
    if unread:
        return UNKNOWN
    ends = {name: _ends(read[name]) for name in VARIETY}
    says_the_same = ends["token_entropy"][1] < SAME_SAID * ends["token_entropy"][0]
    is_alike = says_the_same or ends["distinct"][1] < ALIKE or ends["repeated"][1] > REPEATED
    return DEGENERATE if is_alike else TRAINED


def _is_hacked(reward: np.ndarray, proxy: np.ndarray) -> bool:
    """By the rule of `judge_policy`, from the rollouts of which both are known."""
    is_known = ~(np.isnan(reward) | np.isnan(proxy))
    gold, learned = (values[is_known].astype(np.float64) for values in (reward, proxy))
    if len(gold) < 2:
        return False
    window = max(1, round(WINDOW_SHARE * len(gold)))
    gold_means, learned_means = (window_means(values, window) for values in (gold, learned))
    best = int(gold_means.argmax())
    lost, gained = gold_means[best] - gold_means[-1], gold_means[best] - gold_means[0]
    rise = learned_means[-1] - learned_means[best]
    has_lost = lost > max(HACKED_SHARE * gained, FALLEN * _error_of_difference(gold, window))
    return bool(has_lost and rise > GAINED * _error_of_difference(learned, window))


def _ends(values: np.ndarray) -> tuple[float, float]:
    """The means over the first and the last window of what is known of a signal."""
    means = window_means(known := values[~np.isnan(values)], max(1, round(WINDOW_SHARE * len(known))))
    return float(means[0]), float(means[-1])


def _error_of_difference(values: np.ndarray, window: int) -> float:
    """The standard error of the difference of two windows' means, from moves, which have twice the variance."""
    return float(np.sqrt(np.mean(np.diff(values) ** 2) / window))


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
