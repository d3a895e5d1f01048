"""What callbacks for trainers of other packages have in common: the loop is theirs, and does not go back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from torch import nn

from harness.config import ConfigError
from harness.guards.playbook import actions_of
from harness.recovery.table import ACTIONS
from harness.user_loop.loop_driver import LoopDriver
from harness.user_loop.replay_check import ReplayCheck
from harness.user_loop.replays import RUN, TWIN, LoopReplay
from harness.user_loop.results import RunResults
from harness.user_loop.results_writer import Keeping
from harness.user_loop.snapshots import Snapshot
from harness.user_loop.steps import AttachConfig
from harness.user_loop.warn import warn

STAYS = ("carry_on", "skip", "lower_rate", "reset_moments")


class OwnTrainer(RunResults):
    """A run, and then a twin, of a trainer that calls back: the plan of their courses.

    Raises ConfigError for playbooks with an action that goes back or reads on.
    """

    def __init__(self, asked: AttachConfig, keeping: Keeping | None):
        for name in dict.fromkeys(actions_of(asked.settings)):
            if ACTIONS[name].goes_back or name == "skip_batches":
                stays = [action for action in STAYS if action in ACTIONS]
                why = "goes back or reads on, and the loop of a Trainer does not"
                raise ConfigError(f"recover.ladder: action {name}: {why}; allowed: {', '.join(stays)}")
        self._asked, self._keeping = asked, keeping
        self._kind = RUN
        self._first: Snapshot | None = None
        self._hooks = ExitStack()
        self._replay: LoopReplay | None = None
        self._twin: LoopReplay | None = None
        self.differing: str | None = None

    def _open(self, model: nn.Module, optimizers: Sequence[Any], extras: Sequence[Any], steps: int, done: int) -> None:
        """Training begins, of so many steps, of which some were done by another process."""
        self._hooks.close()
        chosen = self._asked.chosen if self._kind == RUN else ()
        extras = [*extras, *self._asked.extras]
        asked = replace(self._asked, model=model, optimizers=optimizers, extras=extras, chosen=chosen, steps=steps)
        driver = self._driver = LoopDriver(asked, self, is_measured=True)
        self._hooks.enter_context(driver.hooks)
        driver.open(steps)
        driver.step = driver.first_step = done
        driver.expect_replays()
        replay = driver.run_replay
        if self._kind == RUN:
            self._replay, self._first = replay, driver.take_snapshot()
            self._as_written = driver.as_written
            replay.records.keeps_weights = True
            if self._keeping:
                self._keeping.begin(driver, False)
            return
        assert self._first is not None and self._replay is not None
        replay.kind = TWIN
        self._replay.strikes.see_ranks()
        replay.comparison = ReplayCheck(self._replay, self._replay.strikes, raises=False)
        driver.as_written |= self._as_written
        driver.go(replay, self._first)
        self._twin = replay

    def _close(self) -> None:
        """Training is over: nothing of its objects is changed any more."""
        if self._kind == RUN:
            self._end_short(self._driver, lacks_twin=False)
            events = self._gather()
            if self._keeping:
                self._keeping.finish(None, events)
        self._hooks.close()

    def _fail(self) -> None:
        """Training has ended with an error."""
        self._hooks.close()
        if self._keeping and self._kind == RUN:
            self._keeping.stop()

    def _train_twin(self, train: Callable[[], Any]) -> None:
        if self._first is None or self._twin is not None:
            raise ConfigError("callback.twin: needs a run, and no twin; allowed: once, after the training")
        if begun := self._driver.first_step:
            why = f"the run went on from a checkpoint at step {begun}"
            raise ConfigError(f"callback.twin: {why}; allowed: a run from its first step")
        final, self._kind = self._driver.take_snapshot(), TWIN
        try:
            train()
        finally:
            self._hooks.close()
            self._driver.keeper.put_back(final)
            self._kind = RUN
        if self._keeping and self._twin is not None:
            self._keeping.finish(self._twin, self.events)

    # --- as the plan of a driver ---------------------------------------------------------------------------------

    def begin(self, driver: LoopDriver, loader: Iterable[Any]) -> None:
        """There is no loader."""

    def turn(self, driver: LoopDriver) -> bool:
        return False

    def refuse(self, driver: LoopDriver, reason: str) -> None:
        """The twin is none: nothing is said by it."""
        self.differing, self._twin = reason, None
        driver.replay.stopped = "differs"
        warn(f"twin: there is none, because {reason}")

    def lengthened(self, driver: LoopDriver) -> None:
        """Not under a Trainer, which says how many steps there are."""

    def begun(self, driver: LoopDriver) -> None:
        """Nothing is done here."""

    def stepped(self, driver: LoopDriver) -> None:
        if self._keeping and self._kind == RUN:
            self._keeping.stepped(driver.replay)
