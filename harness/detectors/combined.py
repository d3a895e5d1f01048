"""Several signals together, each against what its last values let expect, with limits from clean runs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from harness.config.fields import PER_TRIAL, STRUCTURAL, number
from harness.detectors.base import AFTER_THE_STEP, Detector, Values
from harness.detectors.loop_signals import PER_RATE

STEP, TREND, NEAREST, MIDDLE = "step", "trend", "nearest", "middle"
LARGEST = 1e30  # score
GROSS = 0.5  # change of a norm, in the logarithm, beyond which it is off where it has no trend to be held to


@dataclass(frozen=True)
class Options:
    """`detect.combined.*`."""

    limit: float = number(PER_TRIAL, 1.0, "multiple of the limits of clean runs that is an alarm", above=0)
    span: int = number(STRUCTURAL, 64, "steps of which usual deviations are taken", low=2, high=10_000)
    patience: int = number(PER_TRIAL, 5, "values beyond its limit in a row after which a signal begins anew", low=1)


@dataclass(frozen=True)
class Watched:
    """How a signal is judged. `expects`: its last value, the line through its last two, the nearest of both, or the
    middle of its last four.

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
        sizes = [self.like[signal].shape[1:].numel() for signal in WATCHED]
        rules = [rule for rule, size in zip(WATCHED.values(), sizes, strict=True) for _ in range(size)]
        self._least, self._young, self._limits = (
            torch.tensor([getattr(rule, name) for rule in rules], dtype=torch.float64, device=self.device)
            for name in ("least", "young", "limit")
        )
        self._is_trend, self._is_nearest, self._is_middle = (
            torch.tensor([rule.expects == kind for rule in rules], device=self.device)
            for kind in (TREND, NEAREST, MIDDLE)
        )
        starts = [sum(sizes[:number]) for number in range(len(sizes))]
        is_single = [self.like[name].dim() == 1 for name, size in zip(WATCHED, sizes, strict=True) for _ in range(size)]
        self._is_single = torch.tensor(is_single, device=self.device)
        self._layered = [
            slice(start, start + size)
            for name, start, size in zip(WATCHED, starts, sizes, strict=True)
            if self.like[name].dim() > 1 and size
        ]
        is_after = [name in AFTER_THE_STEP for name, size in zip(WATCHED, sizes, strict=True) for _ in range(size)]
        self._is_after = torch.tensor(is_after, device=self.device)
        self._is_before = self._is_after & self._is_single
        columns = [name for name, size in zip(WATCHED, sizes, strict=True) for _ in range(size)]
        self._explained = {
            cause: torch.tensor([shares.get(name, 0.0) for name in columns], dtype=torch.float64, device=self.device)
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

    def judge(self, values: Values, is_new: Tensor) -> tuple[Tensor, Tensor]:
        """As of any detector, but where a signal of layers is not measured at a step the others are judged."""
        rows = len(values["loss"])
        x = torch.cat([values[name].reshape(rows, -1) for name in WATCHED], 1).float().double()
        is_here = x.isfinite()
        self._is_finite_before = is_new & (is_here | ~self._is_before).all(1)
        is_finite = self._is_finite_before & (is_here | ~self._is_single | self._is_before).all(1)
        for columns in self._layered:
            is_finite = is_finite & (is_here[:, columns].all(1) | x[:, columns].isnan().all(1))
        score, limit = self.score({"all": x})
        score = torch.where(is_finite, score, torch.nan)
        is_alarm = (is_new & ~is_finite) | (score > limit)
        self.note({}, is_finite, is_alarm)
        self._last.used.masked_fill_(((is_new & ~is_finite)[:, None] & self._is_trend)[..., None], torch.nan)
        return is_alarm, score

    def score(self, values: Values) -> tuple[Tensor, Tensor]:
        """4 (x^1/4 - 1) of the larger of x and 1/x, x = value / expected, is next to abs(log x), up to tenfold.

        The last bits of a logarithm may depend on how many rows there are.
        """
        x = values["all"]
        is_signed = self._is_signed.used | (x[:, LOSS] <= 0)
        self._turns = is_signed & ~self._is_signed.used
        x[:, GRADIENT] /= torch.where(is_signed, 1.0, x[:, LOSS])
        x[:, LOSS] = torch.where(is_signed, torch.nan, x[:, LOSS])
        x[:, GRADIENT] = torch.where(self._turns, torch.nan, x[:, GRADIENT])  # it was a multiple of the loss
        one, two, three, four = self._last.used.unbind(-1)
        is_old = self._is_after & (x == one)  # no step was taken since
        self._values = torch.where((x > 0) & ~is_old, x, torch.nan)
        low = torch.maximum(torch.minimum(one, two), torch.minimum(three, four))
        high = torch.minimum(torch.maximum(one, two), torch.maximum(three, four))
        self._has_no_trend = self._is_trend & two.isnan()
        line = one * (one / two)
        has_trend = self._is_trend & ~self._has_no_trend
        self._expected = torch.where(has_trend, line, torch.where(self._is_middle, (low + high) / 2, one))
        ratio, of_line = self._values / self._expected, self._values / line
        far, far_of_line = torch.maximum(ratio, 1 / ratio), torch.maximum(of_line, 1 / of_line)
        far = torch.where(self._is_nearest & (far_of_line < far), far_of_line, far)
        self._off = 4 * (far.sqrt().sqrt() - 1)
        usual = torch.maximum(self._usual.used, self._young / (self._seen.used + 1))
        deviation = self._off / torch.maximum(usual, self._least)
        parts = self._unexplained(deviation) / self._limits
        parts = torch.where(self._has_no_trend, self._off / GROSS, parts)
        self._is_off = parts > self.numbers["limit"][:, None]
        largest = torch.where(parts.isnan(), -1.0, parts).amax(1).clamp(max=LARGEST)
        return torch.where(largest < 0, torch.nan, largest), self.numbers["limit"]

    def _unexplained(self, deviation: Tensor) -> Tensor:
        """What is left of deviations [R, columns] by `EXPLAINS`."""
        known = torch.where(deviation[:, : UPDATE + 1].isnan(), 0.0, deviation[:, : UPDATE + 1])
        causes = {"loss": known[:, LOSS], "grad_norm": self._steep.used, PER_RATE: known[:, UPDATE]}
        self._steep_now = known[:, GRADIENT]
        explained = torch.ones_like(deviation)
        for cause, shares in self._explained.items():
            explained = explained + causes[cause][:, None] * shares
        return deviation / explained

    def late(self, is_alarm: Tensor) -> Tensor:
        """Where a signal of the step before is beyond its limit, whatever those of this step are."""
        return is_alarm & (~self._is_finite_before | (self._is_off & self._is_after).any(1))

    def note(self, values: Values, where_R: Tensor, is_alarm: Tensor) -> None:
        last, usual, seen = self._last.used, self._usual.used, self._seen.used
        told = where_R[:, None] & ~self._values.isnan()
        streak = torch.where(self._is_off, self._streak.used + 1, 0.0)
        is_over = told & (streak >= self.numbers["patience"][:, None])
        self._streak.used.copy_(torch.where(told, torch.where(is_over, 0.0, streak), self._streak.used))
        entered = torch.where(self._is_off & ~is_over, self._expected, self._values)[..., None]
        earlier = last[..., :-1]
        # What begins stands for what was before it, too; but of a trend nothing was.
        begins = torch.where(self._is_trend[:, None], torch.nan, entered)
        is_bent = self._is_trend & self._is_bent.used
        earlier = torch.where(
            (earlier.isnan() & ~self._is_trend[:, None]) | (is_over | is_bent)[..., None], begins, earlier
        )
        last.copy_(torch.where(told[..., None], torch.cat([entered, earlier], -1), last))
        self._is_bent.used.masked_fill_(told, False)
        # The first change of all is the scale of what a trend may be off by, until there is something better.
        learns = told & ~self._is_off & ~self._off.isnan() & (~self._has_no_trend | (seen == 0))
        seen.add_(learns)
        count = seen.clamp(min=1, max=self.options.span)
        usual.copy_(torch.where(learns, usual + (self._off - usual) / count, usual))
        self._steep.used.copy_(torch.where(where_R, self._steep_now, self._steep.used))
        self._is_signed.used.logical_or_(self._turns)  # of a step that is not judged, too, as the first
        last[:, GRADIENT].masked_fill_(self._turns[:, None], torch.nan)

    def see_new_rate(self, where_R: Tensor) -> None:
        is_bent = where_R[:, None] & self._is_trend
        self._last.used[..., 1:].masked_fill_(is_bent[..., None], torch.nan)
        self._is_bent.used.logical_or_(is_bent)

    def restart(self, where_R: Tensor) -> None:
        self._last.used.masked_fill_(where_R[:, None, None], torch.nan)
        for kept in (self._usual.used, self._seen.used, self._streak.used, self._is_bent.used):
            kept.masked_fill_(where_R[:, None], 0)
        self._steep.used.masked_fill_(where_R, 0)
