"""A detector over signals that are stored: what it would have said while the runs trained, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from harness.detectors.base import AFTER_THE_STEP, Detector
from harness.detectors.loop_signals import STEP, LoopSignals, new_rates, since_measured, with_sources
from harness.model.state import State
from harness.readings.table import OF_SOME_LAYERS, READ_BY


def replay(
    cls: type[Detector], options: Any, signals: Mapping[str, np.ndarray], is_new: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Alarms, bool, and scores, float64, [R, steps] each, of a detector with these options, or a list of each row's.

    `signals` are [R, steps] or [R, steps, layers], those that it watches at least or what they are made of, and those
    of harness/detectors/loop_signals.py where they are known; `is_new` says which steps a row has taken, [R, steps].
    Rows whose models lack other layers of what is read are judged apart. Raises KeyError for a signal that is missing.
    """
    there = _layers(cls, signals)
    if len(parts := _of_one_kind(there)) > 1:
        return _apart(cls, options, signals, is_new, parts)
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
    like = {signal: torch.zeros_like(values[:, 0]) for signal, values in series.items()}
    given = options if isinstance(options, list) else [options] * rows
    has = {signal: of_rows[0].tolist() for signal, of_rows in there.items() if rows}
    detector = cls("detector", given, like, State(rows), has)
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


def _layers(cls: type[Detector], signals: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Of signals that some layers may lack, whether each row has them there, bool [R, layers].

    A layer is lacking that is NaN wherever another one was read, more than once: a single NaN was measured.
    """
    found = {}
    for name in sorted(OF_SOME_LAYERS.intersection(cls.watches)):
        values = ~np.isnan(np.asarray(signals[name]))
        if values.ndim == 3:
            is_read_twice = values.any(2).sum(1) > 1
            found[name] = values.any(1) | ~is_read_twice[:, None]
    return found


def _of_one_kind(there: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """Rows together that have all signals in the same layers."""
    rows = np.concatenate(list(there.values()), 1) if there else np.zeros((0, 0), dtype=bool)
    if not len(rows):
        return []
    kind = np.unique(rows, axis=0, return_inverse=True)[1].ravel()
    return [np.flatnonzero(kind == number) for number in range(int(kind.max()) + 1)]


def _apart(
    cls: type[Detector],
    options: Any,
    signals: Mapping[str, np.ndarray],
    is_new: np.ndarray,
    parts: list[np.ndarray],
) -> tuple[np.ndarray, np.ndarray]:
    alarms, scores = np.zeros(is_new.shape, dtype=bool), np.full(is_new.shape, np.nan)
    for rows in parts:
        chosen = [options[row] for row in rows] if isinstance(options, list) else options
        of_rows = {name: np.asarray(values)[rows] for name, values in signals.items()}
        alarms[rows], scores[rows] = replay(cls, chosen, of_rows, np.asarray(is_new)[rows])
    return alarms, scores
