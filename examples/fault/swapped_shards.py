"""A fault of one's own: weights whose halves have changed places, as if an all-gather put shards in the wrong order.

pip install examples/fault
stability-harness sweep -m fault=swapped_shards fault.tensor=head fault.start=50 train.steps=100
"""

from __future__ import annotations

from dataclasses import dataclass

from harness.config import PER_TRIAL, anything, number
from harness.training.sites import Event, Site, SiteCall
from injectors import Facts, InjectableFault
from injectors.fault import Strike, digest, matching, whole_event


@dataclass(frozen=True)
class SwappedShards(InjectableFault):
    """The two halves of each matching tensor change places, along its first axis.

    Such shards: cf. Rajbhandari et al. 2019, arXiv 1910.02054.
    """

    kind: str = "swapped_shards"
    start: int = number(PER_TRIAL, 100, "step of the (first) strike", low=0)
    tensor: str = anything(PER_TRIAL, "*", "glob over tensor names")

    def check(self, facts: Facts) -> None:
        matching("fault.tensor", self.tensor, facts.tensors)

    def arm(self, facts: Facts) -> Swapped:
        names = matching("fault.tensor", self.tensor, facts.tensors)
        return Swapped(Site.WEIGHT, self.strike_steps(facts), self.duration is None, names=names)


@dataclass(kw_only=True)
class Swapped(Strike):
    """Swaps the halves of these tensors."""

    names: list[str]

    def strike(self, site_call: SiteCall) -> list[Event]:
        events = []
        for name in self.names:
            whole = site_call.tensors[name]
            before = digest(whole)
            whole.copy_(whole.roll(len(whole) // 2, 0))
            events += whole_event(site_call, name, before, [whole])
        return events
