"""Where faults can strike: the named sites of one training step, and the agenda of what is due at them.

The loop knows only this file. An injector is given the tensors of one trial at one site, never the loop.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from torch import Tensor


class Site(StrEnum):
    """A point of the step, in the order of the loop; `strike` receives the tensors that are named here."""

    LEARNING_RATE = "learning_rate"  # {"learning_rate": []}
    BATCH = "batch"  # {"batch": [B, T + 1] token ids}
    WEIGHT = "weight"  # each tensor of the model, before it is read
    REDUCED_GRADIENT = "reduced_gradient"  # each tensor's gradient, before clipping
    CLIPPED_GRADIENT = "clipped_gradient"  # each tensor's gradient, after clipping
    MOMENT_1 = "moment_1"  # Adam's first moment of each tensor, before the optimizer step
    MOMENT_2 = "moment_2"  # Adam's second moment of each tensor, before the optimizer step


@dataclass(frozen=True)
class Event:
    """What one strike did: the address, and the value there before and after.

    `before` and `after` are decimal for numbers, with the raw bits beside them in hexadecimal; for a whole batch
    they are SHA-256 digests of its token ids.
    """

    site: str
    tensor: str
    index: tuple[int, ...] | None
    bit: int | None
    step: int
    before: str
    after: str
    bits_before: str | None
    bits_after: str | None
    changed: bool

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "index": list(self.index) if self.index is not None else None}


class Injector(Protocol):
    """One trial's fault, ready to strike."""

    @property
    def site(self) -> Site: ...

    @property
    def steps(self) -> range: ...

    def strike(self, tensors: Mapping[str, Tensor], step: int) -> list[Event]:
        """Change the trial's tensors in place, and say what was done."""
        ...


class Agenda:
    """Which trial's injector is due where and when; asked at every site of every step, so it is one dict look-up."""

    def __init__(self, injectors: Sequence[Injector | None]):
        self.injectors = list(injectors)
        self.events: list[list[Event]] = [[] for _ in injectors]
        self._due: dict[tuple[Site, int], list[int]] = {}
        for trial, injector in enumerate(injectors):
            if injector is not None:
                for step in injector.steps:
                    self._due.setdefault((injector.site, step), []).append(trial)

    def due(self, site: Site, step: int) -> Sequence[int]:
        """The trials (numbers in the pack as planned) that are struck here and now."""
        return self._due.get((site, step), ())

    def strike(self, trial: int, tensors: Mapping[str, Tensor], step: int) -> None:
        """Let one trial's injector strike, and keep its events."""
        injector = self.injectors[trial]
        assert injector is not None
        self.events[trial] += injector.strike(tensors, step)
