"""Faults in a training loop of the user's own: any model of torch, by the names of its tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from harness.training.sites import Event, Site, Visit
from injectors.facts import Facts
from injectors.fault import InjectableFault


class Armed:
    """A fault that is checked and armed once, and then told of every site of every step that the loop comes by.

    Raises ConfigError for a fault that the run of these facts cannot have. `examples/fault/own_loop.py` is such a loop.
    """

    def __init__(self, fault: InjectableFault, facts: Facts):
        fault = fault.resolved()
        fault.check(facts)
        self.injector = fault.arm(facts)
        self._calls = frozenset(self.injector.calls)

    def strike(
        self, site: str, step: int, tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]], rank: int = 0
    ) -> list[Event]:
        """Change the tensors in place if the fault is due, and say what was done.

        `tensors` are named as in the facts, and are what `Site` says of the site: `model.named_parameters()` at
        `weight`, their gradients at `gradient`, which comes once for each `rank`. A fault of the site `update` is told
        of `before_update` too. Raises ValueError for a site that does not exist.
        """
        place = Site(site)
        if (place, step) not in self._calls:
            return []
        with torch.no_grad():
            return self.injector.visit(Visit(place, step, dict(tensors), rank))
