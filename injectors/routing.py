"""What goes wrong between a router and its experts: tokens that arrive at another one, at one alone, late or nowhere.

What is struck are the numbers of the experts to which each token is sent, after the router has weighed them: so a token
that arrives at another expert has the weight of the one that was meant, as where an all-to-all exchange goes wrong.
Where a token is sent to one expert twice, its weights add up. Of several micro-batches the first is struck.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from harness.config import PER_TRIAL, number
from harness.config.names import NEXT_BEST
from harness.faults.facts import Facts
from harness.faults.fault import InjectableFault, matching
from harness.training.sites import Event, Site, SiteCall
from injectors.draws import stream
from injectors.fault import Strike, digest, too_late, whole_event, wrong_rank


@dataclass(frozen=True)
class RoutingFault(InjectableFault):
    """Base: in the layers and on the ranks that are struck."""

    start: int = number(PER_TRIAL, 100, "first step with wrong routing", low=0)
    duration: int | None = number(PER_TRIAL, 1, "steps from the first strike to the last; null: to the end", low=1)
    layer: int | None = number(PER_TRIAL, None, "block whose experts are meant; null: all", low=0)
    rank: int | None = number(PER_TRIAL, None, "data-parallel rank; null: all", low=0)

    def asks(self) -> tuple[str, ...]:
        return ("routes",)

    def experts(self, facts: Facts) -> Iterator[tuple[str, int]]:
        """Fields that name an expert, and which."""
        yield from ()

    def refused(self, facts: Facts) -> Iterator[str]:
        if not facts.experts:
            yield f"fault.kind={self.kind}: this model has no experts; allowed with it: block.channel_mixer=moe"
            return
        if not facts.routes:
            why = f"experts are chosen again for the backward pass, without fault.kind={self.kind}"
            yield f"train.checkpointing=true: {why}; allowed: false"
            return
        matching("fault.tensor", "*", facts.routes, self.layer, "router")
        if self.rank is not None:
            yield from wrong_rank(self.rank, facts)
        for name, expert in self.experts(facts):
            if expert >= facts.experts:
                allowed = f"0 to {facts.experts - 1}"
                yield f"fault.{name}={expert}: beyond moe.experts={facts.experts}; allowed: {allowed}"

    def arm(self, facts: Facts) -> Rerouted:
        taps = matching("fault.tensor", "*", facts.routes, self.layer, "router")
        return self.armed(Rerouted, Site.ROUTING, facts, taps=tuple(taps), fault=self, facts=facts)

    def sent(self, facts: Facts, site_call: SiteCall, tap: str, experts_NxK: Tensor) -> Tensor:
        """Where the tokens are sent, [N, K], in the place of `experts`; the number of experts is nowhere."""
        raise NotImplementedError


@dataclass(frozen=True)
class WrongExpert(RoutingFault):
    """A share of the tokens arrives at other experts than those that were chosen, drawn uniformly.

    A wrong index in an exchange between experts; cf. Fedus et al. 2021, arXiv 2101.03961, on how it works.
    """

    kind: str = "wrong_expert"
    share: float = number(PER_TRIAL, 0.1, "share of the assignments of a token to an expert", above=0, high=1)

    def refused(self, facts: Facts) -> Iterator[str]:
        yield from super().refused(facts)
        if facts.experts == 1:
            yield "moe.experts=1: there is no other; allowed with fault=wrong_expert: 2 or more"

    def sent(self, facts: Facts, site_call: SiteCall, tap: str, experts_NxK: Tensor) -> Tensor:
        sent, count = experts_NxK.flatten().tolist(), max(1, round(self.share * experts_NxK.numel()))
        draws = stream(*facts.key("wrong expert", tap, site_call.step, site_call.rank))
        places = list(range(len(sent)))
        for i, word in enumerate(islice(draws, count)):
            j = i + word % (len(places) - i)
            places[i], places[j] = places[j], places[i]
            sent[places[i]] = (sent[places[i]] + 1 + (word >> 64) % (facts.experts - 1)) % facts.experts
        return torch.tensor(sent, device=experts_NxK.device).view_as(experts_NxK)


@dataclass(frozen=True)
class SwappedExperts(RoutingFault):
    """The tokens of two experts are exchanged: each computes what was meant for the other one.

    Ranks of expert parallelism whose order is wrong; cf. Fedus et al. 2021, arXiv 2101.03961.
    """

    kind: str = "swapped_experts"
    duration: int | None = number(PER_TRIAL, None, "steps with the wrong order; null: to the end", low=1)
    expert: int = number(PER_TRIAL, 0, "one of them", low=0)
    other: int = number(PER_TRIAL, 1, "the other one", low=0)

    def experts(self, facts: Facts) -> Iterator[tuple[str, int]]:
        yield from (("expert", self.expert), ("other", self.other))

    def refused(self, facts: Facts) -> Iterator[str]:
        yield from super().refused(facts)
        if self.expert == self.other:
            yield f"fault.other={self.other}: is fault.expert too; allowed: another one"

    def sent(self, facts: Facts, site_call: SiteCall, tap: str, experts_NxK: Tensor) -> Tensor:
        sent = torch.where(experts_NxK == self.expert, self.other, experts_NxK)
        return torch.where(experts_NxK == self.other, self.expert, sent)


@dataclass(frozen=True)
class OneExpert(RoutingFault):
    """All tokens arrive at one expert, as where a router has collapsed (cf. Fedus et al. 2021, arXiv 2101.03961)."""

    kind: str = "one_expert"
    expert: int = number(PER_TRIAL, 0, "the one that takes all", low=0)

    def experts(self, facts: Facts) -> Iterator[tuple[str, int]]:
        yield "expert", self.expert

    def sent(self, facts: Facts, site_call: SiteCall, tap: str, experts_NxK: Tensor) -> Tensor:
        return torch.full_like(experts_NxK, self.expert)


@dataclass(frozen=True)
class LostExpert(RoutingFault):
    """One expert gives nothing, and the router does not know of it: a rank of expert parallelism is lost.

    Its tokens pass by on the residual stream, less what the others give; cf. Rajbhandari et al. 2022, arXiv 2201.05596.
    """

    kind: str = "lost_expert"
    duration: int | None = number(PER_TRIAL, None, "steps without it; null: to the end", low=1)
    expert: int = number(PER_TRIAL, 0, "the one that is lost", low=0)

    def experts(self, facts: Facts) -> Iterator[tuple[str, int]]:
        yield "expert", self.expert

    def sent(self, facts: Facts, site_call: SiteCall, tap: str, experts_NxK: Tensor) -> Tensor:
        return torch.where(experts_NxK == self.expert, facts.experts, experts_NxK)


@dataclass(frozen=True)
class BypassedExpert(LostExpert):
    """One expert is lost, and the others know of it: its tokens go to the best expert that they were not sent to.

    Weights are those of the experts that a token now has, by current scores; where there is no other, it passes by as
    with `lost_expert`. Groups of experts are not looked at. Cf. Rajbhandari et al. 2022, arXiv 2201.05596.
    """

    kind: str = "bypassed_expert"

    def sent(self, facts: Facts, site_call: SiteCall, tap: str, experts_NxK: Tensor) -> Tensor:
        return torch.where(experts_NxK == self.expert, facts.experts + NEXT_BEST, experts_NxK)


@dataclass(frozen=True)
class LateRouting(RoutingFault):
    """Tokens are sent where those of `late` steps ago were sent: a buffer of the exchange that was not filled anew.

    Cf. Rajbhandari et al. 2022, arXiv 2201.05596, on that exchange.
    """

    kind: str = "late_routing"
    late: int = number(PER_TRIAL, 1, "steps by which it is late", low=1)

    def refused(self, facts: Facts) -> Iterator[str]:
        yield from super().refused(facts)
        yield from too_late(self.late, self.start)

    def arm(self, facts: Facts) -> LateRoutes:
        taps = matching("fault.tensor", "*", facts.routes, self.layer, "router")
        more: dict[str, Any] = {"taps": tuple(taps), "fault": self, "facts": facts, "late": self.late}
        return self.armed(LateRoutes, Site.ROUTING, facts, Site.ROUTING, self.late, **more)


@dataclass(kw_only=True)
class Rerouted(Strike):
    """Sends the tokens of a layer elsewhere."""

    fault: RoutingFault
    facts: Facts

    def visit(self, site_call: SiteCall) -> list[Event]:
        if self.fault.rank is not None and site_call.rank != self.fault.rank:
            return []
        return super().visit(site_call)

    def strike(self, site_call: SiteCall) -> list[Event]:
        ((tap, experts),) = site_call.tensors.items()
        before = digest(experts)
        experts.copy_(self.sent(site_call, tap, experts))
        return whole_event(site_call, tap, before, [experts])

    def sent(self, site_call: SiteCall, tap: str, experts_NxK: Tensor) -> Tensor:
        """Where the tokens are sent."""
        return self.fault.sent(self.facts, site_call, tap, experts_NxK)


@dataclass(kw_only=True)
class LateRoutes(Rerouted):
    """Keeps where tokens were sent in the last `late` steps.

    What is not kept any more, or was of another size because batches grow, is sent as it should be.
    """

    late: int
    _kept: dict[tuple[int, int, str], Tensor] = field(default_factory=dict)  # by step, rank and tap

    @property
    def memory(self) -> dict[str, Tensor]:
        return {f"{step} {rank} {tap}": experts for (step, rank, tap), experts in self._kept.items()}

    def recall(self, memory: Mapping[str, Tensor]) -> None:
        self._kept = {}
        for key, experts in memory.items():
            step, rank, tap = key.split(" ")
            self._kept[int(step), int(rank), tap] = experts

    def visit(self, site_call: SiteCall) -> list[Event]:
        if self.fault.rank is None or site_call.rank == self.fault.rank:
            ((tap, experts),) = site_call.tensors.items()
            if (site_call.site, site_call.step) in self.looks:
                self._kept[site_call.step, site_call.rank, tap] = experts.clone()
            for key in [key for key in self._kept if self.steps.start <= key[0] < site_call.step - self.late]:
                del self._kept[key]
        return super().visit(site_call)

    def sent(self, site_call: SiteCall, tap: str, experts_NxK: Tensor) -> Tensor:
        kept = self._kept.get((site_call.step - self.late, site_call.rank, tap), experts_NxK)
        return kept if kept.shape == experts_NxK.shape else experts_NxK
