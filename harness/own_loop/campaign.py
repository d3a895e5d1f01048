"""Many faults of the user's own run, each forked from one golden run where it begins."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.basics.environment import environment_of
from harness.config import ConfigError, shown
from harness.faults.fault import InjectableFault
from harness.own_loop.course import Course
from harness.own_loop.handle import Handle
from harness.own_loop.inputs import NotRepeated
from harness.own_loop.keeping import BLOCK, STUDY, UNKNOWN, Describing, finish, signals_of, write
from harness.own_loop.legs import CONTROL, FAULT, WALK, Leg
from harness.own_loop.places import raw_bytes
from harness.own_loop.presets import Chosen
from harness.own_loop.snapshots import Snapshot
from harness.own_loop.steps import AttachConfig
from harness.own_loop.strikes import LoopStrikes
from harness.own_loop.treatment import Treatment
from harness.own_loop.witness import ReplayCheck
from harness.storage.store import PackStore, check_store, open_store
from harness.storage.stored import complete_trials

TOGETHER = 32  # faults of a pack
Body = Callable[[Handle], None]


@dataclass(frozen=True)
class CampaignCounts:
    """What was trained: `faults` of them here and now, `stored` before; `steps` of the loop in all."""

    out: Path
    faults: int
    stored: int
    steps: int


class Learning(LoopStrikes):
    """Descriptions of faults, which strike nothing: what they ask for is found out, and then faults are drawn."""

    def _check_samples(self, fault: Any) -> None:
        """Descriptions of many faults are what is wanted here."""

    def _arm(self, step: int) -> None:
        pass

    @property
    def is_known(self) -> bool:
        """Whether all is known that the descriptions ask for."""
        return all(set(one.fault.asks()) <= self._known for one in self.faults)


class CampaignPlan:
    """The golden run, once more as a control, and up to each step at which faults begin; from there each fault.

    The control has to be the golden run bit for bit, or the loop has a state that no snapshot puts back, and nothing
    that is trained from one could be compared.
    """

    def __init__(self, described: Sequence[Chosen], samples: int, out: Path, report: Callable[[int, int], None]):
        for one in described:
            if not one.fault.can_be_drawn:
                why = f"fault={one.fault.name}: there is nothing to draw"
                raise ConfigError(f"{why}; allowed: faults of values, such as weight_bit")
        if isinstance(samples, bool) or not isinstance(samples, int) or samples < 1:
            raise ConfigError(f"samples={shown(samples)}: no number of faults; allowed: 1 or more")
        check_store(out, STUDY)
        self._described, self._samples, self._out, self._report = described, samples, out, report
        self._digests: dict[int, str] = {}  # of the golden run's state after each step
        self._pending: dict[int, list[InjectableFault]] = {}  # faults by the step at which they begin
        self._walk: Leg | None = None
        self._first: Snapshot | None = None
        self._at: Snapshot | None = None  # where faults begin
        self._memory: Any = None
        self._treated: Treatment | None = None
        self._done: list[Leg] = []
        self._has_golden = False
        self.trained = self.stored = self.steps = self._total = 0

    def begin(self, course: Course, loader: Iterable[Any]) -> None:
        self._golden = course.run_leg
        self._golden.strikes = learning = Learning(
            self._described,
            course.places,
            course.asked.facts,
            course.asked.seed,
            self._golden.remedies,
            course.ranks,
            set(),
        )
        learning.begin(course.total or 0, course.scaler is not None)
        self._describing, self._folder = Describing(course), open_store(self._out, STUDY)
        course.expect_replays()
        self._first = course.take_first_snapshot()
        self._golden.witness.keeps_weights = True
        course.batches.keeps, course.batches.keeps_all = 0, True
        course.go(self._golden)

    # --- the order of legs ---------------------------------------------------------------------------------------

    def turn(self, course: Course) -> bool:
        ended = course.leg
        if ended is self._golden:
            control = course.new_leg(CONTROL, ended.series.length)
            control.comparison = ReplayCheck(ended, control.strikes, raises=True)
            course.go(control, self._first)
        elif ended.kind == CONTROL:
            self._draw(course)
            self._walk = course.new_leg(WALK, 0)
            self._walk.comparison = ReplayCheck(self._golden, self._walk.strikes, raises=True)
            return self._walk_on(course, self._first)
        elif ended is self._walk:
            return self._next_fault(course)
        else:
            self._ended(course, ended)
            return self._next_fault(course)
        return True

    def refuse(self, course: Course, reason: str) -> None:
        """What is trained once more is another run: nothing can be compared."""
        raise NotRepeated(f"campaign: {reason}")

    def lengthened(self, course: Course) -> None:
        """Not while a campaign trains: its length is known."""

    def _draw(self, course: Course) -> None:
        """The faults, by the step at which they begin; those that are in the store already are left out."""
        facts, there = self._golden.strikes.facts, complete_trials(self._out)
        assert facts is not None
        steps = self._golden.series.length
        self._has_golden = self._describing.trial([], steps).id in there
        for one, chosen in zip(self._golden.strikes.faults, self._described, strict=True):
            what = facts.taps if "taps" in one.fault.asks() else facts.tensors
            fault = chosen.started(steps).fitted(what, "activation" if what is facts.taps else "tensor")
            for drawn in fault.drawn(self._samples, facts):
                if self._describing.trial([drawn], steps).id in there:
                    self.stored += 1
                else:
                    self._pending.setdefault(drawn.start, []).append(drawn)
        self._total = sum(map(len, self._pending.values()))
        known = max((1 for one in self._golden.strikes.faults if one.fault.asks()), default=0)
        if early := [start for start in self._pending if start < known or start >= steps]:
            why = f"the run has {steps} steps" if early[0] >= steps else "what it strikes is known after the first step"
            raise ConfigError(f"fault.start={early[0]}: {why}; allowed: {known} to {steps - 1}")

    def _walk_on(self, course: Course, start: Snapshot | None) -> bool:
        """The golden run goes on to the next step at which faults begin."""
        if not self._pending:
            return self._end(course)
        assert self._walk is not None
        self._walk.steps = min(self._pending) + 1
        course.go(self._walk, start)
        return True

    def _next_fault(self, course: Course) -> bool:
        assert self._walk is not None and self._at is not None
        step = self._at.step
        if not self._pending.get(step):
            self._pending.pop(step, None)
            return self._walk_on(course, self._at)
        fault = self._pending[step].pop(0)
        leg = course.new_leg(FAULT, self._golden.steps, [Chosen(fault)])
        leg.strikes.learn_from(self._golden.strikes)
        leg.series.take(self._golden.series, step)
        leg.comparison = ReplayCheck(self._golden, leg.strikes, raises=True)
        leg.watch.recall(self._memory)
        leg.trained = list(self._golden.trained)
        if leg.treatment and self._treated:
            leg.treatment.fork(self._treated)
        course.go(leg, self._at)
        return True

    def begun(self, course: Course) -> None:
        """A walk comes to the step at which faults begin: keep all there is, with what the loop carries into it."""
        leg = course.leg
        if leg is self._walk and course.step == leg.steps - 1:
            self._at, self._memory = course.take_snapshot(), leg.watch.memory()
            self._treated = course.new_leg(WALK, 0).treatment
            if self._treated and leg.treatment:
                self._treated.fork(leg.treatment)

    # --- a step of a fault ---------------------------------------------------------------------------------------

    def stepped(self, course: Course) -> None:
        self.steps += 1
        leg, step = course.leg, course.leg.series.length - 1
        if leg is self._golden:
            self._digests[step] = self._digest(course)
        if leg.kind != FAULT:
            return
        if leg.nonfinite_step is not None and leg.treatment is None:
            leg.stopped = "not finite"
        loss, golden = leg.losses, self._golden.losses
        is_alike = step < len(golden) and loss[step].tobytes() == golden[step].tobytes() and course.step == step + 1
        is_over = leg.strikes.are_over(step) and (leg.treatment is None or leg.treatment.stands_alike(step))
        if is_alike and is_over and self._digest(course) == self._digests[step]:
            leg.masked_step, leg.stopped = step, "masked"
            leg.series.take(self._golden.series, self._golden.series.length)

    def _digest(self, course: Course) -> str:
        """Of all that a step changes, but random streams."""
        hasher, places = hashlib.blake2b(digest_size=16), course.places
        slots = [x for named in places.slots().values() for x in named.values()]
        for values in [*places.weights.values(), *places.buffers.values(), *slots]:
            hasher.update(raw_bytes(values))
        return hasher.hexdigest()

    def _ended(self, course: Course, leg: Leg) -> None:
        self._done.append(leg)
        self.trained += 1
        self._report(self.trained, self._total)
        if len(self._done) == TOGETHER:
            self.store(course)

    def store(self, course: Course) -> None:
        """Write the faults that are done, with the golden run in the first pack."""
        if not self._done:
            return
        steps = self._golden.series.length
        legs = [*([] if self._has_golden else [self._golden]), *self._done]
        faults = [[one.fault for one in leg.strikes.faults] if leg is not self._golden else [] for leg in legs]
        trials = [self._describing.trial(of_leg, steps) for of_leg in faults]
        name = hashlib.sha256("".join(trial.id for trial in trials).encode()).hexdigest()[:16]
        about = UNKNOWN, environment_of(course.places.device, course.ranks.size), BLOCK, signals_of(course)
        pack = PackStore.create(self._folder, name, trials, steps, 1, *about)
        write(pack, legs, 0, steps)
        finish(pack, legs, [leg.strikes.events if leg is not self._golden else [] for leg in legs])
        self._done, self._has_golden = [], True

    def _end(self, course: Course) -> bool:
        self.store(course)
        return False

    def put_back(self, course: Course) -> None:
        """The model is left as it was."""
        if self._first is not None:
            course.keeper.put_back(self._first)


def run_campaign(
    body: Body,
    asked: AttachConfig,
    described: Sequence[Chosen],
    samples: int,
    out: Path,
    report: Callable[[int, int], None],
) -> CampaignCounts:
    """Go through the body's loop once for the golden run and once for each fault, and write a results folder."""
    plan = CampaignPlan(described, samples, out, report)
    course = Course(asked, plan, is_measured=True)
    if course.ranks.size > 1:
        raise ConfigError(f"campaign: {course.ranks.size} processes train this model; allowed: one")
    try:
        body(Handle(course))
        if not course.is_over:
            why = "the body returned before its loop was over"
            raise ConfigError(f"campaign: {why}; allowed: a body that goes through all of run.steps(loader)")
    finally:
        plan.put_back(course)
        course.hooks.close()
        plan.store(course)
    return CampaignCounts(out, plan.trained, plan.stored, plan.steps)
