"""What a search may try: which axes are its cells, which it searches, and which it repeats at every point."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from harness.config import ConfigError, Problems
from sweeps.compose.overrides import Axis, check_jobs, types_of

SEARCHED, REPEATED, CELLS = "searched", "repeated", "cells"


@dataclass(frozen=True)
class Space:
    """The axes of a search, by what it does with them."""

    searched: Mapping[str, Axis]
    cells: Sequence[tuple[str, ...]]  # overrides, the axes with one value among them
    names: Sequence[str]  # of the cells: what tells them apart
    repeats: Sequence[tuple[str, ...]]  # overrides of the trials of a point

    @classmethod
    def of(cls, kind: str, axes: Sequence[Axis], role: Callable[[str], str], wanted: str) -> Space:
        """Raises ConfigError where there is nothing to search, an interval is not searched, or cells are too many.

        `role` says of an axis, by its key, which of the three it is, and `wanted` in words what the search is over.
        """
        problems = Problems()
        by_role: dict[str, list[Axis]] = {SEARCHED: [], REPEATED: [], CELLS: []}
        for axis in axes:
            is_swept = axis.interval is not None or len(axis.values) > 1
            its_role = role(axis.key) if is_swept else CELLS
            by_role[its_role].append(axis)
            if axis.interval and its_role != SEARCHED:
                reason = f"search={kind} searches {wanted}; allowed here: values with commas"
                problems.reasons[f"{axis.text}: {reason}"] = None
        if not by_role[SEARCHED]:
            reason = f"search={kind}: nothing to search; allowed: several values, or an interval, of {wanted}"
            problems.reasons[reason] = None
        with problems.collect():
            check_jobs([*by_role[CELLS], *by_role[REPEATED]])
        problems.check()
        cells = list(itertools.product(*(axis.overrides for axis in by_role[CELLS])))
        swept = [number for number, axis in enumerate(by_role[CELLS]) if len(axis.values) > 1]
        names = [" ".join(cell[number] for number in swept) or "all" for cell in cells]
        repeats = list(itertools.product(*(axis.overrides for axis in by_role[REPEATED])))
        return cls({axis.key: axis for axis in by_role[SEARCHED]}, cells, names, repeats)

    @property
    def distributions(self) -> dict[str, BaseDistribution]:
        """Of the searched axes, for Optuna."""
        return {key: _distribution(axis) for key, axis in self.searched.items()}

    def jobs(self, cell: Sequence[str], params: Mapping[str, Any]) -> list[list[str]]:
        """The overrides of each trial of a point, whose values Optuna has asked for."""
        point = [f"{key}={_text(value)}" for key, value in params.items()]
        return [[*cell, *point, *repeat] for repeat in self.repeats]

    def corners(self) -> Iterator[list[str]]:
        """Overrides of trials in which each value of each axis, and each end of an interval, stands at least once.

        The other axes are at their first values, so that a value is refused for what it is.
        """
        first = {key: axis.values[0] for key, axis in self.searched.items()}
        for cell in self.cells:
            yield from self.jobs(cell, first)
        for key, axis in self.searched.items():
            for word in axis.values[1:]:
                yield from self.jobs(self.cells[0], first | {key: word})


def _text(value: Any) -> str:
    return value if isinstance(value, str) else f"{value:.12g}"


def _distribution(axis: Axis) -> BaseDistribution:
    """Optuna's for an interval and for a range of numbers; other values are categories."""
    if axis.interval:
        low, high, is_log = axis.interval.low, axis.interval.high, axis.interval.is_log
        if types_of(axis.key) != {int}:
            return FloatDistribution(low, high, log=is_log)
        if low != int(low) or high != int(high):
            raise ConfigError(f"{axis.text}: takes integers; allowed: integers at its ends")
        return IntDistribution(int(low), int(high), log=is_log)
    if axis.is_range and all(float(word).is_integer() for word in axis.values):
        values = sorted(int(float(word)) for word in axis.values)
        return IntDistribution(values[0], values[-1], step=max(1, values[1] - values[0]))
    return CategoricalDistribution(axis.values)


def geometric(low: float, high: float, ratio: float) -> list[float]:
    """Numbers from `low` to `high`, evenly spaced on a logarithmic scale, neighbours at most `ratio` apart."""
    steps = max(1, math.ceil(math.log(high / low) / math.log(ratio) - 1e-9))
    numbers = [float(f"{low * (high / low) ** (number / steps):.4g}") for number in range(steps + 1)]
    return sorted({low, *numbers[1:-1], high})
