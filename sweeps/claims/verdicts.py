"""Verdicts on measured effects: from intervals, in one look or two, and over many claims at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.special import stdtr, stdtrit

CONFIRMED, REFUTED, UNDECIDED = "confirmed", "refuted", "undecided"
NOT_HERE = "not at this scale"
LOOKS = (0.005, 0.043)
"""Two-sided levels of a first look and of one at twice the seeds, together at most 5%: those of O'Brien & Fleming 1979
(0.0052 and 0.048), a little less for variances that few seeds estimate."""
CONFIDENCE = 0.95
DISCOVERIES = 0.10  # false ones among those of many claims
Claimed = Literal["below", "above", "within"]


@dataclass(frozen=True)
class JudgedEffect:
    """A verdict on one effect: its mean over pairs of seeds, and a 95% interval.

    `p` is that of the threshold against the claimed side; against the other one, where the claim is refuted.
    """

    verdict: str
    mean: float
    low: float
    high: float
    pairs: int
    p: float


def judge(low: np.ndarray, high: np.ndarray, claimed: Claimed, threshold: float, first: int) -> JudgedEffect:
    """The verdict on paired differences, of which the first look takes `first`, the second twice as many.

    Each lies between `low` and `high` [pairs], which are equal where it was measured itself, and may be infinite. The
    interval reaches from the lower end of that of `low` to the upper end of that of `high`; both are Student's t, at
    the level of the look. Confirmed: all of it lies on the claimed side of the threshold, or within its margin on both
    sides. Refuted: all of it lies on the other side, or beyond the margin. Otherwise undecided.
    """
    verdict, pairs = UNDECIDED, 0
    for look, level in enumerate(LOOKS, start=1):
        if len(low) >= (enough := look * first) > 1:
            pairs = enough
            verdict = _told(*_reach(low[:pairs], high[:pairs], 1 - level), claimed, threshold)
        if verdict != UNDECIDED:
            break
    low, high = low[: pairs or None], high[: pairs or None]
    mean = float((low + high).mean() / 2) if len(low) and np.isfinite([low, high]).all() else np.nan
    side = claimed if verdict != REFUTED or claimed == "within" else "above" if claimed == "below" else "below"
    p = _p_value(high if side == "below" else low, side, threshold)
    return JudgedEffect(verdict, mean, *_reach(low, high, CONFIDENCE), len(low), p)


def _reach(low: np.ndarray, high: np.ndarray, confidence: float) -> tuple[float, float]:
    """From the lower end of the interval of `low` to the upper one of `high`; infinite where one of theirs is."""
    ends = interval(low, confidence)[0], interval(high, confidence)[1]
    is_open = bool(np.isneginf(low).any()), bool(np.isposinf(high).any())
    return -np.inf if is_open[0] else ends[0], np.inf if is_open[1] else ends[1]


def interval(values: np.ndarray, confidence: float) -> tuple[float, float]:
    """Student's t interval of the mean of `values` [n]; NaN for fewer than two, or where one is not finite."""
    if len(values) < 2 or not np.isfinite(values).all():
        return np.nan, np.nan
    reach = stdtrit(len(values) - 1, (1 + confidence) / 2) * values.std(ddof=1) / len(values) ** 0.5
    return float(values.mean() - reach), float(values.mean() + reach)


def _told(low: float, high: float, claimed: Claimed, threshold: float) -> str:
    if np.isnan(low) or np.isnan(high):
        return UNDECIDED
    if claimed == "within":
        is_confirmed, is_refuted = -threshold < low and high < threshold, low > threshold or high < -threshold
    else:
        below, above = high < threshold, low > threshold
        is_confirmed, is_refuted = (below, above) if claimed == "below" else (above, below)
    return CONFIRMED if is_confirmed else REFUTED if is_refuted else UNDECIDED


def _p_value(values: np.ndarray, claimed: Claimed, threshold: float) -> float:
    """One-sided, of the threshold or what lies beyond it on the other side; NaN of a margin, and where unknown."""
    if claimed == "within" or len(values) < 2 or not np.isfinite(values).all():
        return np.nan
    error = values.std(ddof=1) / len(values) ** 0.5
    if not error:
        return 0.0 if (values.mean() < threshold) == (claimed == "below") and values.mean() != threshold else 1.0
    t = (values.mean() - threshold) / error
    return float(stdtr(len(values) - 1, t if claimed == "below" else -t))


def together(verdicts: Sequence[str]) -> str:
    """That of a claim from those of its cells: the one that all have, undecided where they differ."""
    decided = {verdict for verdict in verdicts if verdict != NOT_HERE}
    if not decided:
        return NOT_HERE
    return decided.pop() if len(decided) == 1 else UNDECIDED


def discoveries(p: Sequence[float]) -> list[bool]:
    """Which of many p-values are discoveries with at most 10% false ones (Benjamini & Hochberg 1995); NaN is none."""
    known = [(value, number) for number, value in enumerate(p) if value == value]
    known.sort()
    small = [rank for rank, (value, _) in enumerate(known, 1) if value <= DISCOVERIES * rank / len(known)]
    last = max(small, default=0)
    found = {number for _, number in known[:last]}
    return [number in found for number in range(len(p))]


def discovered(p: Sequence[float]) -> list[bool]:
    """`discoveries`, and what has no p-value, which is not in doubt for it."""
    return [is_found or value != value for value, is_found in zip(p, discoveries(p), strict=True)]
