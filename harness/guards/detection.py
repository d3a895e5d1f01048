"""Asks the detectors that a trial has chosen, and shows what they say; it answers nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from harness.config import Trial, sections
from harness.detectors.base import AFTER_THE_STEP, Detector
from harness.detectors.loop_signals import PER_RATE, RATE, SOURCES, STEP, UPDATE, has_new_rate, per_rate
from harness.detectors.table import DETECTORS
from harness.guards.base import Guard, GuardInput, GuardSignal, Parts
from harness.readings.table import SHOWN, layers_there
from harness.storage.store import SIGNALS


class Detection(Guard):
    """`alarm_NAME`, 1 or 0, and `score_NAME` of each detector at each step, stored as the harness's own signals are."""

    def __init__(self, parts: Parts):
        super().__init__(parts)
        self._detectors: dict[str, Detector] = {}
        self._shown: dict[str, Tensor] = {}

    @classmethod
    def is_on(cls, trial: Trial) -> bool:
        return bool(trial.section("detect").name != "none")

    def bind(self, trials: Sequence[Trial]) -> None:
        names = trials[0].section("detect").name.split("+")
        has_options = {name: f"detect.{name}" in sections() for name in names}
        options = {
            name: [trial.section(f"detect.{name}") if has_options[name] else None for trial in trials] for name in names
        }
        for name, detector in self._detectors.items():
            detector.bind(options[name])
        if not self._detectors:
            self._make(options, trials)

    def _make(self, options: Mapping[str, Sequence[object]], trials: Sequence[Trial]) -> None:
        watched = dict.fromkeys(signal for name in options for signal in DETECTORS[name].watches)
        rows = torch.zeros(len(trials), dtype=torch.float64, device=self.parts.device)
        sizes = {"layer": trials[0].model.depth, "rank": trials[0].train.ranks}
        along = {name: signal.dims[2:] for name, signal in SIGNALS.items()}
        along |= {name: signal.along for name, signal in SHOWN.items()} | dict.fromkeys(SOURCES, ())
        self.asks = [name for name in watched if (along[name] or name in SHOWN) and name not in AFTER_THE_STEP]
        like = {name: rows.new_zeros(len(rows), *(sizes[dim] for dim in along[name])) for name in watched}
        there = layers_there(trials[0], watched)
        state = self.parts.state
        for name, chosen in options.items():
            self._detectors[name] = DETECTORS[name](f"detect_{name}", chosen, like, state, there)
        lagging = AFTER_THE_STEP.intersection(watched)
        self._rates = state.add("detect_rates", rows[:, None].repeat(1, 3) + torch.nan) if lagging else None
        unread = {name: torch.nan if name in SHOWN else 0.0 for name in sorted(lagging)}
        self._before = {name: state.add(f"detect_{name}", like[name] + value) for name, value in unread.items()}
        self._has_before = state.add("detect_before", rows.bool()) if lagging else None
        words = {"alarm": "alarm of the detector", "score": "score of the detector"}
        self.signals = {
            f"{kind}_{name}": GuardSignal("1", f"{text} {name}") for name in options for kind, text in words.items()
        }

    def judge(self, seen: GuardInput) -> Tensor:
        self.parts.alarms.clear()
        before = {signal: kept.used for signal, kept in self._before.items()}
        values = {"loss": seen.loss, "grad_norm": seen.norm, STEP: seen.step, **seen.signals, **before}
        if self._rates is not None:
            changes = has_new_rate(*self._rates.used.unbind(1))
            for detector in self._detectors.values():
                detector.see_new_rate(changes)
        for name, detector in self._detectors.items():
            if any(signal not in values and signal not in SHOWN for signal in detector.watches):
                continue  # nothing is measured
            # Where the loss's scale is dynamic, gradients that overflow are that guard's to judge.
            is_new = seen.trains & ~(self.parts.loss_scale.dynamic & ~seen.usable & seen.loss.isfinite())
            if self._has_before is not None and AFTER_THE_STEP.intersection(detector.watches):
                is_new = is_new & self._has_before.used
            is_alarm, score = detector.judge(values, is_new)
            self.parts.alarms[name] = is_alarm, score, detector.late(is_alarm)
            self._shown[f"alarm_{name}"], self._shown[f"score_{name}"] = is_alarm.double(), score
        return torch.zeros_like(seen.trains, dtype=torch.int8)

    def restart(self, where_R: Tensor) -> None:
        """The detectors of these rows begin anew."""
        for detector in self._detectors.values():
            detector.restart(where_R)
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
