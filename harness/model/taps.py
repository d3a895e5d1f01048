"""`tap(name, x) -> x`: the single way to read an activation (telemetry) or to change one (injection)."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

Reader = Callable[[str, Tensor], Tensor | None]


class Taps:
    """The named points of one model. With nothing attached a call returns its argument and does nothing else."""

    def __init__(self, names: list[str]):
        self.names = names
        self._attached: dict[str, list[Reader]] = {}

    def __call__(self, name: str, x: Tensor) -> Tensor:
        for reader in self._attached.get(name, ()):
            changed = reader(name, x)
            x = x if changed is None else changed
        return x

    def copied(self, name: str, x: Tensor) -> Tensor:
        """As a call, but readers get a copy: `x` has other uses, which a change made here must not reach."""
        return self(name, x.clone()) if name in self._attached else x

    def __contains__(self, name: str) -> bool:
        return name in self._attached

    def attach(self, pattern: str, reader: Reader, first: bool = False) -> Callable[[], None]:
        """Call `reader(name, x)` at every point that matches the glob; it returns a new x, or None to leave it.

        One that is attached `first` comes before those that are there already. Returns a function that detaches it.
        Raises KeyError if nothing matches.
        """
        matching = fnmatch.filter(self.names, pattern)
        if not matching:
            raise KeyError(f"no tap matches {pattern!r}; there are {', '.join(self.names)}")
        for name in matching:
            readers = self._attached.setdefault(name, [])
            readers.insert(0 if first else len(readers), reader)

        def detach() -> None:
            for name in matching:
                self._attached[name].remove(reader)
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
