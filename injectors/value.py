"""Values that change where they stand: bits that flip or stick, numbers that are set, scaled, rounded or noisy.

One family for every tensor of the step, because what changes does not depend on where: weights, gradients, moments,
updates, activations and their gradients, the learning rate and the loss scale.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any, ClassVar

import numpy as np
import torch

from harness.config import PER_TRIAL, ConfigError, anything, choice, number, shown
from harness.faults.facts import Facts, Shapes
from harness.faults.fault import InjectableFault, matching
from harness.model.formats import HELD_FORMATS, converted
from harness.training.sites import AT_TAPS, Site
from injectors.addresses import STRATIFICATIONS, WEIGHTS, Address, Population, in_order
from injectors.draws import distinct, stream
from injectors.fault import located, optimizers_with, wrong_rank
from injectors.rewards import no_rollouts
from injectors.value_strike import CONSTANTS, OPERATIONS, StrikeTarget, ValueChange, ValueStrike, as_int64

OF_ROLLOUTS = {Site.REWARD: "reward", Site.ADVANTAGE: "advantage"}
OF_POLICIES = (*OF_ROLLOUTS, Site.SAMPLER_WEIGHT)
SCALARS = {Site.LEARNING_RATE: "learning_rate", Site.LOSS_SCALE: "loss_scale"}
SITES = tuple(site for site in Site if site not in (Site.BATCH, Site.ROUTING, Site.BEFORE_UPDATE))
MOMENTS = (Site.MOMENT_1, Site.MOMENT_2)
MODELS = (*OPERATIONS, *CONSTANTS, "set", "scale", "noise", "sign", "round")
MOST_ELEMENTS = 10**6  # each is drawn on its own
# What only a campaign can have otherwise.
ALONE: Mapping[str, Any] = {"until": None, "weight": "size", "stratify": "none"}
MOST_FAULTS = 10**5  # of the campaigns of a command, whose plan takes a minute then


def asked_at(site: str) -> tuple[str, ...]:
    """The facts that a fault at this site asks for."""
    return ("taps",) if site in AT_TAPS else ("slots",) if site in MOMENTS else ()


@lru_cache(maxsize=4096)
def _rounded(value: float, format: str) -> tuple[float, float]:
    """A number as a format holds it, and the largest number of that format."""
    dtype = HELD_FORMATS[format].dtype
    return float(converted(torch.tensor(value, dtype=torch.float64), dtype)), torch.finfo(dtype).max


@dataclass(frozen=True)
class Value(InjectableFault):
    """Change elements of the tensors of a site, the same elements at every strike.

    Which elements (`tensor`, `layer`, `element`, `elements`) and which bits (`bit`, `field`, `bits`) is drawn with the
    fault's seed as far as it is left open. `format` is the representation in which bits are changed: by default that in
    which the tensor is held, so a bf16 tensor has bits 0 to 15. In another one a value is converted, changed and
    converted back, and no other element changes. Other fault models round what they write to it, so that a number
    scaled past 65,504 overflows in fp16; `round` does that alone. A trial of our GPT has fp32 by default, in which its
    weights are held.
    Cf. He et al. 2023, doi 10.1145/3579371.3589105.

    With `block` the tensor is kept as 8-bit optimizers keep their state (Dettmers et al. 2022, arXiv 2110.02861,
    section 2; their blocks have 2048 elements, and numbers of a type of their own): so many neighbouring elements, in
    the order of the flat tensor, are divided by the largest of them and multiplied by the largest finite number of the
    format. Without it most of a second moment is zero in a format of 8 bits.
    """

    can_be_drawn: ClassVar[bool] = True
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
    format: str | None = choice(
        PER_TRIAL,
        None,
        "representation in which bits change, or to round to; null: the tensor's own, and in a sweep fp32",
        *HELD_FORMATS,
    )
    block: int | None = number(
        PER_TRIAL,
        None,
        "neighbouring elements of a tensor that share a scale in `format`, as 8-bit optimizers keep their state; null: "
        "no scale",
        low=1,
        high=MOST_ELEMENTS,
    )
    bit: int | None = number(
        PER_TRIAL,
        None,
        "0: last bit of the mantissa; the highest, or -1: sign, and -2 the bit below; null: drawn from `field`",
        low=-64,
        high=63,
    )
    field: str = choice(PER_TRIAL, "any", "bits to draw from", "any", "sign", "exponent", "mantissa")
    bits: int = number(PER_TRIAL, 1, "bits that change in each element", low=1, high=64)
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

    def of_sweep(self) -> Value:
        return self._in_format(self.format or "fp32")

    def in_own_format(self, facts: Facts) -> Value:
        formats = set(self.formats(facts).values())
        return self._in_format(formats.pop()) if len(formats) == 1 else self

    def _in_format(self, name: str) -> Value:
        """Whatever it strikes, in one format, whose bits are counted from the last."""
        return dataclasses.replace(self, format=name, bit=self._bit_in(name))

    def _bit_in(self, name: str) -> int | None:
        """The number of its bit in a format, from the last; one below 0 where the format has no such bit."""
        size = HELD_FORMATS[name].bits
        return self.bit if self.bit is None or not -size <= self.bit < 0 else self.bit + size

    def refused(self, facts: Facts) -> Iterator[str]:
        at_taps, tensor, elements = self.site in AT_TAPS, f"fault.tensor={self.tensor}", shown(self.elements)
        if at_taps and self.tensor.endswith(".scores") and not facts.keeps_scores:
            why = "attention is fused in this model, and keeps no scores"
            raise ConfigError(f"{tensor}: {why}; allowed: other activations, or model.attention=explicit")
        names, sizes = self._found(facts)
        if self.site in OF_POLICIES:
            yield from no_rollouts(facts, f"fault.site={self.site}")
        if self.site == Site.LOSS_SCALE and not facts.has_loss_scale:
            allowed = "train.loss_scaling=static or dynamic" if facts.is_ours else "a GradScaler in attach(extra=[...])"
            why = "train.loss_scaling=none has no scale" if facts.is_ours else "no loss scaler is known"
            yield f"fault.site=loss_scale: {why}; allowed: another site, or {allowed}"
        if self.site in MOMENTS and self.site not in facts.slots:
            others = optimizers_with(self.site, facts)
            allowed = ", ".join([*facts.slots, "a site that is no moment"]) + (others and f", or optim.name={others}")
            has = facts.said("optim.name", facts.optimizer)
            yield f"fault.site={self.site}: {has} keeps no such array; allowed: {allowed}"
        if self.element is not None and self.element >= min(sizes):
            why = f"beyond {tensor}, whose smallest match has {min(sizes)} elements"
            yield f"fault.element={self.element}: {why}; allowed: 0 to {min(sizes) - 1}"
        if self.element is not None and self.elements != 1:
            yield f"fault.elements={elements}: but fault.element={self.element} is one; allowed: 1"
        if self.elements is not None and self.elements > sum(sizes):
            yield f"fault.elements={elements}: more than {tensor} has; allowed: 1 to {sum(sizes)}"
        formats = {name: self._format_at(name, facts) for name in names}
        yield from self._wrong_formats(formats, facts)
        if self.block is not None and self._needs_no_scale(facts, formats):
            given = f"fault.block={self.block}: fault.format={shown(self.format)}"
            yield f"{given} needs no scale; allowed: null, or a narrower format"
        elif self.block is not None and self.site in (*SCALARS, Site.UPDATE):
            yield f"fault.block={self.block}: nobody keeps fault.site={self.site} in blocks; allowed: null"
        for name in dict.fromkeys(facts.format_of(self.site, name) for name in formats):
            if reason := self._wrong_number(name, facts):
                yield reason
                break
        yield from self._wrong_samples(facts.steps)
        yield from wrong_rank(self.rank, facts)

    def formats(self, facts: Facts) -> dict[str, str]:
        """The number format in which each tensor that it can strike is changed, by name."""
        return {name: self._format_at(name, facts) for name in self._found(facts)[0]}

    def _found(self, facts: Facts) -> tuple[list[str], list[int]]:
        return self.candidates(facts, "activation" if self.site in AT_TAPS else "tensor")

    def _wrong_bits(self, name: str) -> Iterator[str]:
        """Why there are no such bits in this format."""
        size, choices, bit = HELD_FORMATS[name].bits, HELD_FORMATS[name].field(self.field), self._bit_in(name)
        most = len(choices) + (bit is not None and bit not in choices)
        where = f"fault.format={name}" if self.format else f"{name}, in which it is held"
        if bit is not None and not 0 <= bit < size:
            yield f"fault.bit={self.bit}: beyond {where}; allowed: 0 to {size - 1}"
        elif self.spread == "adjacent" and bit is not None and bit + self.bits > size:
            why = f"fault.bits={self.bits} from there leave {where}"
            yield f"fault.bit={self.bit}: {why}; allowed: 0 to {size - self.bits}"
        elif self.bits > most and (bit is None or self.spread == "scattered"):
            yield f"fault.bits={self.bits}: more than fault.field={self.field} has; allowed: 1 to {most}"

    def wrong_format(self, facts: Facts) -> Iterator[str]:
        yield from self._wrong_formats(self.formats(facts), facts)

    def _wrong_formats(self, formats: Mapping[str, str], facts: Facts) -> Iterator[str]:
        for name in dict.fromkeys(formats.values()) if self.model in OPERATIONS else ():
            yield from self._wrong_bits(name)
        for name, format in formats.items():
            own = HELD_FORMATS[facts.format_of(self.site, name)]
            if self.model in OPERATIONS and not own.holds(HELD_FORMATS[format]):
                fitting = ", ".join(other for other, known in HELD_FORMATS.items() if own.holds(known))
                why = f"{name} is held in {facts.format_of(self.site, name)}, which has other bits"
                yield f"fault.format={format}: {why}; allowed: null, {fitting}"
                return
            if self.model in ("infinity", "minus_infinity") and own.dtype == torch.float8_e4m3fn:
                why = f"{name} is held in fp8_e4m3, which has no infinity"
                yield f"fault.model={self.model}: {why}; allowed: nan, or set with fault.value=448"
                return

    def _needs_no_scale(self, facts: Facts, formats: Mapping[str, str]) -> bool:
        """Whether a tensor is held in no more bits than `format`."""
        return any(
            form in ("fp64", "fp32") or HELD_FORMATS[form].bits >= HELD_FORMATS[facts.format_of(self.site, name)].bits
            for name, form in formats.items()
        )

    def _wrong_number(self, own: str, facts: Facts) -> str:
        """Why what is computed with the value, or written to a tensor held in `own`, cannot hold it, if it cannot."""
        given, model, held = f"fault.value={self.value}", self.model, HELD_FORMATS[own]
        if model == "noise" and self.value < 0:
            return f"{given}: is the standard deviation of fault.model=noise; allowed: 0 or more"
        # Too large a factor for a narrow format is a fault by itself; too large a number to set is only a wrong one.
        wide = own if model == "set" or own == "fp64" else "fp32"
        kept, most = _rounded(self.value, wide)
        where = f"train.precision={facts.precision}" if facts.is_ours else wide
        format = own if self.format is None or not held.holds(HELD_FORMATS[self.format]) else self.format
        if model == "set" and format not in ("fp32", own) and math.isfinite(kept):
            (kept, most), where = _rounded(self.value, format), f"fault.format={format}"
        if not math.isfinite(kept):
            other = ", or fault.model=infinity" if model == "set" else ""
            return f"{given}: infinite in {where}; allowed: at most {most:.6g} in size{other}"
        if self.value != 0 and kept == 0:
            return f"{given}: rounds to 0 in {where}; allowed: 0, or a number further from it"
        return ""

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
        shapes, formats, bits = self.shapes(facts), self.formats(facts), None
        steps = range(self.start, (self.start if self.until is None else self.until) + 1)
        if self.model in OPERATIONS:
            by_format = {name: self._bits_in(name) for name in dict.fromkeys(formats.values())}
            bits = by_format if len(by_format) > 1 else next(iter(by_format.values()))
        said = formats if self.format is None else {}
        return Population({name: shapes[name] for name in formats}, bits, steps, self.element, said)

    def _bits_in(self, name: str) -> tuple[int, ...]:
        """The bits of a format at which it can begin."""
        bit, choices = self._bit_in(name), HELD_FORMATS[name].field(self.field)
        adjacent = self.bits if self.spread == "adjacent" else 1
        return tuple(choices[: len(choices) - adjacent + 1]) if bit is None else (bit,)

    def drawn(self, samples: int, facts: Facts) -> Iterator[Value]:
        count = samples if self.samples is None else self.samples
        described = dataclasses.replace(self, samples=count).in_own_format(facts)
        described.check(facts)
        if (population := described.population(facts)).size < count:
            why = f"the description allows {population.size} different faults"
            raise ConfigError(f"samples={count}: {why}; allowed: 1 to {population.size}")
        seed = described.campaign_seed(facts.seed if described.seed is None else described.seed)
        order = in_order(population, seed, described.weight, described.stratify)
        return (described.at(address, seed) for address in islice(order, count))

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
            format=self.format or address.format,
            field=self.field if draws else "any",
            seed=next(stream("fault", *key)) % 2**63 if draws else None,
            samples=None,
            **ALONE,
        )

    def shapes(self, facts: Facts) -> Shapes:
        """What stands at the site, by name."""
        if self.site in SCALARS:
            return {SCALARS[Site(self.site)]: ()}
        if self.site in OF_ROLLOUTS:
            of_each = (facts.advantages,) if facts.advantages > 1 and self.site == Site.ADVANTAGE else ()
            return {OF_ROLLOUTS[Site(self.site)]: (facts.completions or 1, *of_each)}
        if self.site == Site.BUFFER:
            if not facts.buffers:
                others = (
                    "moe.bias_rate above 0 with block.channel_mixer=moe" if facts.is_ours else "a model with buffers"
                )
                raise ConfigError(f"fault.site=buffer: this model keeps none; allowed: another site, or {others}")
            return facts.buffers
        return facts.taps if self.site in AT_TAPS else facts.tensors

    def arm(self, facts: Facts) -> ValueStrike:
        (names, sizes), formats = self.candidates(facts), self.formats(facts)
        if self.elements is None:
            of_format = {form: as_int64(self.mask(facts, 0, form)) for form in set(formats.values())}
            every = (StrikeTarget(name, None, np.array(of_format[formats[name]], dtype=np.int64)) for name in names)
            return self.strike_at(tuple(every), facts)
        if self.element is not None:
            drawn = distinct(len(names), 1, *facts.key("tensor"))
            places = [(drawn[0], self.element)]
        else:
            drawn = distinct(sum(sizes), self.elements, *facts.key("address"))
            places = [located(sizes, address) for address in drawn]
        masks = {place: as_int64(self.mask(facts, i, formats[names[place[0]]])) for i, place in enumerate(places)}
        targets = []
        for which in sorted({which for which, _ in places}):
            flat = sorted(element for number, element in places if number == which)
            changed = [masks[which, element] for element in flat]
            targets.append(StrikeTarget(names[which], np.array(flat), np.array(changed, dtype=np.int64)))
        return self.strike_at(tuple(targets), facts)

    def strike_at(self, targets: tuple[StrikeTarget, ...], facts: Facts) -> ValueStrike:
        """The injector that changes these elements."""
        site = Site(self.site)
        look_at = Site.BEFORE_UPDATE if site == Site.UPDATE else None
        taps = tuple(target.tensor for target in targets) if site in AT_TAPS else ()
        more = {"taps": taps, "change": ValueChange(self.model, self.value, self.block, facts.seed), "targets": targets}
        more |= {"formats": {target.tensor: self._format_at(target.tensor, facts) for target in targets}}
        more |= {"held": self._said(facts, targets), "rank": self.rank}
        return self.armed(ValueStrike, site, facts, look_at, **more)

    def _said(self, facts: Facts, targets: tuple[StrikeTarget, ...]) -> dict[str, str]:
        """The formats in which tensors have to be held: those that the facts name, and all that a strike relies on."""
        names = (target.tensor for target in targets if not facts.is_ours)
        relied = {name: facts.format_of(self.site, name) for name in names if self.format is None}
        return relied | {t.tensor: said for t in targets if (said := facts.named_format(self.site, t.tensor))}

    def _format_at(self, tensor: str, facts: Facts) -> str:
        return self.format or facts.format_of(self.site, tensor)

    def mask(self, facts: Facts, element: int, format: str) -> int:
        """The bits that change in the element, as an integer of the format."""
        if self.model not in OPERATIONS:
            return 0
        bit = self._bit_in(format)
        if bit is not None and (self.spread == "adjacent" or self.bits == 1):
            return ((1 << self.bits) - 1) << bit
        choices = HELD_FORMATS[format].field(self.field)
        if self.spread == "adjacent":
            low = choices[next(stream(*facts.key("bit", element))) % (len(choices) - self.bits + 1)]
            return ((1 << self.bits) - 1) << low
        fixed = [] if bit is None else [bit]
        rest = [bit for bit in choices if bit not in fixed]
        drawn = distinct(len(rest), self.bits - len(fixed), *facts.key("bit", element))
        return sum(1 << bit for bit in [*fixed, *(rest[i] for i in drawn)])
