"""What an injector's file provides: a frozen dataclass of the fault's fields that can be armed for one trial."""

from __future__ import annotations

import fnmatch
import hashlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, islice
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from torch import Tensor

from harness.basics import plugins
from harness.config import ConfigError, Fault
from harness.model.formats import real_view
from harness.optim.optimizers import OPTIMIZERS
from harness.training.sites import Event, Injector, Site, Visit
from injectors.draws import stream
from injectors.facts import Facts, Shapes, layer_of

S = TypeVar("S")


@dataclass(frozen=True)
class InjectableFault(Fault):
    """Base of every fault. A subclass sets `kind`, adds its fields, and says how it is checked and armed.

    What it `settles` are fields that follow from others of it: a study's values of those are for other faults.
    """

    settles: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        if self.name == "none":
            object.__setattr__(self, "name", self.kind)

    def resolved(self) -> InjectableFault:
        """The fault with everything in it that it refers to. Raises ConfigError."""
        return self

    def of_sweep(self) -> InjectableFault:
        """The fault as trials of our GPT have it, whose ids and records name every field."""
        return self

    def in_own_format(self, facts: Facts) -> InjectableFault:
        """The fault with the number format of what it strikes, where it names none and all of that has the same."""
        return self

    def asks(self) -> tuple[str, ...]:
        """The facts, by name, beyond steps and tensors without which it cannot strike."""
        return ()

    def check(self, facts: Facts) -> None:
        """Refuse what can be refused before anything is trained. Raises ConfigError."""
        if reasons := list(self.refused(facts)):
            raise ConfigError(*reasons)

    def refused(self, facts: Facts) -> Iterator[str]:
        """What it cannot be in such a run, each a line with key, value, and what is allowed, or a ConfigError."""
        yield from ()

    def wrong_format(self, facts: Facts) -> Iterator[str]:
        """What the number formats of the tensors that it strikes do not have, each a line."""
        yield from ()

    def check_corpus(self, fingerprint: str) -> None:
        """Refuse a corpus on which this fault means nothing. Raises ConfigError."""

    def arm(self, facts: Facts) -> Injector:
        """The injector that strikes at the steps that `strike_steps` gives."""
        raise NotImplementedError

    def armed(
        self,
        strike: Callable[..., S],
        site: Site,
        facts: Facts,
        look_at: Site | None = None,
        before: int = 0,
        /,
        **more: Any,
    ) -> S:
        """The injector that strikes at the steps of the fault, and looks `before` each of them at another site."""
        steps = self.strike_steps(facts)
        looks = tuple((look_at, step - before) for step in steps) if look_at else ()
        return strike(site, steps, self.duration is None, looks=looks, **more)

    def strike_steps(self, facts: Facts) -> range:
        """The steps at which it strikes, up to the end of the run."""
        end = facts.steps if self.duration is None else min(facts.steps, self.start + self.duration)
        return range(self.start, max(self.start, end), self.period)


class Armed:
    """A fault that is checked and armed once, and then told of every site of every step that the loop comes by.

    Raises ConfigError for a fault that the run of these facts cannot have. `examples/fault/own_loop.py` is such a loop.
    """

    def __init__(self, fault: InjectableFault, facts: Facts):
        fault = fault.resolved()
        fault.check(facts)
        self._shapes = facts.tensors
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
            return self.injector.visit(Visit(place, step, real, rank))

    def _real(self, name: str, x: Tensor) -> Tensor:
        parts = real_view(x)
        if x.is_complex() and (said := self._shapes.get(name, parts.shape)) != tuple(parts.shape):
            why = f"its numbers are complex, and the facts of the run say {list(said)}"
            raise ConfigError(f"fault.tensor={name}: {why}; allowed: Facts(tensors=...) that say {list(parts.shape)}")
        return parts


@cache
def fault_types() -> dict[str, type[Fault]]:
    """Every kind of fault by name, of this folder and of installed packages, and `none`."""
    plugins.modules("faults")
    types: dict[str, type[Fault]] = {"none": Fault}
    pending = InjectableFault.__subclasses__()
    for cls in pending:
        pending += cls.__subclasses__()
        if (kind := cls().kind) != "none":  # else: a base of others
            types[kind] = cls
    return types


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

    def visit(self, visit: Visit) -> list[Event]:
        if visit.site == self.site and visit.step in self.steps:
            return self.strike(visit)
        self.look(visit)
        return []

    def look(self, visit: Visit) -> None:
        """See what a later strike needs."""

    def strike(self, visit: Visit) -> list[Event]:
        """Change the tensors, and say what was done."""
        raise NotImplementedError


def matching(key: str, pattern: str, shapes: Shapes, layer: int | None = None, what: str = "tensor") -> list[str]:
    """The names that match the glob, in `layer` alone if that is given. Raises ConfigError if there is none."""
    names = fnmatch.filter(shapes, pattern)
    if not names:
        raise ConfigError(f"{key}={pattern}: matches no {what} of this model; allowed: a glob over {', '.join(shapes)}")
    if layer is None:
        return names
    layers = {name: found[1] for name in names if (found := layer_of(name))}
    inside = [name for name in names if layers.get(name) == layer]
    if not inside:
        allowed = f"0 to {max(layers.values())}" if layers else "null"
        raise ConfigError(f"fault.layer={layer}: no {what} of it matches {key}={pattern}; allowed: {allowed}")
    return inside


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
        sha.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def whole_event(visit: Visit, name: str, before: str, tensors: Iterable[Tensor]) -> list[Event]:
    """The one event of a strike at whole tensors, whose `digest` was `before`."""
    after = digest(*tensors)
    return [Event(visit.site, name, None, None, visit.step, before, after, None, None, before != after, visit.rank)]


def replaced(visit: Visit, tensors: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> list[Event]:
    """Put `values` in place of `tensors`, which are all of a rank or a part of them: one event."""
    before = digest(*tensors.values())
    for name, tensor in tensors.items():
        tensor.copy_(values[name])
    return whole_event(visit, "*", before, tensors.values())


def random_tokens(count: int, choices: int, *key: Any) -> np.ndarray:
    """[count] integers of range(choices), uniform, the same on every machine."""
    return np.array([number % choices for number in islice(stream(*key), count)], dtype=np.int64)
