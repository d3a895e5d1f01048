"""What detectors remember of the past: the last values of each row, in arrays that forks and snapshots see."""

from __future__ import annotations

import torch
from torch import Tensor

from harness.model.state import State

MAD_TO_STD = 1.4826  # of a normal distribution: 1 / Phi^-1(3/4)


def standardised(value: Tensor, centre: Tensor, spread: Tensor) -> Tensor:
    """How many spreads a value lies above the centre; without any spread, infinitely many, or none if it is there."""
    off = value - centre
    return torch.where(off == 0, 0.0, off / spread)


class Window:
    """The last `length` values of each row, [R, ..., length], float64, as what they are above the row's first value.

    So the statistics of equal values have no rounding. `like` [R, ...] has the shape of a value, and so have the
    statistics, which are of each row alone.
    """

    def __init__(self, state: State, name: str, like: Tensor, length: int):
        shape, device = (*like.shape, length), like.device
        self._off = state.add(name, torch.zeros(shape, dtype=torch.float64, device=device))  # 0 where none is yet
        self._first = state.add(f"{name}_first", torch.full(shape[:-1], torch.nan, dtype=torch.float64, device=device))
        self._count = state.add(f"{name}_count", torch.zeros(len(like), dtype=torch.int64, device=device))
        self._places, self._ones = torch.arange(length, device=device), (1,) * (len(shape) - 2)
        self.length = length

    @property
    def count(self) -> Tensor:
        """How many values each row has, [R]; at most `length`."""
        return self._count.used.clamp(max=self.length)

    def add(self, values: Tensor, where_R: Tensor) -> None:
        """A value more, [R, ...], in these rows, in the place of their oldest where they have `length`."""
        first, count, is_here = self._first.used, self._count.used, self._wide(where_R)
        first.copy_(torch.where(is_here & self._wide(count == 0), values, first))
        place = self._wide(count % self.length).expand_as(values)[..., None]
        before = self._off.used.gather(-1, place)
        self._off.used.scatter_(-1, place, torch.where(is_here[..., None], (values - first)[..., None], before))
        count.add_(where_R)

    def restart(self, where_R: Tensor) -> None:
        """These rows have no value."""
        self._off.used.masked_fill_(self._wide(where_R)[..., None], 0)
        self._first.used.masked_fill_(self._wide(where_R), torch.nan)
        self._count.used.masked_fill_(where_R, 0)

    def mean(self) -> Tensor:
        """NaN in rows without a value."""
        return self._first.used + self._off.used.sum(-1) / self._wide(self.count)

    def mean_std(self) -> tuple[Tensor, Tensor]:
        """Mean and sample standard deviation (n - 1); NaN where there are too few values for it."""
        count = self._wide(self.count)
        mean = self._off.used.sum(-1) / count
        squares = (self._off.used - mean[..., None]).square().sum(-1) - (self.length - count) * mean.square()
        return self._first.used + mean, (squares.clamp(min=0) / (count - 1).clamp(min=0)).sqrt()

    def median_mad(self) -> tuple[Tensor, Tensor]:
        """Median, and median absolute deviation from it; NaN in rows without a value."""
        median = self._median_of(self._off.used)
        return self._first.used + median, self._median_of((self._off.used - median[..., None]).abs())

    def _wide(self, values_R: Tensor) -> Tensor:
        return values_R.view(-1, *self._ones)

    def _median_of(self, values: Tensor) -> Tensor:
        """Of what there is: the middle value, or the mean of the two in the middle."""
        count = self._wide(self.count)[..., None]
        ordered = torch.where(self._places < count, values, torch.inf).sort(-1).values
        low, high = ((count - 1) // 2).clamp(min=0), (count // 2).clamp(max=self.length - 1)
        pair = [ordered.gather(-1, place.expand(*values.shape[:-1], 1)) for place in (low, high)]
        return torch.cat(pair, -1).mean(-1)
