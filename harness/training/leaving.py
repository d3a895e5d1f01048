"""Rows that go: whose last weights they hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from torch import Tensor

from harness.training.pack import Pack

Leave = Callable[[int, Mapping[str, Tensor]], None]  # is given a planned trial's number and tensors by name


def hand_over(pack: Pack, rows: Iterable[int], leave: Leave) -> None:
    """Give `leave` the weights of rows that are about to go: of their trials, and of all whose twin they serve."""
    twins = pack.twins
    for row in rows:
        own, tensors = pack.rows[row], pack.tensors(pack.weights, row)
        if own in twins.masked:
            continue  # its twin's are handed over for it
        leave(own, tensors)
        for number, leader in enumerate(twins.leader):
            if leader == own and (number in twins.masked or number not in twins.forked):
                leave(number, tensors)
