"""harness/testing finds what breaks a promise: faults, detectors and settings that each break one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.config import PER_TRIAL, ConfigError, number
from harness.detectors.base import Detector
from harness.faults.facts import Facts
from harness.faults.fault import InjectableFault
from harness.optim.clippers import CLIPPERS
from harness.testing import check_detector, check_fault, check_setting
from harness.training.sites import Event, Site, SiteCall
from injectors.fault import Strike, digest, whole_event


class Doubling(Strike):
    """The head is doubled, with a record."""

    def strike(self, site_call: SiteCall) -> list[Event]:
        before = digest(site_call.tensors["head"])
        site_call.tensors["head"].mul_(self.factor(site_call))
        return self.told(whole_event(site_call, "head", before, [site_call.tensors["head"]]))

    def factor(self, site_call: SiteCall) -> float:
        return 2.0

    def told(self, events: list[Event]) -> list[Event]:
        return events


class Silent(Doubling):
    """It says nothing of what it does."""

    def told(self, events: list[Event]) -> list[Event]:
        return []


class Forgetful(Doubling):
    """How often it has struck is no part of a checkpoint."""

    struck = 0

    def factor(self, site_call: SiteCall) -> float:
        self.struck += 1
        return 1.0 + self.struck


class Random(Doubling):
    """It draws from the stream of the whole process."""

    def factor(self, site_call: SiteCall) -> float:
        return 1.0 + float(torch.rand(()))


class Early(Doubling):
    """It strikes one step before it is due."""

    @property
    def calls(self) -> list[tuple[Site, int]]:
        return [(self.site, step - 1) for step in self.steps]

    def visit(self, site_call: SiteCall) -> list[Event]:
        return self.strike(site_call)


@dataclass(frozen=True)
class Doubled(InjectableFault):
    kind: str = "doubled"
    start: int = number(PER_TRIAL, 1, "step of the strike", low=0)
    strikes: Any = Doubling

    def arm(self, facts: Facts) -> Any:
        return self.armed(self.strikes, Site.WEIGHT, facts)


@pytest.mark.parametrize(
    ("strikes", "promise"),
    [
        (Doubling, None),
        (Silent, "it keeps its period"),
        (Forgetful, "it goes on from a checkpoint bit for bit"),
        (Random, "it lasts to the end at most"),
        (Early, "it keeps its period"),
    ],
)
def test_faults(strikes: Any, promise: str | None) -> None:
    fault = Doubled(name="doubled", strikes=strikes)
    if promise is None:
        check_fault(fault)
        return
    with pytest.raises(AssertionError) as broken:
        check_fault(fault)
    assert broken.value.__notes__[-1] == f"doubled: {promise}"


class Rising(Detector):
    """The loss over the mean of all that it has seen."""

    source = "made up"

    def remember(self) -> None:
        self.sum, self.count = self.number("sum"), self.number("count")

    def score(self, values: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        usual = self.usual()
        return torch.where(self.count.used > 5, values["loss"] / usual, torch.nan), torch.full_like(usual, 1.5)

    def usual(self) -> Tensor:
        return self.sum.used / self.count.used

    def learn(self, values: Mapping[str, Tensor], where_R: Tensor) -> None:
        self.sum.used.add_(torch.where(where_R, values["loss"], 0.0))
        self.count.used.add_(where_R)

    def restart(self, where_R: Tensor) -> None:
        for kept in (self.sum.used, self.count.used):
            kept.masked_fill_(where_R, 0)


class Mixing(Rising):
    """All rows are compared with what is usual of all."""

    def usual(self) -> Tensor:
        return super().usual().nanmean().expand(len(self.sum.used))


class Clinging(Rising):
    """It goes on with what was before a row went back."""

    def restart(self, where_R: Tensor) -> None:
        pass


class Impatient(Rising):
    """It learns from rows that wait."""

    def learn(self, values: Mapping[str, Tensor], where_R: Tensor) -> None:
        super().learn(values, values["loss"].isfinite())


@pytest.mark.parametrize(
    ("detector", "promise"),
    [
        (Rising, None),
        (Mixing, "it lets no row know of another"),
        (Clinging, "it begins anew where a row does"),
        (Impatient, "it remembers and says nothing of a row that waits"),
    ],
)
def test_detectors(detector: type[Detector], promise: str | None) -> None:
    if promise is None:
        check_detector(detector)
        return
    with pytest.raises(AssertionError) as broken:
        check_detector(detector)
    assert broken.value.__notes__ == [f"{detector.__name__}: {promise}"]


def test_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clipper that shrinks the gradients of large packs more."""
    (cls,) = [cls for cls in CLIPPERS if cls.__module__.endswith(".value")]
    plain: Any = cls.clip

    def by_rows(self: Any, gradients: Tensor, *others: Any) -> Any:
        gradients.mul_(1 - 1e-4 * len(gradients))
        return plain(self, gradients, *others)

    monkeypatch.setattr(cls, "clip", by_rows)
    with pytest.raises(AssertionError) as broken:
        check_setting(clip_value=0.01)
    assert "it does not depend on the pack" in broken.value.__notes__[-1]


def test_a_field_that_no_trial_has() -> None:
    with pytest.raises(
        ConfigError, match="^clipp=0.5: no field of a trial; allowed: .*, clip, .*, or a mapping for .*adagc"
    ):
        check_setting(clipp=0.5)
