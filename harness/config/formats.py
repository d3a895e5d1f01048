"""Number formats by name, and how their bits are used. harness/model/formats.py rounds to them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BitLayout:
    """Bit 0 is the last of the mantissa; the exponent stands above the mantissa, and the sign on top."""

    exponent: int
    mantissa: int

    @property
    def bits(self) -> int:
        return 1 + self.exponent + self.mantissa

    def field(self, name: str) -> range:
        """The numbers of the bits of `any`, `mantissa`, `exponent` or `sign`."""
        top = self.bits - 1
        ends = {"mantissa": (0, self.mantissa), "exponent": (self.mantissa, top), "sign": (top, top + 1)}
        return range(*ends[name]) if name != "any" else range(self.bits)

    def holds(self, other: BitLayout) -> bool:
        """Whether every number of the other format is one of this."""
        return self.exponent >= other.exponent and self.mantissa >= other.mantissa


LAYOUTS = {
    "fp32": BitLayout(8, 23),
    "bf16": BitLayout(8, 7),
    "fp16": BitLayout(5, 10),
    "fp8_e4m3": BitLayout(4, 3),
    "fp8_e5m2": BitLayout(5, 2),
}
"""Those to which float32 can be rounded."""
HELD = {"fp64": BitLayout(11, 52), **LAYOUTS}
"""Those that a tensor can be held in."""
