"""Which tensor is to blame for what is not finite, told from values alone: no record of a fault is read.

What a rerun without the fault of its step is spared of, came in that step, and it came where the two runs part.
Otherwise it stands in the state: as NaN or infinity, as a second moment below zero, as a loss's scale that is not the
configured one, or as a number that dwarfs its own tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.config import Trial
from harness.nonfinite.rerun import Place, first_true
from harness.training.sites import Site

REEXECUTION, STATE, SETTING, OUTLIER, UNKNOWN = "re-execution", "state", "setting", "outlier", "unknown"
DWARFS = 1e4
"""Times the median size of a tensor's elements, and those of its like in other layers, at which one is an outlier. In a
run that is only unstable the largest weight is below 100 times it."""
FEW, ALSO_FEW = 16, 0.01  # elements, and share of a tensor's, that may be outliers together
MOMENTS = (Site.MOMENT_1, Site.MOMENT_2)

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Blame:
    """A tensor or tap, the site at which it went wrong, the element, and the kind of evidence; "" where none is."""

    tensor: str = ""
    site: str = ""
    index: tuple[int, ...] | None = None
    evidence: str = UNKNOWN


def blame(difference: Place | None, spared: bool, state: RowState, trial: Trial) -> Blame:
    """Of a row that froze: where a rerun without the fault of the step parts from it, and whether that is `spared`."""
    transient = Blame() if difference is None else _at(difference, REEXECUTION)
    if spared and difference is not None:
        return transient
    return next(state.suspects(trial), transient)


def _at(place: Place, evidence: str) -> Blame:
    return Blame(place.tensor, str(place.site), place.index, evidence)


@dataclass(frozen=True)
class RowState:
    """Of one row, before the step that was not finite: weights and what the optimizer keeps, by name."""

    weights: Tensors
    slots: Mapping[str, Tensors]
    loss_scale: float

    def suspects(self, trial: Trial) -> Iterator[Blame]:
        """What is wrong with it, the strongest evidence first."""
        yield from self._not_finite()
        if not _is_possible(self.loss_scale, trial):
            yield Blame("loss_scale", str(Site.LOSS_SCALE), (), SETTING)
        if (outlier := self._outlier()) is not None:
            yield outlier

    def source(self, name: str, index: tuple[int, ...]) -> Site:
        """Where the wrong element of a weight came from: from a moment that is wrong itself, or it is its own."""
        moments = {site: float(self.slots[site][name][index]) for site in MOMENTS if site in self.slots}
        first, second = (moments.get(site, 0.0) for site in MOMENTS)
        if all(not math.isfinite(x) for x in moments.values()) and moments:
            return Site.CLIPPED_GRADIENT  # both have taken it in
        if not math.isfinite(second) or second < 0:
            return Site.MOMENT_2
        if not math.isfinite(first):
            return Site.MOMENT_1
        if Site.MOMENT_1 in moments:
            usual = self.slots[Site.MOMENT_1][name].abs().median()
            if usual > 0 and abs(first) > DWARFS * float(usual):
                return Site.MOMENT_1
        return Site.WEIGHT

    def _not_finite(self) -> Iterator[Blame]:
        """The one tensor that is not finite. Several of them are a run that diverged by itself."""
        wrong = {name: ~torch.isfinite(values) for name, values in self.weights.items()}
        found = [(name, index) for name, where in wrong.items() if (index := first_true(where)) is not None]
        if len(found) == 1:
            ((name, index),) = found
            yield Blame(name, str(self.source(name, index)), index, STATE)

    def _outlier(self) -> Blame | None:
        """The element of a weight that dwarfs the others of its tensor, and those of its like in other layers.

        Few may be as large, or all of the tensor: where whole rows have grown, the run diverged by itself.
        """
        sizes = {name: values.abs().double() for name, values in self.weights.items()}
        medians = {name: float(values.median()) for name, values in sizes.items()}
        best, excess = None, DWARFS
        for name, values in sizes.items():
            alike = sorted(medians[other] for other in sizes if _kind(other) == _kind(name) and other != name)
            usual = [medians[name]] if values.numel() > 2 else []
            usual += alike[len(alike) // 2 : len(alike) // 2 + 1]
            largest, least = float(values.max()), min((x for x in usual if x > 0), default=1.0)
            few = int((values > math.sqrt(largest) * math.sqrt(least)).sum()) <= max(FEW, ALSO_FEW * values.numel())
            if largest / least > excess and (few or least < medians[name] / DWARFS):
                best, excess = name, largest / least
        if best is None:
            return None
        index = first_true(sizes[best] == sizes[best].max())
        assert index is not None
        return Blame(best, str(self.source(best, index)), index, OUTLIER)


def _kind(name: str) -> str:
    """The name without the number of its block."""
    return ".".join(part for part in name.split(".") if not part.isdigit())


def _is_possible(scale: float, trial: Trial) -> bool:
    """Whether a loss's scale is the configured one; one that adapts is that times a power of two."""
    train = trial.train
    if train.loss_scaling == "none":
        return True
    if train.loss_scaling == "static":
        return scale == float(torch.tensor(train.loss_scale, dtype=torch.float32)) or scale == train.loss_scale
    ratio = scale / train.loss_scale
    return math.isfinite(ratio) and ratio > 0 and math.isclose(math.frexp(ratio)[0], 0.5, rel_tol=1e-6)
