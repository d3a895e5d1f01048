"""Schedules that a restart got wrong. A mere jump of the rate is a value that is scaled: `fault=learning_rate_jump`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from harness.config import PER_TRIAL, number
from harness.faults.facts import Facts
from harness.faults.fault import InjectableFault
from harness.training.sites import Event, Site, SiteCall
from injectors.fault import Strike


@dataclass(frozen=True)
class ScheduleOffset(InjectableFault):
    """The schedule is resumed at the wrong step: the rate of `offset` steps later, or earlier if it is negative.

    Beyond the ends of the schedule the rate is that of its first or last step.
    Cf. Gupta et al. 2023, arXiv 2308.04014.
    """

    kind: str = "schedule_offset"
    start: int = number(PER_TRIAL, 100, "step from which the schedule is wrong", low=0)
    duration: int | None = number(PER_TRIAL, None, "steps with the wrong rate; null: to the end", low=1)
    offset: int = number(PER_TRIAL, -100, "steps by which the schedule is ahead")

    def asks(self) -> tuple[str, ...]:
        return ("rate",)

    def arm(self, facts: Facts) -> OtherRate:
        steps, last = self.strike_steps(facts), facts.steps - 1
        rates = {step: facts.rate(min(max(step + self.offset, 0), last)) for step in steps}
        return self.armed(OtherRate, Site.LEARNING_RATE, facts, rates=rates)


@dataclass(frozen=True)
class WarmupSkipped(InjectableFault):
    """The warm-up is left out from `start` on: its remaining steps are taken at the peak rate.

    Xiong et al. 2020, arXiv 2002.04745.
    """

    kind: str = "warmup_skipped"
    start: int = number(PER_TRIAL, 0, "first step at the peak rate", low=0)
    duration: int | None = number(PER_TRIAL, None, "steps at the peak rate; null: to the end of the warm-up", low=1)

    def asks(self) -> tuple[str, ...]:
        return ("warmup", "peak")

    def refused(self, facts: Facts) -> Iterator[str]:
        if self.start >= (warmup := facts.warmup):
            allowed = f"0 to {warmup - 1}" if warmup else "a schedule with a warm-up"
            yield f"fault.start={self.start}: after the warm-up of {warmup} steps; allowed: {allowed}"

    def strike_steps(self, facts: Facts) -> range:
        steps = super().strike_steps(facts)
        return range(steps.start, max(steps.start, min(steps.stop, facts.warmup)), steps.step)

    def arm(self, facts: Facts) -> OtherRate:
        rates = dict.fromkeys(self.strike_steps(facts), facts.peak)
        return self.armed(OtherRate, Site.LEARNING_RATE, facts, rates=rates)


@dataclass(kw_only=True)
class OtherRate(Strike):
    """Sets the rate of each struck step."""

    rates: dict[int, float]

    def strike(self, site_call: SiteCall) -> list[Event]:
        rate = site_call.tensors["learning_rate"]
        before = rate.item()
        rate.fill_(self.rates[site_call.step])
        after = rate.item()
        texts = (repr(before), repr(after))
        return [Event(self.site, "learning_rate", (), None, site_call.step, *texts, None, None, before != after)]
