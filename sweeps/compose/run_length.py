"""Values of a study that follow the length of its run: each is written for the `train.steps` of that study.

Where a command line gives another `train.steps`, these values keep their place in the run, those of mitigations and
playbooks that the study chooses among them. So a fault of step 75 of 150 strikes at step 30 of 60. A value that the
command line gives is taken as it is.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sweeps.compose.folders import chain

FOLLOWING = frozenset(
    {
        "adagc.warmup",
        "fault.start",
        "fault.until",
        "fault.offset",
        "model.branch_steps",
        "playbook.roll_back.back",
        "playbook.skip_batches.count",
        "playbook.snapshot.every",
        "schedule.warmup",
        "schedule.sequence_steps",
        "schedule.batch_steps",
        "spam.grace",
        "spam.interval",
        "spam.warmup",
        "stable_spam.interval",
        "train.validate_every",
        "zclip.warmup",
    }
)
"""Moments of a run and shares of it, in steps. Lengths that mean the same in any run, as of a fault, are left alone."""
CHOSEN = frozenset({"mitigation", "playbook"})


@dataclass(frozen=True)
class Written:
    """The keys of `FOLLOWING` and `CHOSEN` that a study gives values; none unless it fixes `train.steps` too."""

    keys: frozenset[str] = frozenset()

    @classmethod
    def of(cls, study: str, folder: Path | None) -> Written:
        """What a study, and those that it builds on, say. Raises ConfigError for a file that cannot be read."""
        fields, axes = _written(study, folder)
        is_fixed = "train.steps" in fields - axes
        return cls((FOLLOWING | CHOSEN) & (fields | axes)) if is_fixed else cls()


def keys_of(study: str, folder: Path | None) -> set[str]:
    """All keys to which a study, and those that it builds on, give values. Raises ConfigError as `Written.of`."""
    fields, axes = _written(study, folder)
    return fields | axes


def _written(study: str, folder: Path | None) -> tuple[set[str], set[str]]:
    """Those of its fields, and those of its axes."""
    fields: set[str] = set()
    axes: set[str] = set()
    for content in chain("study", study, folder):
        fields |= set(_keys({name: part for name, part in content.fields.items() if name != "hydra"}))
        sweeper = content.fields.get("hydra", {}).get("sweeper", {})
        several = (sweeper.get(name, {}).values() for name in ("grids", "conditions"))
        for values in (sweeper.get("params", {}), *itertools.chain(*several)):
            axes |= set(values)
    return fields, axes


def scaled(value: Any, written: int, steps: int) -> Any:
    """A number of steps of a run of `written` steps in one of `steps`; null, 0 and 1 (as every step) stay.

    Rounded towards 0, so what lies within the one run lies within the other.
    """
    if value in (None, 0, 1):
        return value
    return (1 if value > 0 else -1) * max(1, abs(value) * steps // written)


def _keys(tree: Mapping[str, Any], prefix: str = "") -> list[str]:
    keys = []
    for name, value in tree.items():
        keys += _keys(value, f"{prefix}{name}.") if isinstance(value, Mapping) else [f"{prefix}{name}"]
    return keys
