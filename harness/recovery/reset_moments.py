"""The optimizer's memory begins anew."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from harness.config import PER_TRIAL, Trial, number
from harness.config.fields import choice
from harness.recovery.base import Action, Detail, Row


@dataclass(frozen=True)
class Options:
    """`playbook.reset_moments.*`."""

    which: str = choice(PER_TRIAL, "all", "all: every tensor's; off: those that are wrong by `factor`", "all", "off")
    factor: float = number(
        PER_TRIAL, 10.0, "how many times larger or smaller than in the oldest snapshot is wrong, in RMS", above=1
    )


class ResetMoments(Action):
    """The step is not taken, and moments are zero again; all of them are then corrected as in a first step."""

    changes_course = True
    source = "OPT logbook, metaseq: optimizer state reset; SPAM, Huang et al. 2025, arXiv 2501.06842, at intervals"

    @classmethod
    def needs_snapshots(cls, trial: Trial) -> bool:
        return bool(trial.section("playbook.reset_moments").which == "off")

    def do(self, row: Row, options: Any) -> Detail:
        if options.which == "all":
            row.forget_moments()
            return {"tensors": "all"}
        moments, earlier, wrong = row.moments(), row.earlier_moments(), set()
        for name, tensors in moments.items():
            for key, values in tensors.items():
                if _is_off(values, None if earlier is None else earlier[name][key], options.factor):
                    wrong.add(key)
        for tensors in moments.values():
            for key in wrong & set(tensors):
                tensors[key].zero_()
        return {"tensors": sorted(wrong)}


def _is_off(now: Tensor, before: Tensor | None, factor: float) -> bool:
    size = _rms(now)
    if not size < float("inf"):
        return True
    if before is None or (usual := _rms(before)) == 0:
        return False
    return not 1 / factor <= size / usual <= factor


def _rms(values: Tensor) -> float:
    return float(values.double().square().mean().sqrt()) if values.numel() else 0.0
