"""Updates that are larger than those before."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from harness.config.fields import PER_TRIAL, number
from harness.detectors.base import Values, Windowed
from harness.detectors.options import length
from harness.detectors.windows import standardised


@dataclass(frozen=True)
class Options:
    """`detect.update_norm.*`."""

    sigma: float = number(PER_TRIAL, 3.0, "standard deviations above the mean that are an alarm", above=0)
    window: int = length(128, "steps of which mean and deviation are taken")


class UpdateNorm(Windowed):
    """(u - mean) / std of the size of the weights' change, that of the step before; silent until half is filled.

    A step that was not taken has no size: it does not enter the window.
    """

    watches = ("update_rms",)
    source = "Levanter; Marin, issue 1368: an update norm that doubles precedes the spike"

    def score(self, values: Values) -> tuple[Tensor, Tensor]:
        score = standardised(values["update_rms"], *self.windows["update_rms"].mean_std())
        return self.heard(self.options.window // 2, score), self.numbers["sigma"]

    def learn(self, values: Values, where_R: Tensor) -> None:
        super().learn(values, where_R & (values["update_rms"] > 0))
