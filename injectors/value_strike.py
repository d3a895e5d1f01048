"""A strike of a value fault: elements are gathered, changed, and put back where they changed.

Bits change in any of the formats of harness/model/formats.py: that of the tensor itself, or another, which is emulated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from harness.config import ConfigError
from harness.config.limits import KEPT_EVENTS
from harness.model.formats import FORMAT_OF, HELD_FORMATS, converted, from_words, raw_words, round_to, to_words
from harness.training.sites import AT_TAPS, Event, Site, SiteCall
from injectors.fault import Strike, digest

OPERATIONS = ("bit_flip", "stuck_at_0", "stuck_at_1")
CONSTANTS = {"zero": 0.0, "nan": math.nan, "infinity": math.inf, "minus_infinity": -math.inf}
NUMBERS = (Site.LEARNING_RATE, Site.LOSS_SCALE)  # sites with no tensor of the model
RANKED = (*AT_TAPS, Site.GRADIENT)  # sites that a rank has for itself
MOST_EVENTS = 16  # elements of one strike that are recorded each on their own


@dataclass(frozen=True)
class StrikeTarget:
    """Elements of one tensor: flat indices [k], None: all of them; and the bits that change in each, [k] or [].

    Masks are int64, so the sign bit of a format of 64 bits makes them negative (`as_int64`).
    """

    tensor: str
    elements: np.ndarray | None
    masks: np.ndarray


@dataclass(frozen=True)
class ValueChange:
    """What becomes of a value: by which model and number, and in blocks of which size it is held, if it is.

    `seed` is that of noise.
    """

    model: str
    value: float
    block: int | None
    seed: int

    def of(self, values: Tensor, target: StrikeTarget, step: int, format: str, scales: Tensor | None) -> Tensor:
        """The new values of a target, held in a format: [k] or the shape of its tensor.

        `scales` are the factors at which they are kept, if they are.
        """
        is_own = FORMAT_OF[values.dtype] == format
        if values.element_size() == 1 and not is_own:  # torch has no arithmetic for 8 bits
            return converted(self.of(values.float(), target, step, format, scales), values.dtype)
        held = values if scales is None else values.double() * scales
        if self.model in OPERATIONS:
            masks = torch.as_tensor(target.masks, device=values.device).expand(values.shape)
            changed = change_bits(held, masks, self.model, format)
            if scales is None:
                return changed
            # What no bit changes stays as it was, unrounded.
            return torch.where(same_bits(changed, held), values, (changed / scales).to(values.dtype))
        if is_own and values.element_size() < 4 and self.model != "round":
            return self._narrow(values, target.tensor, step)
        changed = self._number(values, target.tensor, step)
        if scales is None:
            return changed if format == "fp32" else round_to(changed, format)
        return (round_to(changed.double() * scales, format) / scales).to(values.dtype)

    def _narrow(self, values: Tensor, tensor: str, step: int) -> Tensor:
        """Numbers of 8 or 16 bits, computed in a wider format and rounded once."""
        if self.model in CONSTANTS or self.model == "set":
            number = torch.tensor(CONSTANTS.get(self.model, self.value), dtype=torch.float64, device=values.device)
            return converted(number, values.dtype).expand(values.shape).clone()
        wide = values.double() if self.model == "noise" else values.float()  # torch scales such numbers in float32
        return converted(self._number(wide, tensor, step), values.dtype)

    def _number(self, values: Tensor, tensor: str, step: int) -> Tensor:
        if self.model in CONSTANTS:
            return torch.full_like(values, CONSTANTS[self.model])
        if self.model == "set":  # not by full_like, which refuses what is too large for activations in half precision
            return torch.empty_like(values).copy_(torch.tensor(self.value, dtype=torch.float64))
        if self.model == "scale":
            return values * self.value
        if self.model == "sign":
            return -values
        if self.model == "round":
            return values
        seeds = np.random.SeedSequence([self.seed, step, *tensor.encode()])
        draw = np.random.Generator(np.random.Philox(seeds))
        noise = draw.standard_normal(tuple(values.shape)) * self.value
        return values + torch.as_tensor(noise, dtype=values.dtype, device=values.device)


@dataclass(kw_only=True)
class ValueStrike(Strike):
    """Gathers the values, changes them, and puts back those that changed.

    `formats` are those in which the targets are changed, by tensor, and `held` those in which the facts of the run say
    that tensors are held; of one that is left out they need not say it.
    """

    change: ValueChange
    targets: tuple[StrikeTarget, ...]
    formats: Mapping[str, str]
    held: Mapping[str, str] = field(default_factory=dict)
    rank: int = 0
    _weights: dict[str, Tensor] = field(default_factory=dict)  # of this step
    _told: int = 0
    is_by_tensor = True
    remembers = ("_told",)

    def look(self, site_call: SiteCall) -> None:
        """Weights before the update, because an update is known by what it changes."""
        here = [target for target in self.targets if target.tensor in site_call.tensors]
        self._weights = {target.tensor: _gather(site_call.tensors[target.tensor], target) for target in here}

    def strike(self, site_call: SiteCall) -> list[Event]:
        events = []
        for target in self.targets:
            if target.tensor in site_call.tensors and site_call.rank == self.rank * (site_call.site in RANKED):
                events += self._strike(site_call, target)
        return events

    def _strike(self, site_call: SiteCall, target: StrikeTarget) -> list[Event]:
        whole, change, format = site_call.tensors[target.tensor], self.change, self.formats[target.tensor]
        self._check_type(whole, target.tensor)
        there = _gather(whole, target)
        origin = self._weights[target.tensor] if self.site == Site.UPDATE else None
        before = there if origin is None else _sum(there, origin, -1)
        scales = None if change.block is None else _scales(whole, target, change.block, format)
        after = change.of(before, target, site_call.step, format, scales)
        differs = ~same_bits(before, after)
        if changed := bool(differs.any()):
            _scatter(whole, target, torch.where(differs, after if origin is None else _sum(origin, after), there))
        if target.elements is None or len(target.elements) > MOST_EVENTS:
            self._told += 1
            texts = (digest(before), digest(after)) if self._told <= KEPT_EVENTS else ("", "")  # those are dropped
            address = (site_call.site, target.tensor, None, None, site_call.step)
            return [Event(*address, *texts, None, None, changed, site_call.rank, format=format)]
        was_zero = is_zero(before if scales is None else before.double() * scales, format)
        indices = zip(*np.unravel_index(target.elements, tuple(whole.shape) or (1,)), strict=True)
        columns = (before.tolist(), after.tolist(), raw_bits(before), raw_bits(after), differs.tolist())
        return [
            Event(
                site=site_call.site,
                tensor=target.tensor,
                index=tuple(map(int, index))[: whole.dim()],
                bit=mask.bit_length() - 1 if mask.bit_count() == 1 else None,
                step=site_call.step,
                before=repr(old),
                after=repr(new),
                bits_before=old_bits,
                bits_after=new_bits,
                changed=is_changed,
                rank=site_call.rank,
                mask=f"{mask:x}" if mask else None,
                was_zero=zero,
                format=format,
            )
            for index, mask, zero, old, new, old_bits, new_bits, is_changed in zip(
                indices, (mask % 2**64 for mask in target.masks.tolist()), was_zero.tolist(), *columns, strict=True
            )
        ]

    def _check_type(self, whole: Tensor, name: str) -> None:
        """Raises ConfigError for a tensor that is held otherwise than the facts of the run say."""
        found, said = FORMAT_OF.get(whole.dtype), self.held.get(name)
        kind = str(whole.dtype).removeprefix("torch.")
        if found is None:
            raise ConfigError(f"fault.tensor={name}: its numbers are {kind}; allowed: {', '.join(HELD_FORMATS)}")
        if said not in (None, found) and self.site not in NUMBERS:
            why = f"its numbers are {found} at the site {self.site}, and the facts of the run say {said}"
            raise ConfigError(f"fault.tensor={name}: {why}; allowed: Facts(formats=...) that say {found}")


def _place(whole: Tensor, target: StrikeTarget) -> tuple[Tensor, ...]:
    return torch.unravel_index(torch.as_tensor(target.elements, device=whole.device), whole.shape or (1,))


def _gather(whole: Tensor, target: StrikeTarget) -> Tensor:
    """A copy of the target's values."""
    return whole.clone() if target.elements is None else torch.atleast_1d(whole)[_place(whole, target)]


