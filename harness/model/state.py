"""What training changes, as named arrays with a row for each trial, which come, go and are copied together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from harness.model.formats import raw_words


class Rows:
    """An array [capacity, ...] of which the first rows are in use: [R, ...].

    Rows come and go without the array being made anew. Memory that no row has used yet is not taken on a CPU.
    """

    def __init__(self, used: Tensor, capacity: int):
        self._room = used.new_zeros(capacity, *used.shape[1:]) if capacity > len(used) else used
        self._room[: len(used)] = used
        self.used = self._room[: len(used)]

    def arrange(self, sources: Sequence[int]) -> None:
        """Row i becomes a copy of what row `sources[i]` is now.

        Rows that move go to the front in their order, and what a new row copies stays where it is: nothing is
        overwritten before it has been copied.
        """
        for target, source in enumerate(sources):
            if target != source:
                self._room[target].copy_(self._room[source])
        self.used = self._room[: len(sources)]


class State:
    """Every array [R, ...] that training changes, by name. Whoever adds one reads and writes its `used` in place.

    `capacity` is the most rows that there will be.
    """

    def __init__(self, capacity: int):
        self.capacity = capacity
        self._rows: dict[str, Rows] = {}
        self._scratch: set[str] = set()

    def add(self, name: str, values: Tensor, scratch: bool = False) -> Rows:
        """Take in an array [R, ...]. `scratch` is written anew at every step, so that nothing is lost without it.

        Raises ValueError for a name that is taken.
        """
        if name in self._rows:
            raise ValueError(f"state {name!r} is there already")
        self._rows[name] = Rows(values, self.capacity)
        if scratch:
            self._scratch.add(name)
        return self._rows[name]

    def arrange(self, sources: Sequence[int]) -> None:
        """Row i goes on with the state of what row `sources[i]` is now."""
        for rows in self._rows.values():
            rows.arrange(sources)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Name and [R, ...] of every array but the scratch ones."""
        return ((name, rows.used) for name, rows in self._rows.items() if name not in self._scratch)

    def of_rows(self, rows: int) -> dict[str, Tensor]:
        """The same of the first rows alone."""
        return {name: values[:rows] for name, values in self}

    def equal(self, left: int, right: int) -> bool:
        """Whether two rows are the same, bit for bit."""
        return all(torch.equal(raw_words(values[left]), raw_words(values[right])) for _, values in self)
