"""Values that change where they stand: bits that flip or stick, numbers that are set, scaled, rounded or noisy.

One family for every tensor of the step, because what changes does not depend on where: weights, gradients, moments,
updates, activations and their gradients, the learning rate and the loss scale.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from harness.config import PER_TRIAL, ConfigError, anything, choice, number
from harness.model.formats import FORMATS
from harness.training.sites import AT_TAPS, Site
from injectors.addresses import STRATIFICATIONS, WEIGHTS, Address, Population
from injectors.bits import OPERATIONS
from injectors.draws import distinct, stream
from injectors.facts import Facts, Shapes
from injectors.fault import InjectableFault, elements_of, located, matching, optimizers_with, wrong_rank
from injectors.numbers import wrong_number
from injectors.value_strike import CONSTANTS, Change, Target, ValueStrike

SCALARS = {Site.LEARNING_RATE: "learning_rate", Site.LOSS_SCALE: "loss_scale"}
SITES = tuple(site for site in Site if site not in (Site.BATCH, Site.BEFORE_UPDATE))
MOMENTS = (Site.MOMENT_1, Site.MOMENT_2)
MODELS = (*OPERATIONS, *CONSTANTS, "set", "scale", "noise", "sign", "round")
MOST_ELEMENTS = 10**6  # each is drawn on its own
MOST_FAULTS = 10**5  # of the campaigns of a command, whose plan takes a minute then


@dataclass(frozen=True)
class Value(InjectableFault):
    """Change elements of the tensors of a site, the same elements at every strike.

    Which elements (`tensor`, `layer`, `element`, `elements`) and which bits (`bit`, `field`, `bits`) is drawn with the
    fault's seed as far as it is left open. `format` is the representation in which bits are changed: a value is
    converted, changed and converted back, and no other element changes. Other fault models round what they write to
    it, so that a number scaled past 65,504 overflows in fp16; `round` does that alone.
    Cf. He et al. 2023, doi 10.1145/3579371.3589105.

    With `block` the tensor is kept as 8-bit optimizers keep their state (Dettmers et al. 2022, arXiv 2110.02861,
    section 2; their blocks have 2048 elements, and numbers of a type of their own): so many neighbouring elements, in
    the order of the flat tensor, are divided by the largest of them and multiplied by the largest finite number of the
    format. Without it most of a second moment is zero in a format of 8 bits.
    """

    kind: str = "value"
    start: int = number(PER_TRIAL, 100, "step of the (first) strike", low=0)
    site: str = choice(PER_TRIAL, "weight", "where in the step", *SITES)
    tensor: str = anything(PER_TRIAL, "*", "glob over tensor names, or over taps for activations")
    layer: int | None = number(PER_TRIAL, None, "block of the tensor; null: any", low=0)
    element: int | None = number(PER_TRIAL, None, "flat index into the tensor; null: drawn with the seed", low=0)
    elements: int | None = number(
        PER_TRIAL,
        1,
        "how many elements of the matching tensors are drawn; null: all elements of all of them",
        low=1,
        high=MOST_ELEMENTS,
    )
    model: str = choice(PER_TRIAL, "bit_flip", "how a value changes", *MODELS)
    format: str = choice(PER_TRIAL, "fp32", "representation in which bits change, or to round to", *FORMATS)
    block: int | None = number(
        PER_TRIAL,
        None,
        "neighbouring elements of a tensor that share a scale in `format`, as 8-bit optimizers keep their state; null: "
        "no scale",
        low=1,
        high=MOST_ELEMENTS,
    )
    bit: int | None = number(
        PER_TRIAL, None, "0: last bit of the mantissa; the highest: sign; null: drawn from `field`", low=0, high=31
    )
    field: str = choice(PER_TRIAL, "any", "bits to draw from", "any", "sign", "exponent", "mantissa")
    bits: int = number(PER_TRIAL, 1, "bits that change in each element", low=1, high=32)
    spread: str = choice(PER_TRIAL, "adjacent", "several bits: side by side, or anywhere", "adjacent", "scattered")
    value: float = number(
        PER_TRIAL, 0.0, "what to set, the factor to scale by, or the noise's standard deviation", is_double=True
    )
    rank: int = number(PER_TRIAL, 0, "data-parallel rank, for sites before the mean over ranks", low=0)
    samples: int | None = number(
        PER_TRIAL,
        None,
        "a campaign: so many different faults are drawn from what is left open; null: one fault",
        low=1,
        high=MOST_FAULTS,
    )
    until: int | None = number(PER_TRIAL, None, "in a campaign, the last step of the first strike; null: start", low=0)
    weight: str = choice(PER_TRIAL, "size", "in a campaign, tensors count by size or all alike", *WEIGHTS)
    stratify: str = choice(PER_TRIAL, "none", "in a campaign, what gets equal shares of the faults", *STRATIFICATIONS)

    def check(self, facts: Facts) -> None:
        shapes, what = self.shapes(facts), "activation" if self.site in AT_TAPS else "tensor"
        if what == "activation" and self.tensor.endswith(".scores") and not facts.keeps_scores:
            raise ConfigError(
                f"fault.tensor={self.tensor}: attention is fused in this model, and keeps no scores; "
                f"allowed: other activations, or model.attention=explicit"
            )
        names = matching("fault.tensor", self.tensor, shapes, self.layer, what)
        sizes = elements_of(shapes, names)
        reasons = self._missing(facts)
        if self.element is not None and self.element >= min(sizes):
            reasons.append(
                f"fault.element={self.element}: beyond fault.tensor={self.tensor}, whose smallest match has "
                f"{min(sizes)} elements; allowed: 0 to {min(sizes) - 1}"
            )
        if self.element is not None and self.elements != 1:
            given = "null" if self.elements is None else self.elements
            reasons.append(f"fault.elements={given}: but fault.element={self.element} is one; allowed: 1")
        if self.elements is not None and self.elements > sum(sizes):
            reasons.append(
                f"fault.elements={self.elements}: more than fault.tensor={self.tensor} has; allowed: 1 to {sum(sizes)}"
            )
        if self.model in OPERATIONS:
            reasons += self._wrong_bits()
        reasons += self._wrong_block()
        reasons += wrong_number(self.model, self.value, self.format, facts.precision)
        reasons += self._wrong_samples(facts.steps)
        reasons += wrong_rank(self.rank, facts.ranks)
        if reasons:
            raise ConfigError(*reasons)

    def _missing(self, facts: Facts) -> list[str]:
        if self.site == Site.LOSS_SCALE and not facts.has_loss_scale:
            return [
                "fault.site=loss_scale: train.loss_scaling=none has no scale; "
                "allowed: another site, or train.loss_scaling=static or dynamic"
            ]
        if self.site not in MOMENTS or self.site in facts.slots:
            return []
        others = ", ".join([*facts.slots, "a site that is no moment"])
        return [
            f"fault.site={self.site}: optim.name={facts.optimizer} keeps no such array; "
            f"allowed: {others}, or optim.name={optimizers_with(self.site)}"
        ]

    def _wrong_bits(self) -> list[str]:
        size, choices = FORMATS[self.format].bits, FORMATS[self.format].field(self.field)
        if self.bit is not None and self.bit >= size:
            return [f"fault.bit={self.bit}: beyond fault.format={self.format}; allowed: 0 to {size - 1}"]
        if self.spread == "adjacent" and self.bit is not None and self.bit + self.bits > size:
            last = size - self.bits
            return [
                f"fault.bit={self.bit}: fault.bits={self.bits} from there leave fault.format={self.format}; "
                f"allowed: 0 to {last}"
            ]
        most = len(choices) + (self.bit is not None and self.bit not in choices)
        if self.bits > most and (self.bit is None or self.spread == "scattered"):
            return [f"fault.bits={self.bits}: more than fault.field={self.field} has; allowed: 1 to {most}"]
        return []

    def _wrong_block(self) -> list[str]:
        if self.block is None:
            return []
        if self.format == "fp32":
            return [f"fault.block={self.block}: fault.format=fp32 needs no scale; allowed: null, or a narrower format"]
        if self.site in (*SCALARS, Site.UPDATE):
            return [f"fault.block={self.block}: nobody keeps fault.site={self.site} in blocks; allowed: null"]
        return []

    def _wrong_samples(self, steps: int) -> list[str]:
        if self.samples is None:
            alone = {"until": None, "weight": "size", "stratify": "none"}
            return [
                f"fault.{name}={getattr(self, name)}: only in a campaign; allowed with fault.samples=null: "
                f"{'null' if default is None else default}"
                for name, default in alone.items()
                if getattr(self, name) != default
            ]
        reasons = []
        if self.elements != 1:
            given = "null" if self.elements is None else self.elements
            reasons.append(f"fault.elements={given}: a campaign draws single elements; allowed with fault.samples: 1")
        if self.until is not None and not self.start <= self.until < steps:
            allowed = f"fault.start={self.start} to {steps - 1}"
            reasons.append(f"fault.until={self.until}: outside of the run after the start; allowed: {allowed}")
        if self.stratify == "bit" and self.model not in OPERATIONS:
            reasons.append(
                f"fault.stratify=bit: fault.model={self.model} changes no bits; allowed: none, tensor, layer, step"
            )
        return reasons

    def population(self, facts: Facts) -> Population:
        """Every fault that the description allows."""
        shapes = self.shapes(facts)
        names = matching("fault.tensor", self.tensor, shapes, self.layer)
        bits = None
        if self.model in OPERATIONS:
            choices = FORMATS[self.format].field(self.field)
            adjacent = self.bits if self.spread == "adjacent" else 1
            bits = tuple(choices[: len(choices) - adjacent + 1]) if self.bit is None else (self.bit,)
        steps = range(self.start, (self.start if self.until is None else self.until) + 1)
        return Population({name: shapes[name] for name in names}, bits, steps, self.element)

    def at(self, address: Address, seed: int) -> Value:
        """The one fault of a campaign at an address. What is still drawn follows from the campaign's `seed` and it."""
        draws = self.model == "noise" or (self.bits > 1 and self.spread == "scattered")
        key = (seed, address.tensor, address.element, -1 if address.bit is None else address.bit, address.step)
        return dataclasses.replace(
            self,
            start=address.step,
            tensor=address.tensor,
            layer=None,
            element=address.element,
            bit=address.bit,
            field=self.field if draws else "any",
            seed=next(stream("fault", *key)) % 2**63 if draws else None,
            samples=None,
            until=None,
            weight="size",
            stratify="none",
        )

    def shapes(self, facts: Facts) -> Shapes:
        """What stands at the site, by name."""
        if self.site in SCALARS:
            return {SCALARS[Site(self.site)]: ()}
        return facts.taps if self.site in AT_TAPS else facts.tensors

    def arm(self, facts: Facts) -> ValueStrike:
        return self.strike_at(self._targets(facts), facts)

    def strike_at(self, targets: tuple[Target, ...], facts: Facts) -> ValueStrike:
        """The injector that changes these elements."""
        steps, site = self.strike_steps(facts), Site(self.site)
        looks = tuple((Site.BEFORE_UPDATE, step) for step in steps) if site == Site.UPDATE else ()
        taps = tuple(target.tensor for target in targets) if site in AT_TAPS else ()
        mask = self.mask(facts, 0)
        change = Change(self.model, self.value, self.format, self.block, mask, facts.seed)
        return ValueStrike(
            site, steps, self.duration is None, taps, looks, change=change, targets=targets, rank=self.rank
        )

    def _targets(self, facts: Facts) -> tuple[Target, ...]:
        shapes = self.shapes(facts)
        names = matching("fault.tensor", self.tensor, shapes, self.layer)
        if self.elements is None:
            return tuple(Target(name, None, None) for name in names)
        sizes = elements_of(shapes, names)
        if self.element is not None:
            drawn = distinct(len(names), 1, *facts.key("tensor"))
            places = [(drawn[0], self.element)]
        else:
            drawn = distinct(sum(sizes), self.elements, *facts.key("address"))
            places = [located(sizes, address) for address in drawn]
        masks = {place: self.mask(facts, i) for i, place in enumerate(places)}
        targets = []
        for which in sorted({which for which, _ in places}):
            flat = sorted(element for number, element in places if number == which)
            found = [masks[which, element] for element in flat]
            targets.append(Target(names[which], np.array(flat), np.array(found, dtype=np.int64)))
        return tuple(targets)

    def mask(self, facts: Facts, element: int) -> int:
        """The bits that change in the element, as an integer of the format."""
        if self.model not in OPERATIONS:
            return 0
        if self.bit is not None and (self.spread == "adjacent" or self.bits == 1):
            return ((1 << self.bits) - 1) << self.bit
        choices = FORMATS[self.format].field(self.field)
        if self.spread == "adjacent":
            low = choices[next(stream(*facts.key("bit", element))) % (len(choices) - self.bits + 1)]
            return ((1 << self.bits) - 1) << low
        fixed = [] if self.bit is None else [self.bit]
        rest = [bit for bit in choices if bit not in fixed]
        drawn = distinct(len(rest), self.bits - len(fixed), *facts.key("bit", element))
        return sum(1 << bit for bit in [*fixed, *(rest[i] for i in drawn)])
