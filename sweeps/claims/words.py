"""What is said of a claim's test, on a terminal and on pages."""

from __future__ import annotations

import math

from sweeps.claims.measured import metric_of
from sweeps.claims.registered import TrialTest
from sweeps.claims.trained import CellEffect


def compared(test: TrialTest, mark: str = "") -> str:
    """What is measured, with `mark` around each arm: `best_loss of mitigation=qk_norm less mitigation=none`."""
    arms = [f"{mark}{', '.join(arm)}{mark}" for arm in (test.of, test.against) if arm]
    kind = " over " if metric_of(test.metric).is_ratio else " less "
    each = f", for each doubling of {test.slope}" if test.slope else ""
    return f"{test.metric} of {kind.join(arms)}{each}"


def holds_if(test: TrialTest) -> str:
    """The condition: `below 0.1 nat/token`."""
    return f"{test.claimed} {test.threshold:g} {test.unit}"


def has_to_happen(test: TrialTest) -> str:
    """The control: `sensitivity of mitigation=post_ln above 0.2: post-LN has to fail`."""
    control = test.control
    arm = ", ".join(control.of or test.against or test.of)
    return f"{control.metric} of {arm} above {control.above:g}: {control.because}"


def marks(test: TrialTest) -> tuple[float, ...]:
    """Where its thresholds are on an axis of the effect."""
    if test.claimed != "within":
        return (test.threshold,)
    return (1 / test.threshold if metric_of(test.metric).is_ratio else -test.threshold, test.threshold)


def effect_words(cell: CellEffect) -> str:
    """`0.12 [0.1, 0.14]`; without a mean where an end of some seed is open."""
    judged = cell.judged
    is_rounding = abs(judged.mean) < 1e-9 * (judged.high - judged.low)  # of a difference of equal numbers
    mean = "" if math.isnan(judged.mean) else f"{0.0 if is_rounding else judged.mean:.3g} "
    return f"{mean}[{judged.low:.3g}, {judged.high:.3g}]"
