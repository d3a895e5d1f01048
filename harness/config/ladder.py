"""A ladder of answers: what is done at an alarm, and what next where that has not helped."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

from harness.basics.errors import ConfigError
from harness.config.fields import from_yaml, shown

ANY = "any"  # of the detectors that watch
ORACLE = "oracle"  # which knows the fault
WANTED = "a list of {detector: NAME, action: NAME, limit: 3, cool_down: 50}"
LARGEST = 1_000_000  # steps or times


@dataclass(frozen=True)
class Rung:
    """One answer: to alarms of `detector`, names joined by + or `any`, the actions in turn, `limit` times an incident.

    The incident is over once `cool_down` steps beyond the farthest of its alarms have passed without one. `limit` null:
    as often as it takes.
    """

    detector: str = ANY
    action: str = "skip"
    limit: int | None = 1
    cool_down: int = 50

    def detectors(self, watching: Sequence[str]) -> tuple[str, ...]:
        """The names of those that it answers, where these watch."""
        named = tuple(self.detector.split("+"))
        return tuple(watching) if ANY in named else named

    @property
    def actions(self) -> tuple[str, ...]:
        return tuple(self.action.split("+"))


@lru_cache(maxsize=10_000)
def rungs(ladder: str) -> tuple[Rung, ...]:
    """The rungs of a ladder as a configuration has it."""
    return tuple(Rung(**rung) for rung in json.loads(ladder))


def canonical(value: Any, key: str = "playbook.ladder") -> str:
    """A ladder as a configuration has it, JSON, from a list as YAML has it or from its text. Raises ConfigError."""
    given = from_yaml(value)
    if not isinstance(given, list | tuple) or len(given) > 50:
        raise ConfigError(f"{key}={shown(value)}: not a ladder; allowed: {WANTED}, at most 50 of them")
    return json.dumps([asdict(_rung(rung, f"{key}[{place}]")) for place, rung in enumerate(given)], sort_keys=True)


def _rung(given: Any, key: str) -> Rung:
    """Raises ConfigError with all that is wrong with it."""
    if not isinstance(given, Mapping):
        raise ConfigError(f"{key}={shown(given)}: not a mapping; allowed: {WANTED}")
    reasons = []
    for name, value in given.items():
        if name in ("detector", "action"):
            if not isinstance(value, str) or not all(part.isidentifier() for part in value.split("+")):
                reasons.append(f"{key}.{name}={shown(value)}: wrong type; allowed: a name, or names joined by +")
        elif name in ("limit", "cool_down"):
            is_count = isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= LARGEST
            if not is_count and not (name == "limit" and value is None):
                null = " or null" if name == "limit" else ""
                reasons.append(f"{key}.{name}={shown(value)}: out of range; allowed: 1 to {LARGEST}{null}")
        else:
            reasons.append(f"{key}.{name}={shown(value)}: unknown key; allowed: detector, action, limit, cool_down")
    if reasons:
        raise ConfigError(*reasons)
    return Rung(**given)
