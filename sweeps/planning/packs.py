"""What a pack and a plan are: plain data, which commands that train nothing read without loading torch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Set
from dataclasses import dataclass
from typing import Any

from harness.config import NO_FAULT, Trial

PACK_ID = "[0-9a-f]{16}"  # a regular expression


def pack_id(trials: Iterable[str]) -> str:
    """The id of a pack that records these trials, in this order."""
    return hashlib.sha256(" ".join(trials).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class PackPlan:
    """Trials to train together. `unstored` are ids of golden trials whose results are stored elsewhere already."""

    trials: tuple[Trial, ...]
    unstored: frozenset[str]

    @property
    def id(self) -> str:
        return pack_id(trial.id for trial in self.recorded)

    @property
    def recorded(self) -> tuple[Trial, ...]:
        return tuple(trial for trial in self.trials if trial.id not in self.unstored)

    def to_dict(self) -> dict[str, Any]:
        """As JSON takes it."""
        return {"trials": [trial.to_dict() for trial in self.trials], "witnesses": sorted(self.unstored)}


@dataclass(frozen=True)
class Plan:
    """What a sweep is going to do."""

    packs: tuple[PackPlan, ...]
    asked: int
    added_twins: int
    complete: int

    @property
    def trials(self) -> int:
        return sum(len(pack.recorded) for pack in self.packs)


def without(pack: PackPlan, taken: Set[str]) -> PackPlan | None:
    """The pack less the trials that are `taken`; None if none of those that it records is left.

    The golden twins of those that are left stay, unstored, and so does one more where only one trial would be left: a
    pack of one has other bits.
    """
    left = [trial for trial in pack.recorded if trial.id not in taken]
    if len(left) == len(pack.recorded) or not left:
        return pack if left else None
    needed = {trial.id for trial in left} | {trial.golden.id for trial in left}
    company = [trial.id for trial in pack.trials if trial.fault == NO_FAULT and trial.id not in needed]
    needed |= set(company[: max(0, 2 - len(needed))])
    trials = tuple(trial for trial in pack.trials if trial.id in needed)
    return PackPlan(trials, frozenset(needed - {trial.id for trial in left}))
