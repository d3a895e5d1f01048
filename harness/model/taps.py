"""`tap(name, x) -> x`: the single way to read an activation (telemetry) or to change one (injection)."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

from harness.config import Model
from harness.model.placements import placement_of
from harness.model.tensors import feedforward_size

Reader = Callable[[str, Tensor], Tensor | None]


def tap_shapes(model: Model, sequences: int, vocabulary: int) -> dict[str, tuple[int, ...]]:
    """Every activation that a tap can reach, in the order of the forward pass, and its shape for one trial.

    `sequences` are those that pass at once: the batch, or one rank's part of it. Where a norm stands in front of a
    branch, `input` is what it is fed; where none stands there, what the branch reads. Where one stands behind the
    sum, as in post-LN, `sum` is what it is fed, and the branch reads the residual stream as it is. The tap of a matrix
    shows what it gives, before a norm on that.
    """
    tokens, context, width = sequences * model.context, model.context, model.width
    stream, heads = (tokens, width), (sequences, width // model.head_dim, context)
    shapes: dict[str, tuple[int, ...]] = {"embedding": stream}
    for i in range(model.depth):
        is_after = placement_of(model, i).after
        attention = {"input": stream} | dict.fromkeys(("query", "key", "value"), (*heads, model.head_dim))
        attention |= {"scores": (*heads, context), "projection": stream, "sum": stream}
        feedforward = {"input": stream, "up": (tokens, feedforward_size(model)), "down": stream, "sum": stream}
        for part, inside in (("attention", attention), ("feedforward", feedforward)):
            del inside["input" if is_after else "sum"]
            shapes |= {f"blocks.{i}.{part}.{name}": shape for name, shape in inside.items()}
        shapes[f"blocks.{i}.residual"] = stream
    return {**shapes, "head.input": stream, "logits": (tokens, vocabulary)}


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
