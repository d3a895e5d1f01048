"""What callbacks for trainers of other packages have in common: the loop is theirs, and does not go back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from torch import nn

from harness.config import ConfigError
from harness.guards.playbook import actions_of
from harness.own_loop.course import Course
from harness.own_loop.keeping import Keeping
from harness.own_loop.legs import RUN, TWIN, Leg
from harness.own_loop.results import RunResults
from harness.own_loop.snapshots import Snapshot
from harness.own_loop.steps import AttachConfig
from harness.own_loop.warn import warn
from harness.own_loop.witness import ReplayCheck
from harness.recovery.table import ACTIONS

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
        self._leg: Leg | None = None
        self._twin: Leg | None = None
        self.differing: str | None = None

    def _open(self, model: nn.Module, optimizers: Sequence[Any], extras: Sequence[Any], steps: int, done: int) -> None:
        """Training begins, of so many steps, of which some were done by another process."""
        self._hooks.close()
        chosen = self._asked.chosen if self._kind == RUN else ()
        extras = [*extras, *self._asked.extras]
        asked = replace(self._asked, model=model, optimizers=optimizers, extras=extras, chosen=chosen, steps=steps)
        course = self._course = Course(asked, self, is_measured=True)
        self._hooks.enter_context(course.hooks)
        course.open(steps)
        course.step = course.first_step = done
        course.expect_replays()
        leg = course.run_leg
        if self._kind == RUN:
            self._leg, self._first = leg, course.take_snapshot()
            leg.witness.keeps_weights = True
            if self._keeping:
                self._keeping.begin(course, False)
            return
        assert self._first is not None and self._leg is not None
        leg.kind = TWIN
        self._leg.strikes.see_ranks()
        leg.comparison = ReplayCheck(self._leg, self._leg.strikes, raises=False)
        course.as_written |= self._as_written
        course.go(leg, self._first)
        self._twin = leg

    def _close(self) -> None:
        """Training is over: nothing of its objects is changed any more."""
        if self._kind == RUN:
            self._end_short(self._course, lacks_twin=False)
            events = self._gather()
            if self._keeping:
                self._keeping.finish(None, events)
        self._as_written = set(self._course.as_written)
        self._hooks.close()

    def _fail(self) -> None:
        """Training has ended with an error."""
        self._hooks.close()
        if self._keeping and self._kind == RUN:
            self._keeping.stop()

    def _train_twin(self, train: Callable[[], Any]) -> None:
        if self._first is None or self._twin is not None:
            raise ConfigError("callback.twin: needs a run, and no twin; allowed: once, after the training")
        if begun := self._course.first_step:
            why = f"the run went on from a checkpoint at step {begun}"
            raise ConfigError(f"callback.twin: {why}; allowed: a run from its first step")
        final, self._kind = self._course.take_snapshot(), TWIN
        try:
            train()
        finally:
            self._hooks.close()
            self._course.keeper.put_back(final)
            self._kind = RUN
        if self._keeping and self._twin is not None:
            self._keeping.finish(self._twin, self.events)

    # --- as the plan of a course ---------------------------------------------------------------------------------

    def begin(self, course: Course, loader: Iterable[Any]) -> None:
        """There is no loader."""

    def turn(self, course: Course) -> bool:
        return False

    def refuse(self, course: Course, reason: str) -> None:
        """The twin is none: nothing is said by it."""
        self.differing, self._twin = reason, None
        course.leg.stopped = "differs"
        warn(f"twin: there is none, because {reason}")

    def lengthened(self, course: Course) -> None:
        """Not under a Trainer, which says how many steps there are."""

    def begun(self, course: Course) -> None:
        """Nothing is done here."""

    def stepped(self, course: Course) -> None:
        if self._keeping and self._kind == RUN:
            self._keeping.stepped(course.leg)
