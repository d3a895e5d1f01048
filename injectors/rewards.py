"""What goes wrong between a policy's completions and what it learns from them: rewards that are late or of another.

Rewards that are stuck, or have the other sign, are faults of values at the site `reward`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from harness.config import PER_TRIAL, number
from harness.faults.facts import Facts
from harness.faults.fault import InjectableFault
from harness.training.sites import Event, Site, SiteCall
from injectors.fault import Strike, digest, too_late, whole_event


def no_rollouts(facts: Facts, given: str) -> Iterator[str]:
    """Why a run has no completions that could be struck, if it has none."""
    if not facts.completions:
        yield f"{given}: this run samples no completions; allowed with it: objective=policy"


@dataclass(frozen=True)
class RewardFault(InjectableFault):
    """Base: of all completions of the rollouts in these steps."""

    start: int = number(PER_TRIAL, 100, "first step; of policy.updates steps on a rollout, the first is struck", low=0)
    duration: int | None = number(PER_TRIAL, None, "steps from the first strike to the last; null: to the end", low=1)

    def refused(self, facts: Facts) -> Iterator[str]:
        yield from no_rollouts(facts, f"fault.kind={self.kind}")


@dataclass(frozen=True)
class LateReward(RewardFault):
    """Completions are rewarded as those of an earlier rollout were: a queue between reward model and trainer is late.

    Cf. Noukhovitch et al. 2024, arXiv 2410.18252, on learning from what was sampled before.
    """

    kind: str = "late_reward"
    late: int = number(PER_TRIAL, 1, "rollouts by which rewards are late", low=1)

    def refused(self, facts: Facts) -> Iterator[str]:
        yield from super().refused(facts)
        yield from too_late(self.late * facts.updates, self.start)

    def arm(self, facts: Facts) -> LateRewards:
        late = self.late * facts.updates
        return self.armed(LateRewards, Site.REWARD, facts, Site.REWARD, late, late=late)


@dataclass(frozen=True)
class ShiftedAdvantage(RewardFault):
    """Each completion gets the advantage of the one so many places before it: groups and completions are misaligned.

    By a group's size or a multiple of it, advantages are those of another prompt; cf. Shao et al. 2024, arXiv
    2402.03300, on groups.
    """

    kind: str = "shifted_advantage"
    places: int = number(PER_TRIAL, 1, "by how many places", low=1)

    def refused(self, facts: Facts) -> Iterator[str]:
        yield from super().refused(facts)
        if facts.completions and self.places % facts.completions == 0:
            why = f"all of the {facts.completions} completions of a rollout are in their places again"
            yield f"fault.places={self.places}: {why}; allowed: no multiple of that"

    def arm(self, facts: Facts) -> ShiftedAdvantages:
        return self.armed(ShiftedAdvantages, Site.ADVANTAGE, facts, places=self.places)


@dataclass(kw_only=True)
class ShiftedAdvantages(Strike):
    """Moves advantages [B] on."""

    places: int

    def strike(self, site_call: SiteCall) -> list[Event]:
        ((name, values),) = site_call.tensors.items()
        before = digest(values)
        values.copy_(values.roll(self.places, 0))
        return whole_event(site_call, name, before, [values])


@dataclass(kw_only=True)
class LateRewards(Strike):
    """Keeps the rewards of rollouts in the last `late` steps, [B] each, and those before the first strike.

    So a row that goes back finds what it needs; what is not kept stays as it is.
    """

    late: int
    _kept: dict[int, Tensor] = field(default_factory=dict)  # by step

    @property
    def memory(self) -> dict[str, Tensor]:
        return {str(step): rewards for step, rewards in self._kept.items()}

    def recall(self, memory: Mapping[str, Tensor]) -> None:
        self._kept = {int(step): rewards for step, rewards in memory.items()}

    def visit(self, site_call: SiteCall) -> list[Event]:
        if (site_call.site, site_call.step) in self.looks:
            self._kept[site_call.step] = site_call.tensors["reward"].clone()
        for step in [step for step in self._kept if self.steps.start <= step < site_call.step - self.late]:
            del self._kept[step]
        return super().visit(site_call)

    def strike(self, site_call: SiteCall) -> list[Event]:
        rewards = site_call.tensors["reward"]
        before = digest(rewards)
        rewards.copy_(self._kept.get(site_call.step - self.late, rewards))
        return whole_event(site_call, "reward", before, [rewards])
