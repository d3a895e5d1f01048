"""`tap(name, x) -> x`: the single way to read an activation (telemetry) or to change one (injection)."""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

Reader = Callable[[str, Tensor], Tensor | None]
RowReader = Callable[[str, Tensor, slice], Tensor | None]
ALL = slice(None)


class Taps:
    """The named points of one model. With nothing attached a call returns its argument and does nothing else."""

    def __init__(self, names: list[str]):
        self.names = names
        self._attached: dict[str, list[RowReader]] = {}
        self._whole: Counter[str] = Counter()  # how many of those want all of x
        self.on_host = 0  # how many readers the host has to call in every pass

    def __call__(self, name: str, x: Tensor, rows: slice = ALL) -> Tensor:
        for reader in self._attached.get(name, ()):
            changed = reader(name, x, rows)
            x = x if changed is None else changed
        return x

    def __contains__(self, name: str) -> bool:
        return name in self._attached

    def attach(self, pattern: str, reader: Reader) -> Callable[[], None]:
        """Call `reader(name, x)` at every point that matches the glob; it returns a new x, or None to leave it.

        x is of the rows that pass through the model together; `attach_to_rows` tells which. Returns a function that
        detaches the reader. Raises KeyError if nothing matches.
        """
        return self.attach_to_rows(pattern, lambda name, x, rows: reader(name, x))

    def wants_all(self, name: str) -> bool:
        """Whether somebody wants more than the largest along the last axis; also while he is muted.

        So what is computed again is computed in the same way.
        """
        return self._whole[name] > 0

    def attach_to_rows(
        self, pattern: str, reader: RowReader, first: bool = False, on_host: bool = True, largest: bool = False
    ) -> Callable[[], None]:
        """As `attach`, with a reader that is told the rows of the pack whose x it is: `reader(name, x, rows)`.

        One that is attached `first` comes before those that are there already. One that is not `on_host` does the same
        with x at every step, on the device alone, so that it need not be called where a step is replayed. One that
        asks for nothing but the `largest` along the last axis may be given those, [..., 1], where x is not stored.
        """
        matching = fnmatch.filter(self.names, pattern)
        if not matching:
            raise KeyError(f"no tap matches {pattern!r}; there are {', '.join(self.names)}")
        for name in matching:
            readers = self._attached.setdefault(name, [])
            readers.insert(0 if first else len(readers), reader)
            self._whole[name] += not largest
        self.on_host += on_host

        def detach() -> None:
            self.on_host -= on_host
            for name in matching:
                self._attached[name].remove(reader)
                self._whole[name] -= not largest
                if not self._attached[name]:
                    del self._attached[name]

        return detach

    @contextmanager
    def muted(self) -> Iterator[None]:
        """Nothing attached for a while: validation is not part of the step that faults and telemetry see."""
        attached, self._attached = self._attached, {}
        try:
            yield
        finally:
            self._attached = attached


@dataclass(frozen=True)
class RowTaps:
    """The taps of a model for one pass of some rows through it."""

    taps: Taps
    rows: slice

    def __call__(self, name: str, x: Tensor) -> Tensor:
        return self.taps(name, x, self.rows)

    def copied(self, name: str, x: Tensor) -> Tensor:
        """As a call, but readers get a copy: `x` has other uses, which a change made here must not reach."""
        return self(name, x.clone()) if name in self.taps else x

    def wants_all(self, name: str) -> bool:
        """As that of the taps."""
        return self.taps.wants_all(name)

    def __contains__(self, name: str) -> bool:
        return name in self.taps