def _sum(one: Tensor, other: Tensor, sign: int = 1) -> Tensor:
    """`one` + `sign` `other`, in their own type."""
    if one.element_size() > 1:
        return one + other if sign > 0 else one - other
    return converted(one.float() + sign * other.float(), one.dtype)  # torch has no arithmetic for 8 bits


def _scales(whole: Tensor, target: StrikeTarget, block: int, format: str) -> Tensor:
    """What each element of the target is multiplied by before it is held in the format: [k] or the tensor's shape.

    1 in a block of zeros, and in one that is not finite.
    """
    flat, most = whole.reshape(-1), torch.finfo(HELD_FORMATS[format].dtype).max
    if target.elements is None:
        which = torch.arange(len(flat), device=flat.device) // block
        blocks = torch.arange(-(-len(flat) // block), device=flat.device)
    else:
        numbers, place = np.unique(target.elements // block, return_inverse=True)
        which, blocks = (torch.as_tensor(x, device=flat.device) for x in (place, numbers))
    if target.elements is None or len(blocks) * block > len(flat):  # all at once
        padded = torch.nn.functional.pad(flat.abs(), (0, -len(flat) % block)).double()
        largest = padded.view(-1, block).amax(1)[blocks]
    else:
        largest = torch.stack([flat[i * block : (i + 1) * block].abs().max().double() for i in blocks.tolist()])
    scale = torch.where(torch.isfinite(largest) & (largest > 0), most / largest, 1.0)[which]
    return scale.view(whole.shape) if target.elements is None else scale


def _scatter(whole: Tensor, target: StrikeTarget, values: Tensor) -> None:
    if target.elements is None:
        whole.copy_(values)
    else:
        torch.atleast_1d(whole)[_place(whole, target)] = values


# --- bits -------------------------------------------------------------------------------------------------------------


def change_bits(values: Tensor, masks: Tensor, operation: str, format: str) -> Tensor:
    """`values` with the bits of `masks` flipped, cleared or set in `format`; the same shape and type.

    A value is converted to the format, its bits are changed there, and it is converted back. `values` is float64,
    float32, bfloat16, float16 or of the format's own type; `masks` is int64 of the same shape, without bits beyond the
    format's. Where no bit changes, the value stays what it was, unrounded.
    """
    words = to_words(values, format)
    size = 8 * words.element_size()
    if words.is_signed() and size < 64:  # the highest bit of the format is the sign of its word
        masks = torch.where(masks >= 1 << (size - 1), masks - (1 << size), masks)
    masks = masks.to(words.dtype)
    changed = {"bit_flip": words ^ masks, "stuck_at_0": words & ~masks, "stuck_at_1": words | masks}[operation]
    return torch.where(changed == words, values, from_words(changed, format, values.dtype))


def is_zero(values: Tensor, format: str) -> Tensor:
    """Which values are zero, of either sign, once they are rounded to the format."""
    return from_words(to_words(values, format), format, torch.float64) == 0


def as_int64(mask: int) -> int:
    """A mask of up to 64 bits as the integer of that type which has them."""
    return mask - (mask >> 63 << 64)


def raw_bits(values: Tensor) -> list[str]:
    """The bits of each value of a flat tensor in its own type, in hexadecimal."""
    size = values.element_size()
    return [f"{int(word) & ((1 << 8 * size) - 1):0{2 * size}x}" for word in raw_words(values).tolist()]


def same_bits(left: Tensor, right: Tensor) -> Tensor:
    """Where two tensors of one type are equal bit for bit: NaN equals itself, and zero is not minus zero."""
    return raw_words(left) == raw_words(right)
