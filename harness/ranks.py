"""Simulated data-parallel ranks: each takes the gradient of its part of the batch, and the mean over them is taken.

The same arithmetic as an all-reduce, on one device, and as micro-batches whose gradients are accumulated.

Gradients are added as they are, times the loss scale, and unscaled once, after the mean: per whole batch, as
torch.amp.GradScaler asks for where gradients are accumulated. An overflow in one rank costs the trial the whole step,
and all ranks of a step have one scale. Per micro-batch, sums would be of unscaled gradients, which a narrow format of
the running sum loses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from harness.formats import round_to


class RankMean:
    """Adds the gradients of ranks in the order and the number format that the configuration says."""

    def __init__(self, count: int, order: str, format: str):
        self.count, self.order, self.format = count, order, format
        self._sums: list[tuple[int, Tensor]] = []  # (how many ranks are in it, their sum)

    def parts(self, batch_RxBxT1: Tensor) -> Iterator[tuple[int, Tensor]]:
        """The ranks in the order in which they are added, each with its sequences of the batch."""
        for rank in self.sequence():
            yield rank, self.part(batch_RxBxT1, rank)

    def part(self, values_RxB: Tensor, rank: int) -> Tensor:
        """What of something [R, B, ...] that has an entry for each sequence of the batch is a rank's."""
        return values_RxB if self.count == 1 else values_RxB.chunk(self.count, dim=1)[rank]

    def sequence(self) -> Sequence[int]:
        """The ranks in the order in which they are added."""
        ranks = range(self.count)
        return ranks[::-1] if self.order == "reversed" else ranks

    def add(self, gradients: Tensor) -> None:
        """Take in one rank's gradients."""
        if self.count == 1:
            return
        self._sums.append((1, gradients.clone()))
        while len(self._sums) > 1 and (self.order != "pairwise" or self._sums[-1][0] == self._sums[-2][0]):
            self._merge()

    def finish(self, gradients: Tensor) -> None:
        """Leave the mean over all ranks in `gradients`."""
        if self.count == 1:
            return
        while len(self._sums) > 1:
            self._merge()
        ((_, total),) = self._sums
        gradients.copy_(total.div_(self.count))
        self._sums.clear()

    def _merge(self) -> None:
        (more, right), (count, left) = self._sums.pop(), self._sums.pop()
        total = left.add_(right)
        self._sums.append((count + more, total if self.format == "fp32" else round_to(total, self.format)))
