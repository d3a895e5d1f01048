"""Where one run stands on its ladder, and the log of its incidents."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from harness.config.ladder import Rung
from harness.config.limits import KEPT_EVENTS


@dataclass
class Book:
    """Where one run stands on its ladder; `front` is the farthest step of the incident's alarms."""

    used: dict[int, int] = field(default_factory=dict)  # times that each rung was used in the incident at hand
    front: int = -1
    over: int = -1  # the incident is over beyond this step, unless there is another alarm up to it
    reached: int | None = None  # the earliest step to which it went back
    stood: int = 0  # times that an action found the alarm to be one still
    waits: dict[str, Any] | None = None  # for a step: place of the rung, action, step, memory
    is_undone: bool = False  # the oracle has spoken
    log: list[dict[str, Any]] = field(default_factory=list)

    def open(self, step: int) -> None:
        """Another incident begins."""
        self.log.append({"step": step, "last": 0, "closed": None, "alarms": 0, "steps_lost": 0, "acts": []})

    def rest(self, rung: Rung) -> None:
        """The rung was climbed: the incident is over after its cool-down, if nothing more is seen."""
        self.over = max(self.over, self.front + rung.cool_down)
        self.log[-1]["closed"] = self.over + 1

    def reach(self, step: int) -> None:
        """The run went back to this step."""
        self.reached = step if self.reached is None else min(self.reached, step)

    def lose(self, steps: int) -> None:
        """Steps that were trained in vain, or skipped."""
        if self.log:
            self.log[-1]["steps_lost"] += steps

    def incidents(self, steps: int) -> list[dict[str, Any]]:
        """The first incidents of a run of so many steps; one that is not over at its end has `closed` None."""
        log = self.log[:KEPT_EVENTS]
        closed = [None if one["closed"] is None or one["closed"] >= steps else one["closed"] for one in log]
        return [one | {"closed": step} for one, step in zip(log, closed, strict=True)]

    def wait(self, place: int, action: str, step: int, memory: Mapping[str, Any], takes: bool) -> None:
        """The action of the rung at `place` is asked again at that step; `takes` it if no rung comes after."""
        self.waits = {"place": place, "action": action, "step": step, "memory": dict(memory), "takes": takes}

    @property
    def hears_before_awaited(self) -> bool:
        """Whether alarms at steps before the one that is awaited are asked about, where these are finite.

        Not where the same steps are run again: what was an alarm there at first, and was right, is one again.
        """
        return self.waits is not None and not self.waits["takes"]
