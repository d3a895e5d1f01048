"""A detector over signals that are stored: what it would have said while the runs trained, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from harness.detectors.base import AFTER_THE_STEP, Detector
from harness.detectors.loop_signals import STEP, LoopSignals, new_rates, since_measured, with_sources
from harness.model.state import State
from harness.readings.table import READ_BY


def replay(
    cls: type[Detector], options: Any, signals: Mapping[str, np.ndarray], is_new: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Alarms, bool, and scores, float64, [R, steps] each, of a detector with these options, or a list of each row's.

    `signals` are [R, steps] or [R, steps, layers], those that it watches at least or what they are made of, and those
    of harness/detectors/loop_signals.py where they are known; `is_new` says which steps a row has taken, [R, steps].
    Raises KeyError for a signal that is missing.
    """
    loop, changes, signals = LoopSignals.of(signals), new_rates(signals), with_sources(signals)
    if STEP in cls.watches:
        signals = {STEP: np.broadcast_to(np.arange(is_new.shape[1]), is_new.shape), **signals}
    series = {signal: torch.from_numpy(np.asarray(signals[signal], dtype=np.float32)) for signal in cls.watches}
    for signal in AFTER_THE_STEP.intersection(series):
        values = series[signal]
        if loop is not None:
            values = torch.from_numpy(since_measured(values.numpy()))
        elif values.dim() == 2 and signal not in READ_BY:  # never measured, as a second moment of SGD: says nothing
            values = values.masked_fill(values.isnan().all(1, keepdim=True), 0.0)
        series[signal] = torch.cat([torch.full_like(values[:, :1], torch.nan), values[:, :-1]], 1)
    taken = torch.from_numpy(np.array(is_new, dtype=bool))
    if AFTER_THE_STEP.intersection(series):
        taken[:, 1:] &= taken[:, :-1].clone()
        taken[:, 0] = False
    if loop is not None:
        taken &= torch.from_numpy(loop.judged)
        if AFTER_THE_STEP.intersection(series):
            taken &= torch.from_numpy(~loop.began)
    rows, steps = taken.shape
    like = {signal: values[:, 0] for signal, values in series.items()}
    detector = cls("detector", options if isinstance(options, list) else [options] * rows, like, State(rows))
    alarms, scores = (
        torch.zeros(rows, steps, dtype=torch.bool),
        torch.full((rows, steps), torch.nan, dtype=torch.float64),
    )
    for step in range(steps):
        if loop is not None and loop.began[:, step].any():
            detector.restart(torch.from_numpy(loop.began[:, step]))
        if changes is not None and changes[:, step].any():
            detector.see_new_rate(torch.from_numpy(changes[:, step]))
        shown = {signal: values[:, step] for signal, values in series.items()}
        alarms[:, step], scores[:, step] = detector.judge(shown, taken[:, step])
    return alarms.numpy(), scores.numpy()
