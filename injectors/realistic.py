"""Silent data corruption as simulated at the level of gates, beside the classic flip of a single bit."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from harness.config import PER_TRIAL, anything, choice, number
from harness.faults.facts import Facts
from harness.faults.fault import InjectableFault
from harness.model.formats import HELD_FORMATS
from injectors.draws import distinct, stream
from injectors.fault import located
from injectors.value import MOST_ELEMENTS, SITES, Value, asked_at
from injectors.value_strike import StrikeTarget, ValueStrike, as_int64

UNIT = 2**128  # words of the stream are below it
STRIDES = (16, 32, 64, 128)
SHARED = ("start", "duration", "period", "site", "tensor", "layer", "format", "rank")  # fields of a value fault too


@dataclass(frozen=True)
class RealisticSDC(InjectableFault):
    """Bit flips as gate-level simulation has them: most are of several bits, addresses repeat, about 1% not finite.

    Shares follow stuck-at faults in the simulated gates of a GPU, over 63 micro-benchmarks and not from the field (Tung
    et al. 2026, arXiv 2605.04213); half of what those did was to write zeros, which this leaves out (`fault.model=zero`
    of `fault=value`): `nonfinite` of the faults write NaN or an infinity, `single` of the others flip one bit in each
    element, the rest two to `most` bits, scattered. The elements of a fault stand a fixed stride apart in one tensor,
    which is drawn in proportion to its size; in one that the stride wraps around, such as the gain of a norm, they can
    be fewer.
    """

    kind: str = "realistic_sdc"
    start: int = number(PER_TRIAL, 100, "step of the (first) strike", low=0)
    site: str = choice(
        PER_TRIAL, "weight", "where in the step", *(s for s in SITES if s not in ("learning_rate", "loss_scale"))
    )
    tensor: str = anything(PER_TRIAL, "*", "glob over tensor names, or over taps for activations")
    layer: int | None = number(PER_TRIAL, None, "block of the tensor; null: any", low=0)
    elements: int = number(PER_TRIAL, 4, "elements that are struck", low=1, high=MOST_ELEMENTS)
    format: str | None = choice(
        PER_TRIAL, None, "representation in which bits flip; null: the tensor's own, and in a sweep fp32", *HELD_FORMATS
    )
    single: float = number(PER_TRIAL, 0.4, "share of bit-flip faults with a single bit", low=0, high=1)
    most: int = number(PER_TRIAL, 4, "most bits that flip in an element", low=2, high=8)
    nonfinite: float = number(PER_TRIAL, 0.01, "share of faults that write NaN or an infinity", low=0, high=1)
    rank: int = number(PER_TRIAL, 0, "data-parallel rank, for sites before the mean over ranks", low=0)

    def _value(self, model: str = "bit_flip") -> Value:
        """The value fault that changes the elements."""
        return Value(model=model, **{name: getattr(self, name) for name in SHARED})

    def of_sweep(self) -> RealisticSDC:
        return dataclasses.replace(self, format=self.format or "fp32")

    def in_own_format(self, facts: Facts) -> RealisticSDC:
        return dataclasses.replace(self, format=self._value().in_own_format(facts).format)

    def asks(self) -> tuple[str, ...]:
        return asked_at(self.site)

    def check(self, facts: Facts) -> None:
        self._value().check(facts)

    def arm(self, facts: Facts) -> ValueStrike:
        draw = stream(*facts.key("realistic"))
        kinds = ("nan", "infinity", "minus_infinity")
        value = self._value(kinds[next(draw) % 3] if next(draw) / UNIT < self.nonfinite else "bit_flip")
        names, sizes = value.candidates(facts)
        which, first = located(sizes, next(draw) % sum(sizes))
        stride = STRIDES[next(draw) % len(STRIDES)]
        flat = sorted({(first + i * stride) % sizes[which] for i in range(self.elements)})
        size = HELD_FORMATS[value.formats(facts)[names[which]]].bits
        count = 1 if next(draw) / UNIT < self.single else 2 + next(draw) % (self.most - 1)
        count = count if value.model == "bit_flip" else 0  # what is not finite has no bits of its own
        drawn = (distinct(size, count, *facts.key("bits", i)) for i in range(len(flat)))
        masks = [as_int64(sum(1 << bit for bit in bits)) for bits in drawn]
        target = StrikeTarget(names[which], np.array(flat), np.array(masks, dtype=np.int64))
        return value.strike_at((target,), facts)
