"""What files of faults share: the base of injectors that strike at one site, and what they say of a strike."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from harness.basics.tensor_bytes import byte_view
from harness.config import ConfigError
from harness.faults.facts import Facts
from harness.faults.fault import InjectableFault, matching
from harness.model.formats import real_view
from harness.optim.optimizers import OPTIMIZERS
from harness.training.sites import Event, Site, SiteCall
from injectors.draws import stream

__all__ = [
    "Armed",
    "InjectableFault",
    "Strike",
    "digest",
    "located",
    "matching",
    "optimizers_with",
    "random_tokens",
    "replaced",
    "too_late",
    "whole_event",
    "wrong_rank",
]


class Armed:
    """A fault that is checked and armed once, and then told of every site of every step that the loop comes by.

    Raises ConfigError for a fault that the run of these facts cannot have. Example: `examples/fault/user_loop.py`.
    """

    def __init__(self, fault: InjectableFault, facts: Facts):
        fault = fault.resolved()
        fault.check(facts)
        self._shapes = {**facts.tensors, **facts.buffers}
        self.injector = fault.arm(facts)
        self._calls = frozenset(self.injector.calls)

    def strike(
        self, site: str, step: int, tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]], rank: int = 0
    ) -> list[Event]:
        """Change the tensors in place if the fault is due, and say what was done.

        `tensors` are named as in the facts, and are what `Site` says of the site: `model.named_parameters()` at
        `weight`, their gradients at `gradient`, which comes once for each `rank`. A fault of the site `update` is told
        of `before_update` too. Raises ValueError for a site that does not exist, and ConfigError for tensors that are
        held in another number format than the facts say, or whose facts leave out that they are complex.
        """
        place = Site(site)
        if (place, step) not in self._calls:
            return []
        with torch.no_grad():
            real = {name: self._real(name, x) for name, x in dict(tensors).items()}
            return self.injector.visit(SiteCall(place, step, real, rank))

    def _real(self, name: str, x: Tensor) -> Tensor:
        parts = real_view(x)
        if x.is_complex() and (said := self._shapes.get(name, parts.shape)) != tuple(parts.shape):
            why = f"its numbers are complex, and the facts of the run say {list(said)}"
            raise ConfigError(f"fault.tensor={name}: {why}; allowed: Facts(tensors=...) that say {list(parts.shape)}")
        return parts


@dataclass
class Strike:
    """Base of injectors that strike at one site.

    `looks` are calls at which it only looks, at what a later strike needs.
    """

    site: Site
    steps: range
    permanent: bool
    taps: tuple[str, ...] = ()
    looks: tuple[tuple[Site, int], ...] = ()

    is_by_tensor: ClassVar[bool] = False
    """Whether a visit may bring some tensors of the site, and later ones the others."""
    remembers: ClassVar[tuple[str, ...]] = ()
    """The attributes that a later step needs: tensors or None, and what JSON holds."""

    @property
    def calls(self) -> list[tuple[Site, int]]:
        # A step can be one to look at and one to strike.
        return list(dict.fromkeys([*self.looks, *((self.site, step) for step in self.steps)]))

    @property
    def memory(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.remembers}

    def recall(self, memory: Mapping[str, Any]) -> None:
        for name in self.remembers:
            setattr(self, name, memory[name])

    def visit(self, site_call: SiteCall) -> list[Event]:
        if site_call.site == self.site and site_call.step in self.steps:
            return self.strike(site_call)
        self.look(site_call)
        return []

    def look(self, site_call: SiteCall) -> None:
        """See what a later strike needs."""

    def strike(self, site_call: SiteCall) -> list[Event]:
        """Change the tensors, and say what was done."""
        raise NotImplementedError


def wrong_rank(rank: int, facts: Facts) -> Iterator[str]:
    """The reason against a data-parallel rank that a run of so many does not have, if there is one."""
    if rank >= facts.ranks:
        yield f"fault.rank={rank}: beyond {facts.said('train.ranks', facts.ranks)}; allowed: 0 to {facts.ranks - 1}"


def too_late(late: int, start: int) -> Iterator[str]:
    """The reason against something of `late` steps before the first strike, if there is no such step."""
    if late > start:
        yield f"fault.late={late}: before the first step; allowed: 1 to fault.start={start}"


def optimizers_with(slot: str, facts: Facts) -> str:
    """Our optimizers that have such an array, as an error lists what else is allowed; nothing for other runs."""
    return ", ".join(name for name, cls in OPTIMIZERS.items() if slot in cls.slots) if facts.is_ours else ""


def located(sizes: list[int], address: int) -> tuple[int, int]:
    """Which of several tensors of these `sizes`, laid end to end, has the element `address`, and its index in there."""
    ends = list(accumulate(sizes))
    which = bisect_right(ends, address)
    return which, address - ends[which] + sizes[which]


def digest(*tensors: Tensor) -> str:
    """SHA-256 of the bytes of whole tensors, one after the other."""
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(byte_view(tensor.detach().cpu()).numpy().tobytes())
    return sha.hexdigest()


def whole_event(site_call: SiteCall, name: str, before: str, tensors: Iterable[Tensor]) -> list[Event]:
    """The one event of a strike at whole tensors, whose `digest` was `before`."""
    after = digest(*tensors)
    return [
        Event(
            site_call.site, name, None, None, site_call.step, before, after, None, None, before != after, site_call.rank
        )
    ]


def replaced(site_call: SiteCall, tensors: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> list[Event]:
    """Put `values` in place of `tensors`, which are all of a rank or a part of them: one event."""
    before = digest(*tensors.values())
    for name, tensor in tensors.items():
        tensor.copy_(values[name])
    return whole_event(site_call, "*", before, tensors.values())


def random_tokens(count: int, choices: int, *key: Any) -> np.ndarray:
    """[count] integers of range(choices), uniform, the same on every machine."""
    return np.array([number % choices for number in islice(stream(*key), count)], dtype=np.int64)
