"""What detectors say of runs that are stored, with any constants; and which steps these have taken."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import xarray as xr

from analysis.reading.padding import alike, own_sizes
from harness.basics.errors import nearest
from harness.config import ConfigError, checked, field_types, sections
from harness.detectors.loop_signals import BEGAN, JUDGED, RATE, stored
from harness.detectors.loop_signals import NAMES as LOOP_SIGNALS
from harness.detectors.replay import replay
from harness.detectors.table import DETECTORS

TRIALS_AT_ONCE = 256
IN_FORCE = "learning_rate"
PER = 1000  # steps, of which false alarms are counted


def options_of(name: str, given: Mapping[str, Any]) -> Any:
    """The constants of a detector: its own, but for those `given`, by field. Raises ConfigError."""
    if name not in DETECTORS:
        allowed = f"{nearest(name, DETECTORS)}allowed: {', '.join(sorted(DETECTORS))}"
        raise ConfigError(f"detect={name}: unknown detector; {allowed}")
    cls: Any = sections().get(f"detect.{name}")
    known = field_types(cls) if cls else {}
    for key, value in given.items():
        if key not in known:
            allowed = ", ".join(f"detect.{name}.{field}" for field in known) or "no field"
            raise ConfigError(f"detect.{name}.{key}={value}: unknown key; {nearest(key, known)}allowed: {allowed}")
    return cls and cls(**{key: checked(f"detect.{name}.{key}", cls, key, value) for key, value in given.items()})


def alarms(sweep: xr.Dataset, name: str, **constants: Any) -> xr.Dataset:
    """`alarm`, bool, and `score` [trial, step] of a detector, as it says them while the runs train, bit for bit.

    Args:
        sweep: As `analysis.open_sweep` gives it.
        name: Of a detector, such as `combined`.
        **constants: Fields of its `Options` that are not the defaults.

    Returns:
        A dataset of the two. Steps that a trial has not taken have neither (False, NaN), nor have trials of fewer ranks
        than it needs.

    Raises:
        ConfigError: There is no such name, field or value, or the sweep lacks a signal that the detector watches.
    """
    is_alarm, score = _replayed(sweep, name, [options_of(name, constants)])
    dims = ("trial", "step")
    return xr.Dataset({"alarm": (dims, is_alarm[0]), "score": (dims, score[0])}, coords=sweep.coords)


def _replayed(sweep: xr.Dataset, name: str, options: Sequence[Any]) -> tuple[np.ndarray, np.ndarray]:
    """Alarms and scores [options, trial, step] of a detector with each of these options: rows of one replay.

    Raises ConfigError as `alarms` does.
    """
    wanted = stored(DETECTORS[name].watches)
    missing = [signal for signal in wanted if signal not in sweep and (signal != RATE or IN_FORCE not in sweep)]
    if missing:
        raise ConfigError(f"detect={name}: the sweep has no {', '.join(missing)}; allowed: one that has measured it")
    least = DETECTORS[name].least_ranks
    if (ranks := int(own_sizes(sweep)["rank"].max(initial=1))) < least:
        raise ConfigError(f"detect={name}: the sweep has train.ranks={ranks} at most; allowed: one of at least {least}")
    shape = len(options), sweep.sizes["trial"], sweep.sizes["step"]
    at_once = max(1, TRIALS_AT_ONCE // len(options))
    is_alarm, score = np.zeros(shape, bool), np.full(shape, np.nan)
    needed = [name for name in dict.fromkeys([*wanted, *LOOP_SIGNALS, IN_FORCE]) if name in sweep]
    for begin in range(0, shape[1], at_once):
        block = sweep.isel(trial=slice(begin, begin + at_once))
        read = {signal: block.variables[signal].transpose("trial", "step", ...) for signal in needed}
        values, is_taken = {signal: array.values for signal, array in read.items()}, taken(block)
        is_loop = ~np.isnan(values[JUDGED]).all(1) if JUDGED in values else np.zeros(len(is_taken), bool)
        for some in (part for shape in alike(block) for part in shape.apart(is_loop)):
            if some.sizes["rank"] < least:
                continue
            own = {signal: some.of(values[signal], array.dims) for signal, array in read.items()}
            known = _known(own, is_loop[some.trials[0]])
            each = [one for one in options for _ in some.trials]
            again = {signal: np.concatenate([array] * len(options)) for signal, array in known.items()}
            found = replay(DETECTORS[name], each, again, np.concatenate([is_taken[some.trials]] * len(options)))
            for target, values_found in zip((is_alarm, score), found, strict=True):
                target[:, begin + some.trials] = values_found.reshape(len(options), len(some.trials), -1)
    return is_alarm, score


def alarmed(sweep: xr.Dataset, name: str, constants: Mapping[str, Mapping[str, Any]]) -> np.ndarray:
    """Where a detector has an alarm, or any of several joined by `+`, bool [trial, step]; each with its `constants`.

    Raises ConfigError as `alarms` does.
    """
    return np.asarray(alarmed_with_each(sweep, name, [constants])[0])


def alarmed_with_each(sweep: xr.Dataset, name: str, constants: Sequence[Mapping[str, Mapping[str, Any]]]) -> np.ndarray:
    """The same with each of several `constants`, bool [constants, trial, step]."""
    each = [
        _replayed(sweep, one, [options_of(one, given.get(one, {})) for given in constants])[0]
        for one in name.split("+")
    ]
    return np.asarray(np.any(each, axis=0))


def _known(signals: Mapping[str, np.ndarray], is_loop: bool) -> dict[str, np.ndarray]:
    """What detectors see of trials [trial, step, ...]: of a loop of the user's own, what is known of that.

    Stores of before have no rate of the schedule; then the one in force has to do.
    """
    found = {name: values for name, values in signals.items() if is_loop or name not in (BEGAN, JUDGED)}
    in_force = found.pop(IN_FORCE, None)
    if in_force is not None and not is_loop:
        scheduled = found.get(RATE, np.full_like(in_force, np.nan))
        is_unknown = np.isnan(scheduled).all(axis=1, keepdims=True)
        found[RATE] = np.where(is_unknown, in_force, scheduled)
    return found


def measured(sweep: xr.Dataset) -> list[str]:
    """The detectors whose signals the sweep has, but for those that look at none."""
    ranks = int(own_sizes(sweep)["rank"].max(initial=1))
    needed = {name: set(stored(cls.watches)) for name, cls in DETECTORS.items()}
    heard = (name for name, signals in needed.items() if signals and signals <= {RATE, *sweep.data_vars})
    return [name for name in heard if ranks >= DETECTORS[name].least_ranks]


def watched(sweep: xr.Dataset, names: Sequence[str]) -> xr.Dataset:
    """Of a sweep what these detectors watch, some perhaps joined by `+`, and what says which steps were taken."""
    each = {one for name in names for one in name.split("+")} & DETECTORS.keys()
    needed = {"loss", "dropped", "tokens", "learning_rate", *LOOP_SIGNALS}.union(
        *(stored(DETECTORS[name].watches) for name in each)
    )
    return sweep[[name for name in sweep.data_vars if name in needed]]


def taken(sweep: xr.Dataset) -> np.ndarray:
    """The steps that each trial has trained in, [trial, step]: none after it froze, or whose batch was dropped."""
    # Not by DataArrays, each operation of which aligns all coordinates of a sweep.
    variables, plane = sweep.variables, ("trial", "step")
    loss, dropped, tokens, rate = (
        variables[name].transpose(*plane).values for name in ("loss", "dropped", "tokens", "learning_rate")
    )
    at_the_end = variables["step"].values == variables["nonfinite_step"].values[:, None]
    is_dropped = np.isnan(loss) & (dropped > 0) & ~at_the_end
    # A run of one's own has no tokens that anybody has counted.
    return np.asarray(~(np.isnan(tokens) & np.isnan(rate)) & ~is_dropped)


def last_step(is_taken: np.ndarray) -> int:
    """The last of the steps [steps] that a run has taken; -1 if it has taken none."""
    return int(np.flatnonzero(is_taken)[-1]) if is_taken.any() else -1


def carried(values: np.ndarray, is_taken: np.ndarray) -> np.ndarray:
    """A run's signal [steps, ...], which stands still where the run did: at steps before its last that it did not take.

    These have the value of the last step before that was taken, or else of the first.
    """
    last = last_step(is_taken)
    if is_taken[: last + 1].all():
        return values
    at = np.arange(len(is_taken))
    source = np.maximum.accumulate(np.where(is_taken, at, is_taken.argmax()))
    return values[np.where(at < last, source, at)]
