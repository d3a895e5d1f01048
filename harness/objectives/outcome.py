"""How a single training run ended: one written criterion, the same for every trial."""

from __future__ import annotations

import numpy as np

TRAINED, DIVERGENT, NON_FINITE = "trained", "divergent", "non-finite"
WINDOW_SHARE = 0.05  # of the steps: the loss is averaged over windows of this length
LOST_SHARE = 0.5  # of what the run had learned


def judge(loss: np.ndarray, nonfinite_step: int | None) -> str:
    """The outcome of a run from its training loss, [steps], and the step at which it stopped being finite, if it did.

    With L_0 the loss at the first step, L_end the mean over the last 5% of the steps and L_best the smallest mean over
    any such window (or L_0, if smaller), a finite run is divergent if L_end > L_best + 0.5 (L_0 - L_best): it ended
    having lost more than half of all it had ever learned. A run that never learns anything is divergent as well
    once it ends above the loss at initialisation. Steps whose whole batch was dropped have no loss, but NaN; they are
    left out, and a run that has no others learned nothing and lost nothing: it is trained.
    """
    if nonfinite_step is not None:
        return NON_FINITE
    loss = loss[~np.isnan(loss)]
    if not len(loss):
        return TRAINED
    window = max(1, round(WINDOW_SHARE * len(loss)))
    means = np.convolve(loss, np.full(window, 1 / window), mode="valid")
    first, last, best = loss[0], means[-1], min(loss[0], means.min())
    return DIVERGENT if last > best + LOST_SHARE * (first - best) else TRAINED
