"""Simulated data-parallel ranks: each takes the gradient of its part of the batch, and the mean over them is taken.

The same arithmetic as an all-reduce, on one device. Each rank's part may pass in several micro-batches
(`train.micro_batches`), whose gradients `Pack.learn` adds up before they come here. Ranks that are processes of their
own are in harness/training/distributed.py; what the loop asks of either is here.

Gradients are added as they are, times the loss scale, and unscaled once, after the mean: per whole batch, as
torch.amp.GradScaler asks for where gradients are accumulated. An overflow in one rank costs the trial the whole step,
and all ranks of a step have one scale. With `train.loss_scale_per=micro_batch` sums are of unscaled gradients, which a
narrow format of the running sum loses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor

from harness.model import sums
from harness.model.formats import round_to

Replica = Callable[[], tuple[Mapping[str, Tensor], Mapping[str, Any]]]
T = TypeVar("T")


class Communicator:
    """Adds the gradients of ranks in the order and the number format that the configuration says."""

    def __init__(self, count: int, order: str, format: str):
        self.count, self.order, self.format, self.processes = count, order, format, 1
        self.current = 0  # the rank of which `parts` has given the part
        self._sums: list[tuple[int, Tensor]] = []  # (how many ranks are in it, their sum)

    def parts(self, batch_RxBxT1: Tensor) -> Iterator[tuple[int, Tensor]]:
        """The ranks in the order in which they are added, each with its sequences of the batch."""
        for rank in self.sequence():
            self.current = rank
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

    def forget(self) -> None:
        """A step was broken off."""
        self._sums.clear()

    def finish(self, gradients: Tensor) -> None:
        """Leave the mean over all ranks in `gradients`."""
        while len(self._sums) > 1:
            self._merge()
        if self._sums:  # one rank alone adds nothing
            gradients.copy_(self._sums.pop()[1].div_(self.count))

    def mean(self, losses: Sequence[Tensor]) -> Tensor:
        """The mean over all ranks of what `parts` has led to, [R] each."""
        return losses[0] if len(losses) == 1 else sums.mean_of(losses)

    def largest(self, values: Tensor) -> Tensor:
        """The largest of all ranks, element by element, of what is the largest of those in this process; NaN wins."""
        return values

    def total(self, values: Tensor) -> Tensor:
        """The sum over all ranks, element by element, of what is the sum over those in this process."""
        return values

    def of_all(self, mine: Tensor) -> Tensor:
        """What every rank has measured, [ranks, ...], from that of the ranks in this process, in their order."""
        return mine

    def at_gradient(
        self, rank: int, gradients_RxP: Tensor, rows: Sequence[int]
    ) -> Iterator[tuple[int, Tensor, Sequence[int]]]:
        """The gradients of some rows that a strike sees after a rank's backward pass, to be changed in place.

        Each as the rank, an array [k, P], and where in it those rows are.
        """
        yield rank, gradients_RxP, rows

    def told(self, mine: Sequence[T]) -> Sequence[T]:
        """What every rank has to tell after its backward pass, of which this process has `mine`."""
        return mine

    # --- what processes have to agree on: nothing, where there is one ---------------------------------------------

    def own_share(self, count: int) -> Sequence[int]:
        """Which of `count` equal pieces of work are for this process."""
        return range(count)

    def joined(self, mine: Tensor, count: int) -> Tensor:
        """The results of all pieces in their order, [count, ...], from those of `own_share`."""
        return mine

    def agreed(self, choice: bool) -> bool:
        """The choice of rank 0."""
        return choice

    def verify(self, state: Replica) -> None:
        """Raise ReplicasDiffer unless all processes have the same state."""

    def _merge(self) -> None:
        (more, right), (count, left) = self._sums.pop(), self._sums.pop()
        total = left.add_(right)
        self._sums.append((count + more, total if self.format == "fp32" else round_to(total, self.format)))
