"""The population of faults that a description allows, and samples of it that are the same on every machine.

A sample is the beginning of one long order of the whole population, so a campaign can go in rounds: the sample of
n addresses is the beginning of the sample of m > n under the same seed.
"""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, islice

from harness.config import ConfigError
from harness.faults.facts import layer_of
from injectors.draws import shuffled, stream

WEIGHTS = ("size", "tensor")
STRATIFICATIONS = ("none", "tensor", "layer", "bit", "step")
MOST_STEP_STRATA = 10
NORMAL_97_5 = 1.959963984540054  # the normal distribution's quantile for a two-sided interval of 95%


@dataclass(frozen=True)
class Address:
    """Where and when a fault first strikes: a flat index into a tensor, a bit if the fault model has one, a step.

    `format` is the number format of the tensor, where the population says it.
    """

    tensor: str
    element: int
    bit: int | None
    step: int
    format: str | None = None


@dataclass(frozen=True)
class Population:
    """Every address that a description allows: tensors x elements x bits x steps.

    `shapes` are the tensors in the model's order. `bits` are different bit numbers; None where the fault model has no
    bit. `element` is the flat index that is meant in each tensor; None: any. `formats` are the number formats of the
    tensors by name, where each has its own; of several, `bits` are by format. Raises ConfigError where a tensor has no
    such element.
    """

    shapes: Mapping[str, tuple[int, ...]]
    bits: tuple[int, ...] | Mapping[str, tuple[int, ...]] | None
    steps: range
    element: int | None = None
    formats: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, shape in self.shapes.items():
            if self.element is not None and not 0 <= self.element < math.prod(shape):
                why = f"beyond tensor {name}, which has {math.prod(shape)} elements"
                raise ConfigError(f"fault.element={self.element}: {why}; allowed: 0 to {math.prod(shape) - 1}")

    @cached_property
    def _ends(self) -> list[int]:
        """For each tensor, the number of addresses in it and in those before it."""
        counts = (self._elements(name) * self._count(name) * len(self.steps) for name in self.shapes)
        return list(accumulate(counts))

    def _elements(self, name: str) -> int:
        return math.prod(self.shapes[name]) if self.element is None else 1

    def bits_of(self, name: str) -> tuple[int, ...] | None:
        """The bits of a tensor of that name."""
        return self.bits[self.formats[name]] if isinstance(self.bits, Mapping) else self.bits

    def _count(self, name: str) -> int:
        bits = self.bits_of(name)
        return 1 if bits is None else len(bits)

    @property
    def elements(self) -> int:
        """How many elements all tensors have."""
        return sum(map(self._elements, self.shapes))

    def in_formats(self) -> list[Population]:
        """The part in each number format that has bits of its own; all in one where bits are not by format."""
        if not isinstance(self.bits, Mapping):
            return [self]
        parts = []
        for name, bits in self.bits.items():
            shapes = {tensor: shape for tensor, shape in self.shapes.items() if self.formats[tensor] == name}
            parts += [dataclasses.replace(self, shapes=shapes, bits=bits)] if shapes else []
        return parts

    @cached_property
    def _names(self) -> list[str]:
        return list(self.shapes)

    @property
    def size(self) -> int:
        """How many addresses there are."""
        return self._ends[-1] if self._ends else 0

    def address(self, number: int) -> Address:
        """One of them for each number of range(size): the step runs fastest, then bit, element and tensor."""
        if not 0 <= number < self.size:
            raise IndexError(f"address {number} of a population of {self.size}")
        tensor = bisect_right(self._ends, number)
        name = self._names[tensor]
        rest, step = divmod(number - (self._ends[tensor - 1] if tensor else 0), len(self.steps))
        element, bit = divmod(rest, self._count(name))
        bits = self.bits_of(name)
        return Address(
            name,
            element if self.element is None else self.element,
            None if bits is None else bits[bit],
            self.steps[step],
            self.formats.get(name),
        )


def sample(
    population: Population, count: int, seed: int, weight: str = "size", stratify: str = "none"
) -> list[Address]:
    """The first `count` addresses of `in_order`. Raises ConfigError if there are not so many."""
    if not 0 <= count <= population.size:
        why = f"the description allows {population.size} different faults"
        raise ConfigError(f"fault.samples={count}: {why}; allowed: 0 to {population.size}")
    return list(islice(in_order(population, seed, weight, stratify), count))


def in_order(population: Population, seed: int, weight: str = "size", stratify: str = "none") -> Iterator[Address]:
    """Every address of the population once, in an order that follows from the seed.

    Weight `size`: each address that is left is as likely as any other, so a tensor is drawn in proportion to its size;
    where tensors have different numbers of bits, each element is as likely as any other, and then each of its bits.
    `tensor`: each tensor is as likely as any other, then each address in it; a tensor of which all has been drawn
    leaves the draw, and the others share its chance.

    Stratified, the strata (see `stratum_of`) take turns, in a new random order each round; the weight holds inside
    a stratum. At any point their counts differ by at most one, but for strata of which all has been drawn: those drop
    out, and the others go on.

    Raises ConfigError for words that it does not know, and for strata of bits where there are no bits.
    """
    if weight not in WEIGHTS:
        raise ConfigError(f"fault.weight={weight}: unknown; allowed: {', '.join(WEIGHTS)}")
    orders = [_inside(part, weight, seed, stratify, name) for name, part in strata(population, stratify).items()]
    return _in_turns(orders, seed)


