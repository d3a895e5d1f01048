"""A run of the user's loop, as `attach` gives it: the loop goes through it, and it says what came of that."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any

import numpy as np

from harness.config import ConfigError
from harness.user_loop.batches import BatchBuffer
from harness.user_loop.handle import Handle
from harness.user_loop.loop_driver import LoopDriver
from harness.user_loop.replay_check import ReplayCheck
from harness.user_loop.replays import TWIN, LoopReplay
from harness.user_loop.results import RunResults
from harness.user_loop.results_writer import Keeping
from harness.user_loop.snapshots import Snapshot, difference
from harness.user_loop.steps import AttachConfig
from harness.user_loop.warn import warn


class AttachedRun(Handle, RunResults):
    """`steps` hands out batches, `observe` takes the loss; the rest says what came of it.

    A context manager; without a `with` block it ends with `close`, or with the last step of `while run.next()`.
    """

    def __init__(self, asked: AttachConfig, wants_twin: bool | None, keeping: Keeping | None):
        self._wants_twin, self._keeping = wants_twin, keeping
        self._first: Snapshot | None = None
        self._final: Snapshot | None = None
        self._twin_comes = False
        super().__init__(LoopDriver(asked, self))
        self._replay: LoopReplay | None = self._driver.run_replay
        self._twin: LoopReplay | None = None
        self.differing: str | None = None
        """What is another one when the run is gone through again from its first step, so that there is no twin."""

    def __enter__(self) -> AttachedRun:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(is_whole=error is None)

    def next(self) -> bool:
        if super().next():
            return True
        self.close()
        return False

    def twin(self) -> Iterator[Any]:
        """The batches of the golden twin: the same loop from the first step, without faults; after the run.

        Raises ConfigError where there is a twin, and where what it needs was not kept.
        """
        driver = self._driver
        self._check_open("run.twin")
        if self._twin is not None or self.differing:
            raise ConfigError("run.twin: was asked for before; allowed: once a run")
        if self._first is None or not driver.batches.can_begin_anew or driver.has_epochs:
            why = "the first snapshot or the batches were not kept, or the loop has its epochs from run.epochs"
            allowed = "attach(..., twin=True), or a fault and a loader that is no iterator"
            raise ConfigError(f"run.twin: {why}; allowed: {allowed}")
        driver.end_early()
        driver.is_over = False
        self._begin_twin(driver)
        while driver.advance():
            yield driver.batch

    # --- its ways through the loop -------------------------------------------------------------------------------

    @property
    def may_go_on(self) -> bool:
        """Whether another loader may follow, where nobody has said how many steps the run has."""
        return not self._wants_twin

    @property
    def may_watch(self) -> bool:
        """Whether the loop may ask for no batches."""
        return not self._wants_twin

    def state_dict(self) -> dict[str, Any]:
        """What the run goes on with in another process, to be saved beside the loop's own checkpoint.

        After `observe`, in a pass in which an optimizer has stepped, and before the model is saved: the step ends here.
        """
        self._check_open("run.state_dict")
        return self._driver.state()

    def load_state_dict(self, state: Any) -> None:
        """Go on from there, before the first batch; model, optimizer and extras are the loop's to load.

        The loader is that of what is left of the run. A resumed run has no twin, and cannot go back to steps before it.
        """
        self._check_open("run.load_state_dict")
        if self._wants_twin:
            raise ConfigError("twin=true: a resumed run has no first step; allowed: twin=False")
        self._driver.resume(state)

    def begin(self, driver: LoopDriver, loader: Iterable[Any]) -> None:
        """Keep what a twin needs."""
        is_iterator, wants = hasattr(loader, "__next__"), self._wants_twin
        if driver.is_resumed:
            is_iterator = True
        if wants or (wants is None and driver.asked.chosen and not is_iterator):
            driver.expect_replays()
            self._first = driver.take_first_snapshot()
            driver.run_replay.records.keeps_weights = True
            driver.batches.checks = not is_iterator
        if wants and is_iterator:
            driver.batches.keeps, driver.batches.keeps_all = 0, True
        if self._keeping:
            self._keeping.begin(driver, bool(wants))
        self._twin_comes = bool(wants)

    def turn(self, driver: LoopDriver) -> bool:
        if self._twin_comes and driver.replay is self._run:
            self._begin_twin(driver)
            return True
        return self._end()

    def _begin_twin(self, driver: LoopDriver) -> None:
        self._final, self._twin_comes = driver.take_snapshot(), False
        steps = self._run.steps if self._run.stopped else self._run.series.length
        self._twin = replay = driver.new_replay(TWIN, steps)
        self._run.strikes.see_ranks()
        replay.comparison = ReplayCheck(self._run, self._run.strikes, raises=False)
        driver.go(replay, self._first)  # under the random streams of the first time

    def refuse(self, driver: LoopDriver, reason: str) -> None:
        """The twin is none: nothing is said by it."""
        self.differing, self._twin = reason, None
        driver.replay.stopped = "differs"
        warn(f"twin: there is none, because {reason}")

    def _end(self) -> bool:
        """All is done: the model is as the run has left it."""
        if self._final is not None:
            if self._twin is not None:
                self._see_whether_masked(self._twin, self._final)
            self._driver.keeper.put_back(self._final)
            self._final = None
        return False

    def _see_whether_masked(self, twin: LoopReplay, final: Snapshot) -> None:
        """A run that ended as its twin, bit for bit, was its twin again after the last step whose loss was another."""
        changed = self._run.strikes.first_change
        if changed is None or twin.series.length < twin.steps or difference(final, self._driver.take_snapshot()):
            return
        with np.errstate(invalid="ignore"):
            others = np.flatnonzero(self._run.losses != twin.losses)
        self._run.masked_step = int(max(changed, others.max(initial=0)))

    def begun(self, driver: LoopDriver) -> None:
        """Nothing is done here."""

    def stepped(self, driver: LoopDriver) -> None:
        if self._keeping:
            self._keeping.stepped(driver.replay)

    def lengthened(self, driver: LoopDriver) -> None:
        if self._keeping:
            self._keeping.lengthened(driver)

    def close(self, is_whole: bool = True) -> None:
        """Nothing of the user's objects is changed any more; `is_whole` is False after an error."""
        if not self._is_open:
            return
        self._is_open = False
        try:
            if is_whole:
                self._driver.end_early()
                self._end_short(self._driver, self._twin_comes)
            self._end()
            events = self._gather() if is_whole else []
            if self._keeping and is_whole:
                self._keeping.finish(self._twin, events)
            elif self._keeping:
                self._keeping.stop()
        finally:
            self._driver.hooks.close()
            self._first = self._final = None
            self._driver.batches = BatchBuffer()
