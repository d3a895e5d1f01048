"""The checks of a GPU, each with its figures and their pass marks, and what becomes of a check by what was measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

GROUPS = ("bits", "speed", "large")
LIMIT = 540.0  # seconds of a group, of which the checks' own limits share
PASSED, MISSED, NOT_MEASURED, FAILED = "passed", "missed", "not measured", "failed"
CONTEXTS, PRECISIONS, SIZES = (64, 65, 512), ("fp32", "bf16"), (2, 3, 4, 8, 16, 32, 33, 64)
WIDTHS = (64, 128, 256)
COMPILED, EAGER = dict(zip(WIDTHS, (8, 5, 3), strict=True)), dict(zip(WIDTHS, (50, 25, 10), strict=True))
BATCHES = (8, 32)


@dataclass(frozen=True)
class Mark:
    """What a figure has to lie between, both ends included; None: it is shown and not judged."""

    least: float | None = None
    most: float | None = None

    def is_met(self, value: float) -> bool:
        """Never by NaN where there is a mark."""
        least = -math.inf if self.least is None else self.least
        most = math.inf if self.most is None else self.most
        return least <= value <= most or self == Mark()


SAME_BITS = Mark(most=0)  # values whose bits differ


@dataclass(frozen=True)
class Check:
    """One line of the table. `marks` names its figures; all that have a mark are needed to pass."""

    number: int
    group: str
    title: str
    wanted: str
    seconds: float
    marks: Mapping[str, Mark]

    @property
    def function(self) -> str:
        return f"check_{self.number}"


def each(mark: Mark, *names: str) -> dict[str, Mark]:
    return dict.fromkeys(names, mark)


CHECKS: Sequence[Check] = (
    Check(
        1,
        "bits",
        "float64 pack against plain torch on the same device, largest difference",
        "1e-9",
        45,
        each(Mark(most=1e-9), "loss", "gradient norm", "weights"),
    ),
    Check(
        2,
        "bits",
        "100 healthy steps under `set_sync_debug_mode('error')`, synchronising operations",
        "0",
        70,
        each(Mark(most=0), *PRECISIONS, "watched by detectors", "experts", "experts by older weights"),
    ),
    Check(
        3,
        "bits",
        "twins in first, middle and last row and across parts, 200 steps, values that differ",
        "0",
        160,
        each(SAME_BITS, *(f"context {context} {precision}" for context in CONTEXTS for precision in PRECISIONS)),
    ),
    Check(
        4,
        "bits",
        "the same pack in two processes, a trial in packs of R, values that differ",
        "0",
        100,
        each(SAME_BITS, "two processes", *(f"R = {size}" for size in SIZES), "context 512 fp32", "context 512 bf16"),
    ),
    Check(
        5,
        "bits",
        "steps and validation as graphs against eager ones, values that differ",
        "0",
        70,
        each(SAME_BITS, "struck steps", "NaN row", "disarmed injector", "attached tap"),
    ),
    Check(
        6,
        "bits",
        "fork against full run, killed and resumed against uninterrupted, rolled back against never struck",
        "0",
        70,
        each(SAME_BITS, "fork", "kill and resume", "rollback"),
    ),
    Check(
        7,
        "bits",
        "CPU against GPU in fp32, relative difference",
        "gradient 2e-6, loss 1e-4",
        45,
        {"gradient of step 1": Mark(most=2e-6), "loss after 50 steps": Mark(most=1e-4)},
    ),
    Check(
        8,
        "speed",
        "kernels a step at width 64, depth 4, R = 64; share of the time in which the GPU is busy in the graph",
        "at most 330; 0.95",
        60,
        {"kernels a step": Mark(most=330), "busy": Mark(least=0.95)},
    ),
    Check(
        9,
        "speed",
        "AdamW of [64, 230k], over the bandwidth of a copy",
        "0.70",
        40,
        each(Mark(least=0.70), "with norms", "alone"),
    ),
    Check(
        10,
        "speed",
        "trial-steps/s over those of plain GPTs one at a time, compiled in CUDA graphs and eager, fp32",
        "8, 5, 3; 50, 25, 10",
        330,
        {f"width {width} compiled": Mark(least=COMPILED[width]) for width in WIDTHS}
        | {f"width {width} eager": Mark(least=EAGER[width]) for width in WIDTHS},
    ),
    Check(
        11,
        "large",
        "a trial-step in packs of the planned size over the best of R = 16 to 256; planned memory over the peak",
        "1.15; 0.85 to 1.15",
        170,
        each(Mark(most=1.15), *(f"size at width {width}" for width in WIDTHS))
        | each(Mark(0.85, 1.15), *(f"memory at width {width}" for width in WIDTHS)),
    ),
    Check(
        12,
        "large",
        "one trial of 124M, bf16, context 1024, over compiled plain GPT; share of the measured bf16 product peak",
        "0.95; 0.40",
        300,
        each(Mark(least=0.95), *(f"batch {batch}" for batch in BATCHES))
        | each(Mark(least=0.40), *(f"of peak at batch {batch}" for batch in BATCHES)),
    ),
    Check(
        13,
        "speed",
        "a step with all telemetry and default detectors over one without",
        "1.01",
        100,
        each(Mark(most=1.01), "width 64", "width 256"),
    ),
    Check(
        14,
        "large",
        "two ranks as processes, over NCCL if each has a GPU, against simulated ones, relative difference",
        "1e-6",
        60,
        each(Mark(most=1e-6), "loss", "gradient norm", "weights"),
    ),
    Check(
        15,
        "bits",
        "overflow in real fp16 with and without loss scaling; bf16 against emulated bf16",
        "as documented: 0; gradient 0.3, loss 0.0039",
        50,
        each(Mark(most=0), "not as documented")
        | {"bf16 gradient": Mark(most=0.3), "bf16 loss": Mark(most=2.0**-8)}
        | {"scales unlike the CPU's": Mark()},
    ),
    Check(
        16,
        "bits",
        "an attached loop in fp32, bf16 and fp16 with loss scaling: against the loop alone, values that differ",
        "0",
        60,
        each(SAME_BITS, "disarmed", "twin", "repaired", "struck twice"),
    ),
    Check(
        17,
        "bits",
        "the command: two workers on one GPU, killed and typed again, against one worker, values that differ",
        "0",
        100,
        each(SAME_BITS, "two workers", "killed and typed again"),
    ),
    Check(
        18,
        "bits",
        "three trials by themselves and among twenty, with everything that a trial may have, values that differ",
        "0",
        150,
        {"values": SAME_BITS, "settings": Mark()},
    ),
)


@dataclass
class Row:
    """What became of a check. `figures` are what was measured, by name, and `notes` what is to be said beside them."""

    number: int
    figures: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    why: str = ""  # it is not, or not all, measured
    error: str = ""
    seconds: float = 0.0

    @property
    def check(self) -> Check:
        return next(check for check in CHECKS if check.number == self.number)

    @property
    def missing(self) -> list[str]:
        """The figures that are needed and not there."""
        return [name for name, mark in self.check.marks.items() if mark != Mark() and name not in self.figures]

    @property
    def missed(self) -> list[str]:
        return [name for name, mark in self.check.marks.items() if not mark.is_met(self.figures.get(name, math.nan))]

    @property
    def verdict(self) -> str:
        """In one word or two: an error outweighs a miss, and a miss what is not measured."""
        if self.error:
            return FAILED
        if set(self.missed) - set(self.missing):
            return MISSED
        return NOT_MEASURED if self.missing else PASSED

    @property
    def told(self) -> str:
        """The verdict with its reason."""
        if self.error:
            return f"{FAILED}: {self.error}"
        if self.verdict == MISSED:
            return f"{MISSED}: {', '.join(name for name in self.missed if name in self.figures)}"
        return f"{NOT_MEASURED}: {self.why or 'no reason given'}" if self.missing else PASSED

    def as_json(self) -> dict[str, Any]:
        own = {"number": self.number, "figures": self.figures, "notes": self.notes, "why": self.why}
        return own | {"error": self.error, "seconds": round(self.seconds, 1), "verdict": self.verdict}


def row_of(told: Mapping[str, Any]) -> Row:
    """The inverse of `Row.as_json`; the verdict is worked out anew."""
    return Row(**{name: told[name] for name in ("number", "figures", "notes", "why", "error", "seconds")})
