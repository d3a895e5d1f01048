"""What every detector shares: what it is shown, what it remembers, and what it says of each row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from harness.detectors.loop_signals import PER_RATE, UPDATE
from harness.detectors.windows import Window
from harness.model.state import Rows, State
from harness.readings.table import OF_STEPS, READ_BY

AFTER_THE_STEP = frozenset({UPDATE, PER_RATE, "param_norm", "second_moment_norm"}) | OF_STEPS
"""Signals that are known when a step is over: they are judged at the next."""

LOW = 2.0  # score of what is below a floor
Values = Mapping[str, Tensor]  # of the signals that a detector watches: [R], [R, layers], ...; float64


class Detector:
    """Base of the detectors: one for all rows that ask for it, which is shown each step of each of them, in order.

    A value that is not finite is an alarm of every detector that watches it, and none remembers it. Nor does one
    remember what it took for an alarm, unless the published rule does (`learns_alarms`). Of layers, and of what is read
    now and then (harness/readings/), NaN in all of it says that nothing was measured at this step: then it is silent.
    Values are those that the store holds, float32, so what is stored gives the same alarms bit for bit.
    """

    watches: ClassVar[Sequence[str]] = ("loss",)  # signals of the store
    learns_alarms: ClassVar[bool] = False
    is_at_limit: ClassVar[bool] = False  # a score at the limit is an alarm, too
    least_ranks: ClassVar[int] = 1  # data-parallel ranks without which it has nothing to say
    source: ClassVar[str] = ""  # whose rule it is
    reach: ClassVar[Mapping[str, Any]] = {}  # options with which 3 to 8 is an alarm, where its own are wider
    blind: ClassVar[str] = ""  # why it sees no such jump whatever its options
    keeps: ClassVar[str] = ""  # why a row that begins anew keeps what it has remembered
    of_zero: ClassVar[str] = ""  # why any value above 0 is an alarm, a steady one too
    falling: ClassVar[str] = ""  # why a loss that falls as every loss does is an alarm

    def __init__(
        self,
        name: str,
        options: Sequence[Any],
        like: Values,
        state: State,
        there: Mapping[str, Sequence[bool]] | None = None,
    ):
        """`options` of each row; `like` has values of the shapes that `judge` will be shown.

        `there` says of signals that some layers of a model lack which layers have them; the others are not looked at.
        """
        self.name, self._state = name, state
        self.like = {signal: like[signal].double() for signal in self.watches}
        self._there: dict[str, Tensor] = {}
        for signal, of_layers in (there or {}).items():
            if signal in self.like and not all(of_layers):
                numbers = [number for number, is_there in enumerate(of_layers) if is_there]
                self._there[signal] = torch.tensor(numbers, device=self.like[signal].device)
                self.like[signal] = self.like[signal][:, self._there[signal]]
        self.device = like[self.watches[0]].device
        self.bind(options)
        self.remember()

    def bind(self, options: Sequence[Any]) -> None:
        """Work on the rows in use from now on, which have these options; None each: it has no `Options`."""
        self.options, self.numbers = options[0], {}
        for field in vars(self.options) if self.options else ():
            numbers = [getattr(one, field) for one in options]
            if all(isinstance(number, int | float) for number in numbers):
                self.numbers[field] = torch.tensor(numbers, dtype=torch.float64, device=self.device)

    def number(self, name: str, value: float = 0.0) -> Rows:
        """A number of each row to remember, [R], float64."""
        rows = len(self.like[self.watches[0]])
        numbers = torch.full((rows,), value, dtype=torch.float64, device=self.device)
        return self._state.add(f"{self.name}_{name}", numbers)

    def window(self, signal: str, length: int) -> Window:
        """The last values of a signal to remember."""
        return Window(self._state, f"{self.name}_{signal}", self.like[signal], length)

    def late(self, is_alarm: Tensor) -> Tensor:
        """Which of the alarms of the step that it judged last are of signals of the step before, [R].

        A loss beside such signals is watched for being finite alone.
        """
        others = [signal for signal in self.watches if signal != "loss"]
        if not others or not AFTER_THE_STEP.issuperset(others):
            return torch.zeros_like(is_alarm)
        return is_alarm & self._is_loss_finite

    def remember(self) -> None:
        """Make what it remembers, with `window` and `number`."""

    def score(self, values: Values) -> tuple[Tensor, Tensor]:
        """What it judges, and the limit above which that is an alarm: [R] each; NaN where it is silent."""
        raise NotImplementedError

    def learn(self, values: Values, where_R: Tensor) -> None:
        """Remember a step of these rows as what is usual."""

    def note(self, values: Values, where_R: Tensor, is_alarm: Tensor) -> None:
        """What follows from a step of these rows, [R] each: by default it is learned, if it may be."""
        self.learn(values, where_R & (~is_alarm | self.learns_alarms))

    def restart(self, where_R: Tensor) -> None:
        """These rows begin anew: they went back, and what was before is no measure of what comes."""

    def see_new_rate(self, where_R: Tensor) -> None:
        """The step before had another scheduled learning rate in these rows: a trend over both is none."""

    def judge(self, values: Values, is_new: Tensor) -> tuple[Tensor, Tensor]:
        """A step: whether it is an alarm, and its score, [R] each; False and NaN in rows that take none (`is_new`)."""
        shown = {name: values[name].float().double() for name in self.watches if name in values}
        shown |= {name: shown[name][:, there] for name, there in self._there.items() if name in shown}
        is_finite, is_measured = is_new, is_new
        self._is_loss_finite = shown["loss"].isfinite() if "loss" in shown else is_new
        for name, x in shown.items():
            if x.dim() > 1 or name in READ_BY:
                flat = x.reshape(len(x), -1)
                is_missing = flat.isnan().all(1)
                is_finite, is_measured = is_finite & (flat.isfinite().all(1) | is_missing), is_measured & ~is_missing
            else:
                is_finite = is_finite & x.isfinite()
        if len(shown) < len(self.watches):  # not read in any row: the same as NaN in all of it, for less
            return is_new & ~is_finite, torch.full(is_new.shape, torch.nan, dtype=torch.float64, device=self.device)
        score, limit = self.score(shown)
        score = torch.where(is_finite & is_measured, score, torch.nan)
        is_alarm = (is_new & ~is_finite) | (score >= limit if self.is_at_limit else score > limit)
        self.note(shown, is_finite & is_measured, is_alarm)
        return is_alarm, score


class Windowed(Detector):
    """A detector that looks at the last `options.window` values of signals."""

    windowed: ClassVar[Sequence[str]] = ()  # which; of all that it watches where there are none

    def remember(self) -> None:
        signals = self.windowed or self.watches
        self.windows = {signal: self.window(signal, self.options.window) for signal in signals}

    def learn(self, values: Values, where_R: Tensor) -> None:
        for signal, window in self.windows.items():
            window.add(values[signal], where_R)

    def restart(self, where_R: Tensor) -> None:
        for window in self.windows.values():
            window.restart(where_R)

    def heard(self, least: int, score: Tensor) -> Tensor:
        """The score where the window has `least` values, and else NaN."""
        count = next(iter(self.windows.values())).count
        return torch.where(count >= least, score, torch.nan)


class Collapse(Windowed):
    """Median of the last readings of a layer over `options.fall` times the reading; 2 where that is below `floor`.

    The one signal that is `windowed` is [R, layers] or [R]. The score is that of the worst layer, with its limit at 1.
    Silent until half of the window is filled, but for the floor. What was an alarm is learned.
    """

    learns_alarms = True

    def score(self, values: Values) -> tuple[Tensor, Tensor]:
        (signal,) = self.windowed
        now, (median, _) = values[signal], self.windows[signal].median_mad()
        now, median = (x.reshape(len(x), -1) for x in (now, median))
        fall = self.heard(self.options.window // 2, (median / now).amax(1) / self.numbers["fall"])
        is_low = now.amin(1) < self.numbers["floor"]
        return torch.where(is_low, fall.fmax(torch.full_like(fall, LOW)), fall), torch.ones_like(fall)


class Growth(Windowed):
    """A reading over `options.growth` times the median of the last readings of its layer, or over `options.limit`.

    The one signal that is `windowed` is [R, layers] or [R]. A median below `least` counts as that. The score is that of
    the worst layer, with its limit at 1. Silent until half of the window is filled, but for the limit. Such numbers
    grow in every run, so what was an alarm is learned, or it would be one for ever.
    """

    learns_alarms = True
    least: ClassVar[float] = 0.0

    def score(self, values: Values) -> tuple[Tensor, Tensor]:
        (signal,) = self.windowed
        now, (median, _) = values[signal], self.windows[signal].median_mad()
        now, median = (x.reshape(len(x), -1) for x in (now, median))
        growth = (now / median.clamp(min=self.least)).amax(1) / self.numbers["growth"]
        heard = self.heard(self.options.window // 2, growth)
        size = now.amax(1) / self.numbers["limit"]
        return torch.fmax(heard, torch.where(size > 1, size, heard)), torch.ones_like(size)
