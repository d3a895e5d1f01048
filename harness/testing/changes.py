"""Injectors that change what they are shown as a test says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from harness.training.sites import Event, Site, SiteCall


@dataclass(frozen=True)
class Change:
    """An injector that calls `change(tensors)` at a site."""

    site: Site
    steps: range
    change: Callable[[Mapping[str, Tensor]], object]
    taps: tuple[str, ...] = ("blocks.0.residual",)
    permanent: bool = False

    @property
    def calls(self) -> list[tuple[Site, int]]:
        return [(self.site, step) for step in self.steps]

    @property
    def memory(self) -> Mapping[str, object]:
        return {}

    def recall(self, memory: Mapping[str, object]) -> None:
        """It remembers nothing."""

    def visit(self, site_call: SiteCall) -> list[Event]:
        self.change(site_call.tensors)
        return [Event(self.site, "", None, None, site_call.step, "", "", None, None, True)]


def fill_first(name: str, value: float) -> Callable[[Mapping[str, Tensor]], object]:
    """A change of the first element of a tensor to this value."""
    return lambda tensors: tensors[name].view(-1)[:1].fill_(value)
