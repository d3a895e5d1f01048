"""What an injector's file provides: a frozen dataclass of the fault's fields that can be armed for one trial."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from harness.config import ConfigError, Fault, Trial
from harness.scaling import tensor_table
from harness.sites import Injector


@dataclass(frozen=True)
class FaultContext:
    """What a fault may know of the trial that it strikes: shapes, the corpus' token counts and its own seed."""

    shapes: Mapping[str, tuple[int, ...]]
    token_counts: np.ndarray
    seed: int

    def generator(self, *words: int) -> np.random.Generator:
        """A random stream that depends on the fault's seed and `words` alone."""
        return np.random.Generator(np.random.Philox(np.random.SeedSequence([self.seed, *words])))


@dataclass(frozen=True)
class InjectableFault(Fault):
    """Base of every fault. A subclass sets `kind`, adds its fields, and says how it is checked and armed."""

    def check(self, trial: Trial, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Refuse what can be refused before anything is trained. Raises ConfigError."""

    def arm(self, context: FaultContext) -> Injector:
        """The injector that strikes in the steps from `start` on, `duration` of them."""
        raise NotImplementedError

    @property
    def steps(self) -> range:
        return range(self.start, self.start + self.duration)


def shapes_of(trial: Trial, vocabulary: int) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor of the trial's model."""
    return {row.name: row.shape for row in tensor_table(trial.model, vocabulary)}


def matching(pattern: str, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """The tensors whose name matches the glob. Raises ConfigError if there is none."""
    found = fnmatch.filter(shapes, pattern)
    if not found:
        raise ConfigError(
            f"fault.tensor={pattern}: matches no tensor of this model; allowed: a glob over {', '.join(shapes)}"
        )
    return found
