"""The log of incidents that playbooks leave in the store, a list a trial; `log_of` is the one place that reads it.

    {"step": first alarm, "last": last alarm, "closed": step at which it was over, or null, "alarms": how many,
     "steps_lost": trained in vain or skipped,
     "acts": [{"step": s, "detectors": {NAME: score}, "loss": x, "grad_norm": y, "action": NAME, "to": step or null,
               "detail": {...}}]}

A number that is not finite is stored as text. A store without a playbook has no such list.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from harness.storage.records import Unreadable, record_of
from harness.storage.stored import PackInfo

ATTRIBUTE = "incidents"


@dataclass(frozen=True, kw_only=True)
class Act:
    """What was done at one alarm: which detectors said so, with which scores, and to which step the row went back."""

    step: int
    action: str
    detectors: Mapping[str, float | str | None] = field(default_factory=dict)
    loss: float | str | None = None
    grad_norm: float | str | None = None
    to: int | None = None
    detail: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Logged:
    """One incident, from its first alarm to the last, and what was done about it; steps of the trial."""

    step: int
    last: int
    alarms: int
    closed: int | None = None
    steps_lost: int = 0
    acts: tuple[Act, ...] = ()


def log_of(pack: PackInfo) -> Mapping[str, list[Logged]]:
    """Trial -> its incidents, of a pack; nothing of one whose store has no log. Raises Unreadable for no such log."""
    logs = pack.attributes.get(ATTRIBUTE)
    if logs is None:
        return {}
    file = pack.path
    if not isinstance(logs, list) or len(logs) != len(pack.attributes["ids"]):
        raise Unreadable(file, f"{ATTRIBUTE} is not one value for each trial")
    return {
        trial: [record_of(entry, Logged, file) for entry in entries or []]
        for trial, entries in zip(pack.attributes["ids"], logs, strict=True)
    }


def logs_of(packs: Iterable[PackInfo]) -> dict[str, list[Logged]]:
    """Trial -> its incidents, of all finished ones of these packs that have a log; what cannot be read is left out."""
    found: dict[str, list[Logged]] = {}
    for pack in packs:
        if pack.complete:
            try:
                found |= log_of(pack)
            except Unreadable:
                continue
    return found


def number(value: float | str | None) -> float:
    """A logged number; NaN where there is none."""
    try:
        return float("nan") if value is None else float(value)
    except ValueError:
        return float("nan")
