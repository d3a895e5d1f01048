"""What a branch is: all that a block adds to the residual stream in one of its places.

A kind of branch is a subclass in a file of its own, and its name is the file's. `blocks.2.attention` is where one
stands, by block and kind, and what its tensors and taps are called begins with that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from torch import Tensor

from harness.config import Model, Trial
from harness.model.tensors import MATRICES, ModelTensor
from harness.model.tools import Tools


@dataclass(frozen=True)
class Branch:
    """One kind of branch as a recipe has it. `options` is the kind's own section, where its file defines `Options`."""

    kind: str
    model: Model
    options: Any = None

    fields: ClassVar[tuple[str, ...]] = ()
    """Fields of the section `model` that nothing but this kind reads."""
    observed: ClassVar[tuple[str, ...]] = ()
    """Its taps, by last names, that tell something and of which nothing goes on: no fault can strike there."""

    @property
    def is_normed(self) -> bool:
        """Whether a norm stands in front of it, where the placement has one there."""
        return True

    @property
    def destinations(self) -> int:
        """How many parts of it tokens are sent to; 0: all of them pass through all of it."""
        return 0

    @cached_property
    def layers(self) -> int:
        """How many matrices it has, on which Fixup's sizes depend."""
        return sum(tensor.kind in MATRICES for tensor in self.tensors())

    def at(self, block: int) -> Branch:
        """What stands there in a block, by its number: itself, or one of another kind."""
        return self

    def tensors(self) -> Iterator[ModelTensor]:
        """Its tensors by their last names: matrices, gains of norms, and the summands that Fixup has in it.

        Biases of matrices and norms, and factors of sigma-reparametrisation, come by themselves.
        """
        raise NotImplementedError

    def taps(self, sequences: int) -> Mapping[str, tuple[int, ...]]:
        """What taps inside of it can reach, by last names in the order of the forward pass: shapes for one trial."""
        raise NotImplementedError

    def routes(self, sequences: int) -> Mapping[str, tuple[int, ...]]:
        """Taps at which integers pass, likewise: the numbers of its `destinations` as tokens are sent to them."""
        return {}

    def kept(self) -> int:
        """Values that one token leaves for the backward pass, its norms included."""
        raise NotImplementedError

    def state_bytes(self, trial: Trial, of_weights: int) -> int:
        """Memory that a trial's row keeps from step to step because of it, where its weights take `of_weights`."""
        return 0

    def operations(self) -> int:
        """Multiplications of one token, in a forward pass, beside those with the matrices."""
        return 0

    def refused(self, trial: Trial) -> Iterator[str]:
        """What it cannot be in this trial, each a line with key, value, and what is allowed."""
        yield from ()

    def parts(self, trial: Trial) -> Iterator[str]:
        """The keys of what acts at some steps and not at others, and is told to `tools.notice` when it does."""
        yield from ()

    def idle(self, trial: Trial) -> Iterator[tuple[str, str]]:
        """(key, why) of what cannot act in this trial."""
        yield from ()

    def __call__(self, tools: Tools, name: str, x_RxNxD: Tensor, context: int) -> Tensor:
        """What it gives, [R, N, D], of N tokens in sequences of `context`; `name` is where it stands."""
        raise NotImplementedError


Branches = tuple[Branch, ...]
