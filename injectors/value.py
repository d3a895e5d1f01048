"""Values that change where they stand: bits that flip or stick, numbers that are set, scaled, rounded or noisy.

One family for every tensor of the step, because what changes does not depend on where: weights, gradients, moments,
updates, activations and their gradients, the learning rate and the loss scale.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from harness.config import PER_TRIAL, ConfigError, anything, choice, number, shown
from harness.model.formats import FORMATS, round_to
from harness.training.sites import AT_TAPS, Site
from injectors.addresses import STRATIFICATIONS, WEIGHTS, Address, Population
from injectors.draws import distinct, stream
from injectors.facts import Facts, Shapes
from injectors.fault import InjectableFault, located, matching, optimizers_with, wrong_rank
from injectors.value_strike import CONSTANTS, OPERATIONS, Change, Target, ValueStrike

SCALARS = {Site.LEARNING_RATE: "learning_rate", Site.LOSS_SCALE: "loss_scale"}
SITES = tuple(site for site in Site if site not in (Site.BATCH, Site.BEFORE_UPDATE))
MOMENTS = (Site.MOMENT_1, Site.MOMENT_2)
MODELS = (*OPERATIONS, *CONSTANTS, "set", "scale", "noise", "sign", "round")
MOST_ELEMENTS = 10**6  # each is drawn on its own
# What only a campaign can have otherwise.
ALONE: Mapping[str, Any] = {"until": None, "weight": "size", "stratify": "none"}
MOST_FAULTS = 10**5  # of the campaigns of a command, whose plan takes a minute then


def asked_at(site: str) -> tuple[str, ...]:
    """The facts that a fault at this site asks for."""
    return ("taps",) if site in AT_TAPS else ("slots",) if site in MOMENTS else ()


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

    def asks(self) -> tuple[str, ...]:
        return asked_at(self.site)

    def refused(self, facts: Facts) -> Iterator[str]:
        at_taps, tensor, elements = self.site in AT_TAPS, f"fault.tensor={self.tensor}", shown(self.elements)
        if at_taps and self.tensor.endswith(".scores") and not facts.keeps_scores:
            why = "attention is fused in this model, and keeps no scores"
            raise ConfigError(f"{tensor}: {why}; allowed: other activations, or model.attention=explicit")
        _, sizes = self.candidates(facts, "activation" if at_taps else "tensor")
        if self.site == Site.LOSS_SCALE and not facts.has_loss_scale:
            allowed = "another site, or train.loss_scaling=static or dynamic"
            yield f"fault.site=loss_scale: train.loss_scaling=none has no scale; allowed: {allowed}"
        if self.site in MOMENTS and self.site not in facts.slots:
            others = optimizers_with(self.site, facts)
            allowed = ", ".join([*facts.slots, "a site that is no moment"]) + (others and f", or optim.name={others}")
            yield f"fault.site={self.site}: optim.name={facts.optimizer} keeps no such array; allowed: {allowed}"
        if self.element is not None and self.element >= min(sizes):
            why = f"beyond {tensor}, whose smallest match has {min(sizes)} elements"
            yield f"fault.element={self.element}: {why}; allowed: 0 to {min(sizes) - 1}"
        if self.element is not None and self.elements != 1:
            yield f"fault.elements={elements}: but fault.element={self.element} is one; allowed: 1"
        if self.elements is not None and self.elements > sum(sizes):
            yield f"fault.elements={elements}: more than {tensor} has; allowed: 1 to {sum(sizes)}"
        if self.model in OPERATIONS:
            yield from self._wrong_bits()
        if self.block is not None and self.format == "fp32":
            yield f"fault.block={self.block}: fault.format=fp32 needs no scale; allowed: null, or a narrower format"
        elif self.block is not None and self.site in (*SCALARS, Site.UPDATE):
            yield f"fault.block={self.block}: nobody keeps fault.site={self.site} in blocks; allowed: null"
        yield from self._wrong_number(facts.precision)
        yield from self._wrong_samples(facts.steps)
        yield from wrong_rank(self.rank, facts.ranks)

    def _wrong_bits(self) -> Iterator[str]:
        size, choices = FORMATS[self.format].bits, FORMATS[self.format].field(self.field)
        most = len(choices) + (self.bit is not None and self.bit not in choices)
        if self.bit is not None and self.bit >= size:
            yield f"fault.bit={self.bit}: beyond fault.format={self.format}; allowed: 0 to {size - 1}"
        elif self.spread == "adjacent" and self.bit is not None and self.bit + self.bits > size:
            why = f"fault.bits={self.bits} from there leave fault.format={self.format}"
            yield f"fault.bit={self.bit}: {why}; allowed: 0 to {size - self.bits}"
        elif self.bits > most and (self.bit is None or self.spread == "scattered"):
            yield f"fault.bits={self.bits}: more than fault.field={self.field} has; allowed: 1 to {most}"

    def _wrong_number(self, precision: str) -> Iterator[str]:
        """Why what is computed with the value, or written, cannot hold it."""
        given, model = f"fault.value={self.value}", self.model
        if model == "noise" and self.value < 0:
            yield f"{given}: is the standard deviation of fault.model=noise; allowed: 0 or more"
            return
        state = torch.float64 if precision == "fp64" else torch.float32  # of weights, gradients, moments
        kept, most = torch.tensor(self.value, dtype=torch.float64).to(state), torch.finfo(state).max
        where = f"train.precision={precision}"
        # Too large a factor for a narrow format is a fault by itself; too large a number to set is only a wrong one.
        if model == "set" and self.format != "fp32" and bool(torch.isfinite(kept)):
            kept, where = round_to(kept, self.format), f"fault.format={self.format}"
            most = torch.finfo(FORMATS[self.format].dtype).max
        if not bool(torch.isfinite(kept)):
            other = ", or fault.model=infinity" if model == "set" else ""
            yield f"{given}: infinite in {where}; allowed: at most {most:.6g} in size{other}"
        elif self.value != 0 and bool(kept == 0):
            yield f"{given}: rounds to 0 in {where}; allowed: 0, or a number further from it"

    def _wrong_samples(self, steps: int) -> Iterator[str]:
        if self.samples is None:
            for name, default in ALONE.items():
                if (value := getattr(self, name)) != default:
                    allowed = f"allowed with fault.samples=null: {shown(default)}"
                    yield f"fault.{name}={value}: only in a campaign; {allowed}"
            return
        if self.elements != 1:
            why = "a campaign draws single elements"
            yield f"fault.elements={shown(self.elements)}: {why}; allowed with fault.samples: 1"
        if self.until is not None and not self.start <= self.until < steps:
            allowed = f"fault.start={self.start} to {steps - 1}"
            yield f"fault.until={self.until}: outside of the run after the start; allowed: {allowed}"
        if self.stratify == "bit" and self.model not in OPERATIONS:
            yield f"fault.stratify=bit: fault.model={self.model} changes no bits; allowed: none, tensor, layer, step"

    def candidates(self, facts: Facts, what: str = "tensor") -> tuple[list[str], list[int]]:
        """The tensors that it can strike, and how many elements each has."""
        shapes = self.shapes(facts)
        names = matching("fault.tensor", self.tensor, shapes, self.layer, what)
        return names, [math.prod(shapes[name]) for name in names]

    def population(self, facts: Facts) -> Population:
        """Every fault that the description allows."""
        shapes, bits = self.shapes(facts), None
        if self.model in OPERATIONS:
            choices = FORMATS[self.format].field(self.field)
            adjacent = self.bits if self.spread == "adjacent" else 1
            bits = tuple(choices[: len(choices) - adjacent + 1]) if self.bit is None else (self.bit,)
        steps = range(self.start, (self.start if self.until is None else self.until) + 1)
        return Population({name: shapes[name] for name in self.candidates(facts)[0]}, bits, steps, self.element)

    def campaign_seed(self, seed: int) -> int:
        """Descriptions under one seed draw independently of each other, so that their shares can be pooled."""
        fields = [f"{name}={value}" for name, value in vars(self).items() if name not in ("samples", "seed")]
        return next(stream(seed, "campaign", *fields)) % 2**63

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
            **ALONE,
        )

    def shapes(self, facts: Facts) -> Shapes:
        """What stands at the site, by name."""
        if self.site in SCALARS:
            return {SCALARS[Site(self.site)]: ()}
        return facts.taps if self.site in AT_TAPS else facts.tensors

    def arm(self, facts: Facts) -> ValueStrike:
        names, sizes = self.candidates(facts)
        if self.elements is None:
            mask = np.array(self.mask(facts, 0), dtype=np.int64)
            return self.strike_at(tuple(Target(name, None, mask) for name in names), facts)
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
            changed = [masks[which, element] for element in flat]
            targets.append(Target(names[which], np.array(flat), np.array(changed, dtype=np.int64)))
        return self.strike_at(tuple(targets), facts)

    def strike_at(self, targets: tuple[Target, ...], facts: Facts) -> ValueStrike:
        """The injector that changes these elements."""
        site = Site(self.site)
        look_at = Site.BEFORE_UPDATE if site == Site.UPDATE else None
        taps = tuple(target.tensor for target in targets) if site in AT_TAPS else ()
        change = Change(self.model, self.value, self.format, self.block, facts.seed)
        more = {"taps": taps, "change": change, "targets": targets, "rank": self.rank}
        return self.armed(ValueStrike, site, facts, look_at, **more)

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