def _in_turns(orders: list[Iterator[Address]], seed: int) -> Iterator[Address]:
    number = 0
    while orders:
        exhausted = set()
        for turn in shuffled(len(orders), seed, "round", number):
            address = next(orders[turn], None)
            if address is None:
                exhausted.add(turn)
            else:
                yield address
        orders = [order for i, order in enumerate(orders) if i not in exhausted]
        number += 1


def _inside(part: Population, weight: str, seed: int, *key: str) -> Iterator[Address]:
    """The order of one stratum."""
    if weight == "size":
        parts = [one for one in part.in_formats() if one.size]
        if len(parts) == 1:
            yield from map(parts[0].address, shuffled(parts[0].size, seed, "size", *key))
        elif parts:
            yield from _by_elements(parts, seed, *key)
        return
    tensors = [one for one in strata(part, "tensor").values() if one.size]
    orders = [map(one.address, shuffled(one.size, seed, "tensor", *key, *one.shapes)) for one in tensors]
    counts = [one.size for one in tensors]  # of what is left
    for number in stream(seed, "tensors", *key):
        if not orders:
            return
        chosen = number % len(orders)
        yield next(orders[chosen])
        counts[chosen] -= 1
        if not counts[chosen]:
            del orders[chosen], counts[chosen]


def _by_elements(parts: list[Population], seed: int, *key: str) -> Iterator[Address]:
    """Parts whose elements have different numbers of bits: each element is as likely as any other.

    A part of which all has been drawn leaves the draw.
    """
    orders = [map(one.address, shuffled(one.size, seed, "size", *key, _format_of(one))) for one in parts]
    weights, left = [one.elements for one in parts], [one.size for one in parts]
    for number in stream(seed, "formats", *key):
        chosen = bisect_right(list(accumulate(weights)), number % sum(weights))
        yield next(orders[chosen])
        left[chosen] -= 1
        if not left[chosen]:
            del orders[chosen], weights[chosen], left[chosen]
            if not orders:
                return


def _format_of(part: Population) -> str:
    """The one number format of all its tensors."""
    return part.formats[next(iter(part.shapes))]


# --- strata ------------------------------------------------------------------------------------------------------


def stratum_of(address: Address, population: Population, stratify: str) -> str:
    """The name of the stratum of an address of the population.

    `none`: all are one. `tensor`: its name. `layer`: `blocks.3` for a tensor of that block (its name up to the first
    number), and for any other the first part of its name, such as `embedding`, `head` or `final_norm`, each a stratum
    of its own. `bit`: its number, after the name of the format where there are several: `bf16 14`. `step`:
    its number, or if there are more than ten, the first and the last of its tenth of them: `100-149`.
    """
    if stratify == "bit":
        return f"{address.format} {address.bit}" if isinstance(population.bits, Mapping) else str(address.bit)
    if stratify == "step":
        return next(name for name, steps in _tenths(population.steps).items() if address.step in steps)
    return OF_TENSOR[stratify](address.tensor)


def strata(population: Population, stratify: str) -> dict[str, Population]:
    """The part of the population in each stratum, by name, in the population's order.

    Raises ConfigError as `in_order` does.
    """
    if stratify not in STRATIFICATIONS:
        raise ConfigError(f"fault.stratify={stratify}: unknown; allowed: {', '.join(STRATIFICATIONS)}")
    if stratify == "bit":
        if population.bits is None:
            allowed = ", ".join(name for name in STRATIFICATIONS if name != "bit")
            raise ConfigError(f"fault.stratify=bit: this fault changes no bit; allowed: {allowed}")
        if isinstance(population.bits, Mapping):
            parts = [(_format_of(part), strata(part, "bit")) for part in population.in_formats()]
            return {f"{form} {bit}": one for form, by_bit in parts for bit, one in by_bit.items()}
        return {str(bit): dataclasses.replace(population, bits=(bit,)) for bit in population.bits}
    if stratify == "step":
        return {name: dataclasses.replace(population, steps=part) for name, part in _tenths(population.steps).items()}
    shapes: dict[str, dict[str, tuple[int, ...]]] = {}
    for tensor, shape in population.shapes.items():
        shapes.setdefault(OF_TENSOR[stratify](tensor), {})[tensor] = shape
    return {name: dataclasses.replace(population, shapes=those) for name, those in shapes.items()}


def _layer(tensor: str) -> str:
    layer = layer_of(tensor)
    return layer[0] if layer else tensor.partition(".")[0]


OF_TENSOR: Mapping[str, Callable[[str], str]] = {"none": lambda name: "all", "tensor": str, "layer": _layer}


def _tenths(steps: range) -> dict[str, range]:
    """The steps in ten parts whose lengths differ by at most one; each on its own if there are no more than ten."""
    count = min(len(steps), MOST_STEP_STRATA)
    parts = [steps[i * len(steps) // count : (i + 1) * len(steps) // count] for i in range(count)]
    return {str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}": part for part in parts}


def half_width(count: int, share: float = 0.5) -> float:
    """Half the width of the 95% score interval of a share that is observed among `count` samples.

    Wilson 1927, Probable inference, the law of succession, and statistical inference, JASA 22. None sampled: 0.5.
    """
    squared = NORMAL_97_5**2
    return NORMAL_97_5 / (count + squared) * math.sqrt(count * share * (1 - share) + squared / 4)
