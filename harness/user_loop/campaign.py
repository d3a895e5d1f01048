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
from harness.storage.store import PackStore, check_store, open_store
from harness.storage.stored import complete_trials
from harness.user_loop.handle import Handle
from harness.user_loop.inputs import NotRepeated
from harness.user_loop.loop_driver import LoopDriver
from harness.user_loop.named_tensors import raw_bytes
from harness.user_loop.presets import ChosenFault
from harness.user_loop.recovery_session import RecoverySession
from harness.user_loop.replay_check import ReplayCheck
from harness.user_loop.replays import CONTROL, FAULT, WALK, LoopReplay
from harness.user_loop.results_writer import BLOCK, STUDY, UNKNOWN, Describing, finish, signals_of, write
from harness.user_loop.snapshots import Snapshot
from harness.user_loop.steps import AttachConfig
from harness.user_loop.strikes import LoopStrikes

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

    def __init__(self, described: Sequence[ChosenFault], samples: int, out: Path, report: Callable[[int, int], None]):
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
        self._walk: LoopReplay | None = None
        self._first: Snapshot | None = None
        self._at: Snapshot | None = None  # where faults begin
        self._memory: Any = None
        self._treated: RecoverySession | None = None
        self._done: list[LoopReplay] = []
        self._has_golden = False
        self.trained = self.stored = self.steps = self._total = 0

    def begin(self, driver: LoopDriver, loader: Iterable[Any]) -> None:
        self._golden = driver.run_replay
        self._golden.strikes = learning = Learning(
            self._described,
            driver.places,
            driver.asked.facts,
            driver.asked.seed,
            self._golden.interventions,
            driver.ranks,
            set(),
        )
        learning.begin(driver.total or 0, driver.scaler is not None)
        self._describing, self._folder = Describing(driver), open_store(self._out, STUDY)
        driver.expect_replays()
        self._first = driver.take_first_snapshot()
        self._golden.records.keeps_weights = True
        driver.batches.keeps, driver.batches.keeps_all = 0, True
        driver.go(self._golden)

    # --- the order of replays ---------------------------------------------------------------------------------------

    def turn(self, driver: LoopDriver) -> bool:
        ended = driver.replay
        if ended is self._golden:
            control = driver.new_replay(CONTROL, ended.series.length)
            control.comparison = ReplayCheck(ended, control.strikes, raises=True)
            driver.go(control, self._first)
        elif ended.kind == CONTROL:
            self._draw(driver)
            self._walk = driver.new_replay(WALK, 0)
            self._walk.comparison = ReplayCheck(self._golden, self._walk.strikes, raises=True)
            return self._walk_on(driver, self._first)
        elif ended is self._walk:
            return self._next_fault(driver)
        else:
            self._ended(driver, ended)
            return self._next_fault(driver)
        return True

    def refuse(self, driver: LoopDriver, reason: str) -> None:
        """What is trained once more is another run: nothing can be compared."""
        raise NotRepeated(f"campaign: {reason}")

    def lengthened(self, driver: LoopDriver) -> None:
        """Not while a campaign trains: its length is known."""

    def _draw(self, driver: LoopDriver) -> None:
        """The faults, by the step at which they begin; those that are in the store already are left out."""
        facts, there = self._golden.strikes.facts, complete_trials(self._out)
        assert facts is not None
        steps = self._golden.series.length
        self._has_golden = self._describing.trial([], steps).id in there
        for one, chosen in zip(self._golden.strikes.faults, self._described, strict=True):
            of_taps = "taps" in one.fault.asks()
            what = facts.taps if of_taps else one.tensors or facts.tensors
            fault = chosen.started(steps).fitted(what, "activation" if of_taps else "tensor")
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

    def _walk_on(self, driver: LoopDriver, start: Snapshot | None) -> bool:
        """The golden run goes on to the next step at which faults begin."""
        if not self._pending:
            return self._end(driver)
        assert self._walk is not None
        self._walk.steps = min(self._pending) + 1
        driver.go(self._walk, start)
        return True

    def _next_fault(self, driver: LoopDriver) -> bool:
        assert self._walk is not None and self._at is not None
        step = self._at.step
        if not self._pending.get(step):
            self._pending.pop(step, None)
            return self._walk_on(driver, self._at)
        fault = self._pending[step].pop(0)
        replay = driver.new_replay(FAULT, self._golden.steps, [ChosenFault(fault)])
        replay.strikes.learn_from(self._golden.strikes)
        replay.series.take(self._golden.series, step)
        replay.comparison = ReplayCheck(self._golden, replay.strikes, raises=True)
        replay.watch.recall(self._memory)
        replay.trained = list(self._golden.trained)
        if replay.session and self._treated:
            replay.session.fork(self._treated)
        driver.go(replay, self._at)
        return True

    def begun(self, driver: LoopDriver) -> None:
        """A walk comes to the step at which faults begin: keep all there is, with what the loop carries into it."""
        replay = driver.replay
        if replay is self._walk and driver.step == replay.steps - 1:
            self._at, self._memory = driver.take_snapshot(), replay.watch.memory()
            self._treated = driver.new_replay(WALK, 0).session
            if self._treated and replay.session:
                self._treated.fork(replay.session)

    # --- a step of a fault ---------------------------------------------------------------------------------------

    def stepped(self, driver: LoopDriver) -> None:
        self.steps += 1
        replay, step = driver.replay, driver.replay.series.length - 1
        if replay is self._golden:
            self._digests[step] = self._digest(driver)
        if replay.kind != FAULT:
            return
        if replay.nonfinite_step is not None and replay.session is None:
            replay.stopped = "not finite"
        loss, golden = replay.losses, self._golden.losses
        is_alike = step < len(golden) and loss[step].tobytes() == golden[step].tobytes() and driver.step == step + 1
        is_over = replay.strikes.are_over(step) and (replay.session is None or replay.session.stands_alike(step))
        if is_alike and is_over and self._digest(driver) == self._digests[step]:
            replay.masked_step, replay.stopped = step, "masked"
            replay.series.take(self._golden.series, self._golden.series.length)

    def _digest(self, driver: LoopDriver) -> str:
        """Of all that a step changes, but random streams."""
        hasher, places = hashlib.blake2b(digest_size=16), driver.places
        slots = [x for named in places.slots().values() for x in named.values()]
        for values in [*places.weights.values(), *places.buffers.values(), *slots]:
            hasher.update(raw_bytes(values))
        return hasher.hexdigest()

    def _ended(self, driver: LoopDriver, replay: LoopReplay) -> None:
        self._done.append(replay)
        self.trained += 1
        self._report(self.trained, self._total)
        if len(self._done) == TOGETHER:
            self.store(driver)

    def store(self, driver: LoopDriver) -> None:
        """Write the faults that are done, with the golden run in the first pack."""
        if not self._done:
            return
        steps = self._golden.series.length
        replays = [*([] if self._has_golden else [self._golden]), *self._done]
        faults = [
            [one.fault for one in replay.strikes.faults] if replay is not self._golden else [] for replay in replays
        ]
        trials = [self._describing.trial(of_replay, steps) for of_replay in faults]
        name = hashlib.sha256("".join(trial.id for trial in trials).encode()).hexdigest()[:16]
        about = UNKNOWN, environment_of(driver.places.device, driver.ranks.size), BLOCK, signals_of(driver)
        pack = PackStore.create(self._folder, name, trials, steps, 1, *about)
        write(pack, replays, 0, steps)
        finish(pack, replays, [replay.strikes.events if replay is not self._golden else [] for replay in replays])
        self._done, self._has_golden = [], True

    def _end(self, driver: LoopDriver) -> bool:
        self.store(driver)
        return False

    def put_back(self, driver: LoopDriver) -> None:
        """The model is left as it was."""
        if self._first is not None:
            driver.keeper.put_back(self._first)


def run_campaign(
    body: Body,
    asked: AttachConfig,
    described: Sequence[ChosenFault],
    samples: int,
    out: Path,
    report: Callable[[int, int], None],
) -> CampaignCounts:
    """Go through the body's loop once for the golden run and once for each fault, and write a results folder."""
    plan = CampaignPlan(described, samples, out, report)
    driver = LoopDriver(asked, plan, is_measured=True)
    if driver.ranks.size > 1:
        raise ConfigError(f"campaign: {driver.ranks.size} processes train this model; allowed: one")
    try:
        body(Handle(driver))
        if not driver.is_over:
            why = "the body returned before its loop was over"
            raise ConfigError(f"campaign: {why}; allowed: a body that goes through all of run.steps(loader)")
    finally:
        plan.put_back(driver)
        driver.hooks.close()
        plan.store(driver)
    return CampaignCounts(out, plan.trained, plan.stored, plan.steps)
