"""A run of one's own, as `attach` gives it: the loop goes through it, and it says what came of that."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from harness.config import ConfigError
from harness.own_loop.batches import Batches
from harness.own_loop.course import Asked, Course
from harness.own_loop.handle import PROBED, Handle, not_repeated
from harness.own_loop.keeping import Keeping
from harness.own_loop.legs import AGAIN, PROBE, RUN, TWIN, Leg
from harness.own_loop.results import Results
from harness.own_loop.snapshots import Snapshot, difference


class Run(Handle, Results):
    """`steps` hands out batches, `observe` is told the loss; the rest says what came of it."""

    def __init__(self, asked: Asked, wants_twin: bool | None, keeping: Keeping | None):
        self._wants_twin, self._keeping = wants_twin, keeping
        self._first: Snapshot | None = None
        self._final: Snapshot | None = None
        self._probed: Snapshot | None = None
        self._left: list[str] = []  # legs that come
        super().__init__(Course(asked, self))
        self._leg: Leg | None = self._course.run_leg
        self._twin: Leg | None = None
        self.differing: str | None = None
        """The first tensor that is another one when two steps are run again from the same state."""

    def twin(self) -> Iterator[Any]:
        """The batches of the golden twin: the same loop from the first step, without faults; after the run.

        Raises ConfigError where there is a twin, and where what it needs was not kept.
        """
        course = self._course
        if self._twin is not None or self.differing:
            raise ConfigError("run.twin: was asked for before; allowed: once a run")
        if self._first is None or not course.batches.can_begin_anew:
            why = "the first snapshot or the batches were not kept"
            allowed = "attach(..., twin=True), or a fault and a loader that is no iterator"
            raise ConfigError(f"run.twin: {why}; allowed: {allowed}")
        course.end_early()
        self._final, self._left, course.is_over = course.keeper.take(course.step), [PROBE, AGAIN, TWIN], False
        self.turn(course)
        yield from course.go_on()

    # --- its ways through the loop -------------------------------------------------------------------------------

    @property
    def _tried(self) -> int:
        return min(PROBED, self._run.steps)

    def begin(self, course: Course, loader: Iterable[Any]) -> None:
        """Keep what a twin needs, and see whether the loop repeats itself."""
        is_iterator, wants = hasattr(loader, "__next__"), self._wants_twin
        if wants or (wants is None and course.asked.chosen and not is_iterator):
            self._first = course.keeper.take(0)
            course.batches.checks = not is_iterator
        if wants and is_iterator:
            course.batches.keeps, course.batches.keeps_all = 0, True
        if self._keeping:
            self._keeping.begin(course, bool(wants))
        if wants:
            self._left = [AGAIN, RUN, TWIN]
            course.go(course.new_leg(PROBE, self._tried))

    def turn(self, course: Course) -> bool:
        if not self._left:
            return self._end()
        kind, ended = self._left.pop(0), course.leg
        if ended.kind == PROBE:
            self._probed = course.keeper.take(course.step)
        if ended.kind == AGAIN and self._probed is not None:
            self.differing = difference(self._probed, course.keeper.take(course.step))
            self._probed = None
            if self.differing:
                self._left = []
                warnings.warn(f"twin: there is none, because {not_repeated(self.differing)}", stacklevel=5)
                if kind == TWIN:
                    return self._end()
        if kind == TWIN and self._final is None:
            self._final = course.keeper.take(course.step)
        course.go(self._of(kind, course), self._first)
        course.batches.begin_anew()  # under the random streams of the first time
        return True

    def _of(self, kind: str, course: Course) -> Leg:
        if kind == RUN:
            return self._run
        steps = self._run.steps if self._run.stopped else self._run.series.length
        leg = course.new_leg(kind, steps if kind == TWIN else self._tried)
        self._twin = leg if kind == TWIN else None
        return leg

    def _end(self) -> bool:
        """All is done: the model is as the run has left it."""
        if self._final is not None:
            if self._twin is not None:
                self._see_whether_masked(self._twin, self._final)
            self._course.keeper.put_back(self._final)
            self._final = None
        return False

    def _see_whether_masked(self, twin: Leg, final: Snapshot) -> None:
        """A run that ended as its twin, bit for bit, was its twin again after the last step whose loss was another."""
        changed = self._run.strikes.first_change
        if changed is None or twin.series.length < twin.steps or difference(final, self._course.keeper.take(-1)):
            return
        with np.errstate(invalid="ignore"):
            others = np.flatnonzero(self._run.losses != twin.losses)
        self._run.masked_step = int(max(changed, others.max(initial=0)))

    def stepped(self, course: Course) -> None:
        if self._keeping and not course.leg.is_plain:
            self._keeping.stepped(course.leg)

    def close(self, is_whole: bool = True) -> None:
        """Nothing of the user's objects is changed any more; `is_whole` is False after an error."""
        if not self._is_open:
            return
        self._is_open = False
        try:
            if is_whole:
                self._course.end_early()
                if self._left and self._wants_twin:
                    done, total = self._run.series.length, self._course.total
                    why = f"the loop ended after {done} of {total} steps, so its twin was not trained"
                    warnings.warn(f"twin=true: {why}; allowed: steps={done}", stacklevel=4)
            self._end()
            events = self._gather() if is_whole else []
            if self._keeping and is_whole:
                self._keeping.finish(self._twin, events)
            elif self._keeping:
                self._keeping.stop()
        finally:
            self._course.hooks.close()
            self._first = self._final = self._probed = None
            self._course.batches = Batches()
