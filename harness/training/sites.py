"""What strikes at the sites of one training step, and the schedule of what is due at them.

The loop knows only this file. An injector is shown the tensors of one trial at one site, never the loop.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from harness.basics import renamed
from harness.config.limits import KEPT_EVENTS
from harness.config.names import Site

AT_TAPS = (Site.ACTIVATION, Site.ACTIVATION_GRADIENT)


@dataclass(frozen=True)
class SiteCall:
    """One trial at one site of one step: `tensors` may be changed in place. `rank` is 0 where there are no ranks.

    With `is_look` nothing trains on them, and the injector's memory is what it was before, afterwards.
    """

    site: Site
    step: int
    tensors: Mapping[str, Tensor]
    rank: int = 0
    is_look: bool = False


@dataclass(frozen=True)
class Event:
    """What one strike did: the address, and the value there before and after.

    `before` and `after` are decimal for numbers, with the raw bits beside them in hexadecimal; for a whole tensor or
    batch they are SHA-256 digests of its bytes, and `index` is None. `mask` holds the bits that were to change, in
    hexadecimal, in the number format of the fault; `bit` is its number if it is a single one. `was_zero` says whether
    the number was zero in that format before; None where that is not asked. `format` is that number format, None for
    whole batches and the like, and in records that are older.
    """

    site: str
    tensor: str
    index: tuple[int, ...] | None
    bit: int | None
    step: int
    before: str
    after: str
    bits_before: str | None
    bits_after: str | None
    changed: bool
    rank: int = 0
    mask: str | None = None
    was_zero: bool | None = None
    format: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "index": list(self.index) if self.index is not None else None}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Event:
        return cls(**{**values, "index": None if values["index"] is None else tuple(values["index"])})


class Injector(Protocol):
    """One trial's fault, ready to strike."""

    @property
    def calls(self) -> Collection[tuple[Site, int]]:
        """Where and when it wants to be visited: to strike, or to look at what it will need for a strike."""

    @property
    def taps(self) -> Collection[str]:
        """The activations that it wants to see, for calls at the sites of AT_TAPS."""

    @property
    def permanent(self) -> bool:
        """Whether it strikes again at a step to which its trial has been rolled back."""

    @property
    def memory(self) -> Mapping[str, Any]:
        """What it has seen that a later step needs, by name: tensors, and what JSON holds. Part of a checkpoint."""

    def recall(self, memory: Mapping[str, Any]) -> None:
        """Go on with this memory."""

    def visit(self, site_call: SiteCall) -> list[Event]:
        """Change the trial's tensors in place, and say what was done. No events: nothing was struck."""


class FaultSchedule:
    """Which trial's injector is due where and when; asked at every site of every step, so it is one dict look-up.

    `armed` are the injectors by trial.
    """

    def __init__(self, injectors: Sequence[Injector | None]):
        self.armed = {trial: injector for trial, injector in enumerate(injectors) if injector is not None}
        self.events: list[list[Event]] = [[] for _ in injectors]
        self.strikes = [0 for _ in injectors]
        self.changes = [0 for _ in injectors]
        self.first: list[int | None] = [None for _ in injectors]  # step of the first call
        self.last: list[int | None] = [None for _ in injectors]
        self._due: dict[tuple[Site, int], list[int]] = {}
        self._reached = [0 for _ in injectors]
        self._first_change: list[int | None] = [None for _ in injectors]
        self._calls = {trial: frozenset(injector.calls) for trial, injector in self.armed.items()}
        for trial, injector in self.armed.items():
            for site, step in injector.calls:
                self._due.setdefault((site, step), []).append(trial)
            steps = [step for _, step in injector.calls]
            self.first[trial], self.last[trial] = min(steps, default=None), max(steps, default=None)

    def due(self, site: Site, step: int) -> Sequence[int]:
        """The trials (numbers in the pack as planned) that are visited here and now."""
        trials = self._due.get((site, step))
        return [trial for trial in trials if step >= self._reached[trial]] if trials else ()

    def is_due(self, trial: int, site: Site, step: int) -> bool:
        """Whether a trial's injector is called there at all, however often it has gone back."""
        return (site, step) in self._calls.get(trial, ())

    def first_change(self, trial: int) -> int | None:
        """The step of the first strike of a trial's injector that changed something."""
        return self._first_change[trial]

    def visit(self, trial: int, site_call: SiteCall) -> None:
        """Let one trial's injector strike, and keep its events."""
        self.note(trial, self.armed[trial].visit(site_call))

    def note(self, trial: int, events: Sequence[Event]) -> None:
        """Keep what one trial's injector has done."""
        self.strikes[trial] += len(events)
        changed = [event.step for event in events if event.changed]
        self.changes[trial] += len(changed)
        if changed and self._first_change[trial] is None:
            self._first_change[trial] = changed[0]
        self.events[trial] += events[: KEPT_EVENTS - len(self.events[trial])]

    def mark(self, trial: int) -> dict[str, Any]:
        """Where one trial's injector stands, to `take_back`."""
        counts = (len(self.events[trial]), self.strikes[trial], self.changes[trial], self._first_change[trial])
        return {"counts": counts, "memory": dict(self.armed[trial].memory)}

    def take_back(self, trial: int, mark: Mapping[str, Any]) -> None:
        """What its injector has done since does not count."""
        length, self.strikes[trial], self.changes[trial], self._first_change[trial] = mark["counts"]
        del self.events[trial][length:]
        self.armed[trial].recall(mark["memory"])

    def state(self) -> dict[str, Any]:
        """What has happened so far, to `restore`."""
        events = [[event.to_dict() for event in of_trial] for of_trial in self.events]
        memories = [(trial, dict(injector.memory)) for trial, injector in self.armed.items()]
        counts: dict[str, Any] = {"strikes": self.strikes, "changes": self.changes, "reached": self._reached}
        counts |= {"first_change": self._first_change}
        return {"events": events, "memories": memories, **counts}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` has given."""
        self.events = [[Event.from_dict(event) for event in of_trial] for of_trial in state["events"]]
        self.strikes, self.changes, self._reached = (list(state[name]) for name in ("strikes", "changes", "reached"))
        self._first_change = list(state["first_change"])
        for trial, memory in state["memories"]:
            self.armed[trial].recall(memory)

    def roll_back(self, trial: int, reached: int) -> None:
        """The trial goes back after having done the steps before `reached`: a transient fault does not strike again.

        A permanent one does, and one of the data wherever the same batch is read.
        """
        if trial in self.armed and not self.armed[trial].permanent and not self.is_of_data(trial):
            self._reached[trial] = max(self._reached[trial], reached)

    def is_of_data(self, trial: int) -> bool:
        """Whether a trial's fault is in the batches that it reads."""
        return bool(self._calls.get(trial)) and all(site == Site.BATCH for site, _ in self._calls[trial])


__getattr__ = renamed.names(__name__, Agenda="FaultSchedule", Visit="SiteCall")

__all__ = ["AT_TAPS", "Event", "FaultSchedule", "Injector", "Site", "SiteCall"]
