"""An expert that gives far larger numbers than before."""

from __future__ import annotations

from dataclasses import dataclass

from harness.config.fields import PER_TRIAL, number
from harness.detectors.base import Growth
from harness.detectors.options import length


@dataclass(frozen=True)
class Options:
    """`detect.expert_output.*`."""

    growth: float = number(
        PER_TRIAL, 5.0, "multiple of the median of a layer's last readings that is an alarm", above=1
    )
    limit: float = number(PER_TRIAL, 1e4, "largest element that is an alarm whatever was before", above=0)
    window: int = length(20, "readings of which the median is taken", low=2)


class ExpertOutput(Growth):
    """The largest element that an expert of a layer gives, over five times the median of the last 20 readings."""

    watches = ("loss", "expert_output_max")
    windowed = ("expert_output_max",)
    reach = {"growth": 2.0}
    source = "ours; outliers of experts are what DeepSeek-V4 clamps (its report, section 4.2.3)"
