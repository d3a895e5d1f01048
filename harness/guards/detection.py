"""Asks the detectors that a trial has chosen, and shows what they say; it answers nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from harness.config import Trial
from harness.detectors.bank import DetectorBank, chosen_options, watched_by
from harness.detectors.base import AFTER_THE_STEP
from harness.detectors.loop_signals import PER_RATE, RATE, SOURCES, STEP, UPDATE, has_new_rate, per_rate
from harness.guards.base import Guard, GuardInput, GuardSignal, Parts
from harness.readings.table import SHOWN, layers_there
from harness.storage.store import SIGNALS


class Detection(Guard):
    """`alarm_NAME`, 1 or 0, and `score_NAME` of each detector at each step, stored as the harness's own signals are."""

    def __init__(self, parts: Parts):
        super().__init__(parts)
        self._bank: DetectorBank | None = None
        self._shown: dict[str, Tensor] = {}

    @classmethod
    def is_on(cls, trial: Trial) -> bool:
        return bool(trial.section("detect").name != "none")

    def bind(self, trials: Sequence[Trial]) -> None:
        options = chosen_options(trials)
        if self._bank is None:
            self._make(options, trials)
        else:
            self._bank.bind(options)

    def _make(self, options: Mapping[str, Sequence[object]], trials: Sequence[Trial]) -> None:
        watched = watched_by(list(options))
        rows = torch.zeros(len(trials), dtype=torch.float64, device=self.parts.device)
        sizes = {"layer": trials[0].model.depth, "rank": trials[0].train.ranks}
        along = {name: signal.dims[2:] for name, signal in SIGNALS.items()}
        along |= {name: signal.along for name, signal in SHOWN.items()} | dict.fromkeys(SOURCES, ())
        self.asks = [name for name in watched if (along[name] or name in SHOWN) and name not in AFTER_THE_STEP]
        like = {name: rows.new_zeros(len(rows), *(sizes[dim] for dim in along[name])) for name in watched}
        state = self.parts.state
        self._bank = DetectorBank(options, like, state, layers_there(trials[0], watched))
        lagging = self._bank.lagging
        self._rates = state.add("detect_rates", rows[:, None].repeat(1, 3) + torch.nan) if lagging else None
        unread = {name: torch.nan if name in SHOWN else 0.0 for name in lagging}
        self._before = {name: state.add(f"detect_{name}", like[name] + value) for name, value in unread.items()}
        self._has_before = state.add("detect_before", rows.bool()) if lagging else None
        words = {"alarm": "alarm of the detector", "score": "score of the detector"}
        self.signals = {
            f"{kind}_{name}": GuardSignal("1", f"{text} {name}") for name in options for kind, text in words.items()
        }

    def judge(self, seen: GuardInput) -> Tensor:
        assert self._bank is not None
        self.parts.alarms.clear()
        before = {signal: kept.used for signal, kept in self._before.items()}
        values = {"loss": seen.loss, "grad_norm": seen.norm, STEP: seen.step, **seen.signals, **before}
        # Where the loss's scale is dynamic, gradients that overflow are that guard's to judge.
        is_new = seen.trains & ~(self.parts.loss_scale.dynamic & ~seen.usable & seen.loss.isfinite())
        new_rate = None if self._rates is None else has_new_rate(*self._rates.used.unbind(1))
        has_before = None if self._has_before is None else self._has_before.used
        for name, is_alarm, score in self._bank.judge(values, is_new, has_before, new_rate):
            self.parts.alarms[name] = is_alarm, score, self._bank.late(name, is_alarm)
            self._shown[f"alarm_{name}"], self._shown[f"score_{name}"] = is_alarm.double(), score
        return torch.zeros_like(seen.trains, dtype=torch.int8)

    def restart(self, where_R: Tensor) -> None:
        """The detectors of these rows begin anew."""
        assert self._bank is not None
        self._bank.restart(where_R)
        if self._has_before is not None:
            self._has_before.used.masked_fill_(where_R, False)

    def shown(self) -> Mapping[str, Tensor]:
        return self._shown

    def measured(self, values: Mapping[str, Tensor], trained: Tensor) -> None:
        if PER_RATE in self._before and UPDATE in values:
            values = {**values, PER_RATE: per_rate(*(values[name].float().double() for name in (UPDATE, RATE)))}
        if self._rates is not None:
            now = torch.where(trained, values[RATE].double(), torch.nan)
            self._rates.used.copy_(torch.cat([now[:, None], self._rates.used[:, :-1]], 1))
        for signal, kept in self._before.items():
            if signal in values or signal in SHOWN:  # what was not due was not read
                now = values[signal].double() if signal in values else torch.full_like(kept.used, torch.nan)
                kept.used.copy_(torch.where(trained.view(-1, *[1] * (now.dim() - 1)), now, kept.used))
        if self._has_before is not None:
            self._has_before.used.logical_or_(trained)
