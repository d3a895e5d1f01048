"""Several signals together, each against what its last values let expect, with limits from clean runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import nan
from typing import Any

import numpy as np
import torch
from torch import Tensor

from harness.config.fields import PER_TRIAL, number
from harness.detectors.base import AFTER_THE_STEP, Detector, Values
from harness.detectors.loop_signals import PER_RATE
from harness.detectors.options import length

STEP, TREND, NEAREST, MIDDLE = "step", "trend", "nearest", "middle"
LARGEST = 1e30  # score
GROSS = 0.5  # change of a norm, in the logarithm, beyond which it is off where it has no trend to be held to


@dataclass(frozen=True)
class Options:
    """`detect.combined.*`."""

    limit: float = number(PER_TRIAL, 1.0, "multiple of the limits of clean runs that is an alarm", above=0)
    span: int = length(64, "steps of which usual deviations are taken", low=2)
    patience: int = number(PER_TRIAL, 5, "values beyond its limit in a row after which a signal begins anew", low=1)


@dataclass(frozen=True)
class Watched:
    """How a signal is judged.

    `expects`: its last value, the line through its last two, the nearest of both, or the middle of its last four.

    A deviation is about that of the logarithm. Usual is their mean over the last steps, at least `young` / n after n of
    them, and at least `least`; `limit` is the multiple of it that is an alarm.
    """

    expects: str
    limit: float
    young: float
    least: float


# From the 48,000 clean steps of study=detectors_tune, of which 17 are beyond a limit, most by the loss of batches
# of a single sequence, weighed against the recall of study=detectors. `young` keeps the first steps within them, too;
# `least` is a tenth of what is usual there.
WATCHED = {
    "loss": Watched(MIDDLE, 8.0, 0.3, 5e-3),
    "grad_norm": Watched(STEP, 20.0, 1.0, 2e-2),
    PER_RATE: Watched(STEP, 8.0, 0.3, 3e-3),
    "param_norm": Watched(TREND, 6.0, 6e-3, 1e-6),
    "second_moment_norm": Watched(STEP, 8.0, 0.5, 3e-3),
    "activation_rms": Watched(NEAREST, 9.0, 0.5, 5e-3),
    "attention_logit_max": Watched(MIDDLE, 14.0, 0.5, 7e-3),
}
LOSS, GRADIENT, UPDATE, PARAM, SECOND = range(5)  # columns; after them come layers
EXPLAINS = {
    "loss": {"grad_norm": 1 / 3, "activation_rms": 1 / 3, "attention_logit_max": 1 / 3},  # of the same batch
    "grad_norm": {PER_RATE: 1 / 3, "param_norm": 1 / 3, "second_moment_norm": 1.0},  # of the step before
    PER_RATE: {"activation_rms": 1 / 3, "attention_logit_max": 1 / 3},  # of the step before
}
"""Cause -> what follows from it, and by how much a deviation of that counts less for each usual one of its cause."""


def library(device: torch.device) -> Any:
    """What it counts with: NumPy where it can, whose operations on a few numbers take a third of torch's time.

    Both round alike but for square roots, of which torch has some on a CPU that are off by the last bit.
    """
    return np if device.type == "cpu" else torch


class Combined(Detector):
    """The largest of a deviation from what is expected over its usual size and its limit, of seven signals by layer.

    The gradient norm is judged as a multiple of the loss, an update as one of the scheduled rate. A loss that was ever
    at 0 or below has no scale: from then on it says nothing, and the gradient norm is judged by itself. What was an
    alarm enters as what was expected, and no usual deviation; a signal that was one five times in a row begins anew
    with what is there, so that a new level is not an alarm for ever. Of the weights' change, their norm and the second
    moment it is the step before that is judged. A value that is not above 0 says nothing, nor does one of a step that
    was not taken. Units are the run's own, so limits hold for other batches, recipes and rates, too.
    """

    watches = tuple(WATCHED)
    source = "ours; limits are from study=detectors_tune and study=detectors"

    def remember(self) -> None:
        self._xp = library(self.device)
        sizes = [self.like[signal].shape[1:].numel() for signal in WATCHED]
        names = [name for name, size in zip(WATCHED, sizes, strict=True) for _ in range(size)]
        rules = [WATCHED[name] for name in names]
        self._least, self._young, self._limits = (
            self._constant([getattr(rule, name) for rule in rules]) for name in ("least", "young", "limit")
        )
        self._is_trend, self._is_nearest, self._is_middle = (
            self._constant([rule.expects == kind for rule in rules]) for kind in (TREND, NEAREST, MIDDLE)
        )
        starts = [sum(sizes[:number]) for number in range(len(sizes))]
        self._layered = [
            slice(start, start + size)
            for name, start, size in zip(WATCHED, starts, sizes, strict=True)
            if self.like[name].dim() > 1 and size
        ]
        self._is_single = self._constant([self.like[name].dim() == 1 for name in names])
        self._is_after = self._constant([name in AFTER_THE_STEP for name in names])
        self._is_before = self._is_after & self._is_single
        self._explained = {
            cause: self._constant([float(shares.get(name, 0.0)) for name in names])
            for cause, shares in EXPLAINS.items()
        }
        zeros = torch.zeros(len(self.like["loss"]), len(rules), dtype=torch.float64, device=self.device)
        self._last = self._state.add(f"{self.name}_last", (zeros + torch.nan)[..., None].repeat(1, 1, 4))
        self._usual = self._state.add(f"{self.name}_usual", zeros.clone())
        self._seen = self._state.add(f"{self.name}_seen", zeros.clone())
        self._streak = self._state.add(f"{self.name}_streak", zeros.clone())
        self._is_bent = self._state.add(f"{self.name}_is_bent", zeros.bool())  # its trend ends with its last value
        self._is_signed = self._state.add(f"{self.name}_is_signed", zeros[:, 0].bool())  # its loss was at 0 or below
        self._steep = self._state.add(f"{self.name}_steep", zeros[:, 0].clone())  # deviation of the gradient before

    def _constant(self, values: Sequence[float | bool]) -> Any:
        is_flags = all(isinstance(value, bool) for value in values)
        return self._native(torch.tensor(values, dtype=torch.bool if is_flags else torch.float64, device=self.device))

    def _native(self, x: Tensor) -> Any:
        """The same memory as what `_xp` works on."""
        return x.numpy() if self._xp is np else x

    def judge(self, values: Values, is_new: Tensor) -> tuple[Tensor, Tensor]:
        """As of any detector, but where a signal of layers is not measured at a step the others are judged."""
        with np.errstate(all="ignore"):
            is_alarm, score = self._judged(values, self._native(is_new))
        return (torch.from_numpy(is_alarm), torch.from_numpy(score)) if self._xp is np else (is_alarm, score)

    def _judged(self, values: Values, is_new: Any) -> tuple[Any, Any]:
        xp, native, rows = self._xp, self._native, len(is_new)
        given = xp.concatenate([native(values[name]).reshape(rows, -1) for name in WATCHED], 1)
        x = given.astype(np.float32).astype(np.float64) if xp is np else given.float().double()
        is_here, limit = xp.isfinite(x), native(self.numbers["limit"])
        self._is_finite_before = is_new & (is_here | ~self._is_before).all(1)
        is_finite = self._is_finite_before & (is_here | ~self._is_single | self._is_before).all(1)
        for columns in self._layered:
            is_finite = is_finite & (is_here[:, columns].all(1) | xp.isnan(x[:, columns]).all(1))
        score = xp.where(is_finite, self._score(x, limit), nan)
        is_alarm = (is_new & ~is_finite) | (score > limit)
        self._note(is_finite)
        last = native(self._last.used)
        last[...] = xp.where(((is_new & ~is_finite)[:, None] & self._is_trend)[..., None], nan, last)
        return is_alarm, score

    def _score(self, x: Any, limit: Any) -> Any:
        """4 (x^1/4 - 1) of the larger of x and 1/x, x = value / expected, is next to abs(log x), up to tenfold.

        The last bits of a logarithm may depend on how many rows there are.
        """
        xp, native = self._xp, self._native
        was_signed, seen = native(self._is_signed.used), native(self._seen.used)
        is_signed = was_signed | (x[:, LOSS] <= 0)
        self._turns = is_signed & ~was_signed
        x[:, GRADIENT] /= xp.where(is_signed, 1.0, x[:, LOSS])
        x[:, LOSS] = xp.where(is_signed, nan, x[:, LOSS])
        x[:, GRADIENT] = xp.where(self._turns, nan, x[:, GRADIENT])  # it was a multiple of the loss
        last = native(self._last.used)
        one, two, three, four = (last[..., number] for number in range(4))
        is_old = self._is_after & (x == one)  # no step was taken since
        self._values = xp.where((x > 0) & ~is_old, x, nan)
        low = xp.maximum(xp.minimum(one, two), xp.minimum(three, four))
        high = xp.minimum(xp.maximum(one, two), xp.maximum(three, four))
        self._has_no_trend = self._is_trend & xp.isnan(two)
        line = one * (one / two)
        has_trend = self._is_trend & ~self._has_no_trend
        self._expected = xp.where(has_trend, line, xp.where(self._is_middle, (low + high) / 2, one))
        ratio, of_line = self._values / self._expected, self._values / line
        far, far_of_line = xp.maximum(ratio, 1 / ratio), xp.maximum(of_line, 1 / of_line)
        far = xp.where(self._is_nearest & (far_of_line < far), far_of_line, far)
        self._off = 4 * (xp.sqrt(xp.sqrt(far)) - 1)
        usual = xp.maximum(native(self._usual.used), self._young / (seen + 1))
        deviation = self._off / xp.maximum(usual, self._least)
        parts = self._unexplained(deviation) / self._limits
        parts = xp.where(self._has_no_trend, self._off / GROSS, parts)
        self._is_off = parts > limit[:, None]
        largest = xp.clip(xp.amax(xp.where(xp.isnan(parts), -1.0, parts), 1), None, LARGEST)
        return xp.where(largest < 0, nan, largest)

    def _unexplained(self, deviation: Any) -> Any:
        """What is left of deviations [R, columns] by `EXPLAINS`."""
        first = deviation[:, : UPDATE + 1]
        known = self._xp.where(self._xp.isnan(first), 0.0, first)
        steep = self._native(self._steep.used)
        causes = {"loss": known[:, LOSS], "grad_norm": steep, PER_RATE: known[:, UPDATE]}
        self._steep_now = known[:, GRADIENT]
        explained = 1.0
        for cause, shares in self._explained.items():
            explained = explained + causes[cause][:, None] * shares
        return deviation / explained

    def late(self, is_alarm: Tensor) -> Tensor:
        """Where a signal of the step before is beyond its limit, whatever those of this step are."""
        is_before = ~self._is_finite_before | (self._is_off & self._is_after).any(1)
        return is_alarm & (torch.from_numpy(is_before) if self._xp is np else is_before)

    def _note(self, where_R: Any) -> None:
        """Remember a step of these rows."""
        xp, native = self._xp, self._native
        kept = self._last, self._usual, self._seen, self._streak, self._is_bent, self._steep, self._is_signed
        last, usual, seen, runs, is_bent, steep, is_signed = (native(rows.used) for rows in kept)
        told = where_R[:, None] & ~xp.isnan(self._values)
        streak = xp.where(self._is_off, runs + 1, 0.0)
        is_over = told & (streak >= native(self.numbers["patience"])[:, None])
        runs[...] = xp.where(told, xp.where(is_over, 0.0, streak), runs)
        entered = xp.where(self._is_off & ~is_over, self._expected, self._values)[..., None]
        earlier = last[..., :-1]
        # What begins stands for what was before it, too; but of a trend nothing was.
        begins = xp.where(self._is_trend[:, None], nan, entered)
        is_new = (xp.isnan(earlier) & ~self._is_trend[:, None]) | (is_over | (self._is_trend & is_bent))[..., None]
        earlier = xp.where(is_new, begins, earlier)
        last[...] = xp.where(told[..., None], xp.concatenate([entered, earlier], -1), last)
        is_bent[...] = is_bent & ~told
        # The first change of all is the scale of what a trend may be off by, until there is something better.
        learns = told & ~self._is_off & ~xp.isnan(self._off) & (~self._has_no_trend | (seen == 0))
        seen[...] = seen + learns
        count = xp.clip(seen, 1, self.options.span)
        usual[...] = xp.where(learns, usual + (self._off - usual) / count, usual)
        steep[...] = xp.where(where_R, self._steep_now, steep)
        is_signed[...] = is_signed | self._turns  # of a step that is not judged, too, as the first
        last[:, GRADIENT] = xp.where(self._turns[:, None], nan, last[:, GRADIENT])

    def see_new_rate(self, where_R: Tensor) -> None:
        last, is_bent = self._native(self._last.used), self._native(self._is_bent.used)
        is_new = self._native(where_R)[:, None] & self._is_trend
        last[..., 1:] = self._xp.where(is_new[..., None], nan, last[..., 1:])
        is_bent[...] = is_bent | is_new

    def restart(self, where_R: Tensor) -> None:
        self._last.used.masked_fill_(where_R[:, None, None], torch.nan)
        for kept in (self._usual.used, self._seen.used, self._streak.used, self._is_bent.used):
            kept.masked_fill_(where_R[:, None], 0)
        self._steep.used.masked_fill_(where_R, 0)
