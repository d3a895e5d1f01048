"""What a fault provides, of this project or of an installed package: its fields, its checks, and what arms it.

The base class lives here and not beside our own faults, so that what applies them knows none of them.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, TypeVar

from harness.basics import plugins
from harness.config import ConfigError, Fault, Trial
from harness.data.corpus import Corpus
from harness.faults.facts import Facts, Shapes, facts_of, layer_of
from harness.training.sites import Injector, Site

S = TypeVar("S")


@dataclass(frozen=True)
class InjectableFault(Fault):
    """Base of every fault. A subclass sets `kind`, adds its fields, and says how it is checked and armed.

    What it `settles` are fields that follow from others of it: a study's values of those are for other faults.
    """

    settles: ClassVar[tuple[str, ...]] = ()
    can_be_drawn: ClassVar[bool] = False
    """Whether its fields may leave open what is struck, so that a campaign draws many faults from one description."""

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

    def drawn(self, samples: int, facts: Facts) -> Iterator[InjectableFault]:
        """The first faults, in the seed's order, of all that its description allows: its own `samples`, or so many.

        Raises ConfigError for a description that allows fewer.
        """
        raise NotImplementedError

    def strike_steps(self, facts: Facts) -> range:
        """The steps at which it strikes, up to the end of the run."""
        end = facts.steps if self.duration is None else min(facts.steps, self.start + self.duration)
        return range(self.start, max(self.start, end), self.period)


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


def injector_of(trial: Trial, corpus: Corpus) -> Injector | None:
    """The trial's fault, armed."""
    if not isinstance(trial.fault, InjectableFault):
        return None
    return trial.fault.arm(facts_of(trial, corpus.train, corpus.counts))


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
