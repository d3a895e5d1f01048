"""A bit of one weight flips: the classic soft error in memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from harness.config import PER_TRIAL, ConfigError, Trial, anything, number
from harness.sites import Event, Site
from injectors.fault import FaultContext, InjectableFault, matching


@dataclass(frozen=True)
class WeightBit(InjectableFault):
    """Flip one bit of one fp32 weight before it is read, in each of `duration` steps from `start` on.

    A second strike flips the bit back, unless the optimizer has moved the weight so far that the bit changed.
    """

    kind: str = "weight_bit"
    start: int = number(PER_TRIAL, 100, "step of the (first) strike", low=0)
    tensor: str = anything(PER_TRIAL, "blocks.*", "glob over tensor names; of several, one is drawn, weighted by size")
    element: int | None = number(PER_TRIAL, None, "flat index into the tensor; null: drawn with the seed", low=0)
    bit: int = number(PER_TRIAL, 30, "0: last bit of the mantissa, 23 to 30: exponent, 31: sign", low=0, high=31)

    def check(self, trial: Trial, shapes: Mapping[str, tuple[int, ...]]) -> None:
        if trial.train.precision == "fp64":
            raise ConfigError("train.precision=fp64: weights are not fp32; allowed with fault=weight_bit: fp32, bf16")
        names = matching(self.tensor, shapes)
        smallest = min(math.prod(shapes[name]) for name in names)
        if self.element is not None and self.element >= smallest:
            raise ConfigError(
                f"fault.element={self.element}: beyond fault.tensor={self.tensor}, whose smallest match has {smallest} "
                f"elements; allowed: 0 to {smallest - 1}"
            )

    def arm(self, context: FaultContext) -> _Flip:
        names = matching(self.tensor, context.shapes)
        sizes = np.array([math.prod(context.shapes[name]) for name in names], dtype=float)
        draw = context.generator()
        name = names[draw.choice(len(names), p=sizes / sizes.sum())]
        drawn = int(draw.integers(math.prod(context.shapes[name])))
        return _Flip(self.steps, name, drawn if self.element is None else self.element, self.bit)


@dataclass(frozen=True)
class _Flip:
    steps: range
    tensor: str
    element: int
    bit: int
    site: Site = Site.WEIGHT

    def strike(self, tensors: Mapping[str, Tensor], step: int) -> list[Event]:
        target = tensors[self.tensor]
        index = tuple(int(i) for i in np.unravel_index(self.element, tuple(target.shape)))
        words = target.view(torch.int32)
        before, bits_before = target[index].item(), int(words[index].item())
        mask = 1 << self.bit
        words[index] = words[index] ^ (mask - (1 << 32) if self.bit == 31 else mask)
        after, bits_after = target[index].item(), int(words[index].item())
        return [
            Event(
                self.site,
                self.tensor,
                index,
                self.bit,
                step,
                repr(before),
                repr(after),
                f"{bits_before & 0xFFFFFFFF:08x}",
                f"{bits_after & 0xFFFFFFFF:08x}",
                bits_before != bits_after,
            )
        ]
