"""What came of the user's own run, and of its golden twin."""

from __future__ import annotations

from collections.abc import Sequence
from math import nan
from typing import Any

import numpy as np

from harness.basics.printing import count
from harness.config import ConfigError
from harness.training.sites import Event
from harness.user_loop.ending import Shortcoming, shortcomings
from harness.user_loop.loop_driver import LoopDriver
from harness.user_loop.replays import LoopReplay
from harness.user_loop.warn import warn


class RunResults:
    """Read from the two replays that a run and its twin are."""

    _driver: LoopDriver
    _replay: LoopReplay | None
    _twin: LoopReplay | None
    shortcomings: Sequence[Shortcoming] = ()
    """What kept the run from being what was asked for, such as an early end or a fault that never struck."""
    _events: list[Event] | None = None  # of all processes, once they have ended together

    def __repr__(self) -> str:
        """What came of it in a line: steps, strikes, incidents that a playbook answered, outcome."""
        if self._replay is None or not self._replay.series.length:
            return f"<{type(self).__name__}: nothing trained yet>"
        events = self.events
        strikes = f"{count(len(events), 'strike')}{f' from step {events[0].step} on' if events else ''}"
        answered = f", {count(len(self.incidents), 'incident')} answered" if self._replay.session else ""
        done = f"{count(self._replay.series.length, 'step')}, {strikes}{answered}"
        return f"<{type(self).__name__}: {done}; {self.outcome}>"

    def _gather(self) -> list[Event]:
        """What faults did in all processes; each of them has to ask."""
        self._events = self._driver.ranks.all_events(self._run.strikes.events)
        return self._events

    @property
    def _run(self) -> LoopReplay:
        if self._replay is None:
            raise ConfigError("results: nothing was trained; allowed: after the training has begun")
        return self._replay

    @property
    def signals(self) -> dict[str, np.ndarray]:
        """What was measured, [steps] each, float32, by the names that stores have."""
        return self._run.series.arrays()

    @property
    def twin_signals(self) -> dict[str, np.ndarray]:
        """The same of the golden twin; empty without one."""
        return self._twin.series.arrays() if self._twin else {}

    @property
    def deviation(self) -> np.ndarray:
        """Loss of the run less that of its golden twin, [steps], float64; NaN where one of them has none.

        Raises ConfigError without a twin.
        """
        if self._twin is None:
            raise ConfigError("deviation: there is no golden twin; allowed: after one was trained")
        losses, golden = (replay.losses.astype(np.float64) for replay in (self._run, self._twin))
        found, both = np.full(max(len(losses), len(golden)), nan), min(len(losses), len(golden))
        with np.errstate(invalid="ignore"):
            found[:both] = losses[:both] - golden[:both]
        return found

    @property
    def events(self) -> list[Event]:
        """What the faults did, as the records of a sweep have it; of several processes those of all after the end."""
        return self._run.strikes.events if self._events is None else self._events

    @property
    def incidents(self) -> list[dict[str, Any]]:
        """What the playbook has answered, as stores have it."""
        return self._run.incidents

    @property
    def outcome(self) -> str:
        """How the run ended: trained, divergent or non-finite; after semicolons each way in which it fell short.

        The first is by the rule of harness/objectives/outcome.py.
        """
        return "; ".join(dict.fromkeys([self._run.outcome, *(one.label for one in self.shortcomings)]))

    def _end_short(self, driver: LoopDriver, lacks_twin: bool) -> None:
        """Warn of each way in which the run was not what was asked for."""
        self.shortcomings = list(shortcomings(driver, lacks_twin))
        for shortcoming in self.shortcomings:
            warn(f"attach: {shortcoming.text}")
