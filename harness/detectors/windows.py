"""What detectors remember of the past: the last values of each row, in arrays that forks and snapshots see."""

from __future__ import annotations

import torch
from torch import Tensor

from harness.model import sums
from harness.model.state import State

MAD_TO_STD = 1.4826  # of a normal distribution: 1 / Phi^-1(3/4)


def standardised(value: Tensor, centre: Tensor, spread: Tensor) -> Tensor:
    """How many spreads a value lies above the centre; without any spread, infinitely many, or none if it is there."""
    off = value - centre
    return torch.where(off == 0, 0.0, off / spread)


class Window:
    """The last `length` values of each row, [R, ..., length], float64.

    `like` [R, ...] has the shape of a value, and so have the statistics, which are of each row alone. Those of equal
    values have no rounding.
    """

    def __init__(self, state: State, name: str, like: Tensor, length: int):
        shape, device = (*like.shape, length), like.device
        nothing = torch.full(shape, torch.nan, dtype=torch.float64, device=device)
        self._values = state.add(f"{name}_values", nothing)  # NaN where none is yet
        self._count = state.add(f"{name}_count", torch.zeros(len(like), dtype=torch.int64, device=device))
        self._ones = (1,) * (len(shape) - 2)
        self.length = length

    @property
    def count(self) -> Tensor:
        """How many values each row has, [R]; at most `length`."""
        return self._count.used.clamp(max=self.length)

    def add(self, values: Tensor, where_R: Tensor) -> None:
        """A value more, [R, ...], in these rows, in the place of their oldest where they have `length`."""
        kept, place = self._values.used, (self._count.used % self.length)[:, None]
        is_there = (torch.arange(self.length, device=kept.device) == place) & where_R[:, None]
        kept.copy_(torch.where(self._wide(is_there), values[..., None], kept))
        self._count.used.add_(where_R)

    def restart(self, where_R: Tensor) -> None:
        """These rows have no value."""
        self._values.used.masked_fill_(self._wide(where_R)[..., None], torch.nan)
        self._count.used.masked_fill_(where_R, 0)

    def mean(self) -> Tensor:
        """NaN in rows without a value."""
        some, off = self._from_one_of_them()
        return some + sums.nan_total(off) / self._wide(self.count)

    def mean_std(self) -> tuple[Tensor, Tensor]:
        """Mean and sample standard deviation (n - 1); NaN where there are too few values for it."""
        count, (some, off) = self._wide(self.count), self._from_one_of_them()
        mean = sums.nan_total(off) / count
        squares = sums.nan_total((off - mean[..., None]).square())
        return some + mean, (squares / (count - 1).clamp(min=0)).sqrt()

    def median_mad(self) -> tuple[Tensor, Tensor]:
        """Median, and median absolute deviation from it; NaN in rows without a value."""
        median = self._median_of(self._values.used)
        return median, self._median_of((self._values.used - median[..., None]).abs())

    def _from_one_of_them(self) -> tuple[Tensor, Tensor]:
        """One of the values, [R, ...], and how far each is from it: equal values sum up without rounding."""
        some = self._values.used[..., 0]
        return some, self._values.used - some[..., None]

    def _wide(self, values_Rx: Tensor) -> Tensor:
        """Numbers of each row, [R] or [R, length], beside the values."""
        return values_Rx.view(-1, *self._ones, *values_Rx.shape[1:])

    def _median_of(self, values: Tensor) -> Tensor:
        """Of what there is: the middle value, or the mean of the two in the middle."""
        count = self._wide(self.count)[..., None]
        ordered = values.sort(-1).values  # NaN comes last
        places = ((count - 1) // 2).clamp(min=0), count // 2
        pair = [ordered.gather(-1, place.expand(*values.shape[:-1], 1)) for place in places]
        return sums.mean(torch.cat(pair, -1))
