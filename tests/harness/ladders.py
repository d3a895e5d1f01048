"""Small trials with a ladder, faults for them, and what their log says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from harness.config import Trial
from harness.config.ladder import canonical
from harness.recovery.table import ACTIONS
from harness.testing.engine import Run, trial
from injectors.value import Value

STEPS, START = 24, 9
OWN: dict[str, Any] = {"steps": STEPS, "lr": 1e-2, "depth": 1}
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "change_recipe": {"set": "{optim.beta2: 0.9, optim.weight_decay: 0.1}"},
    "skip_batches": {"count": 2},
}
SNAPSHOT = {"every": 2, "kept": 4}


def trained(
    *rungs: Mapping[str, Any], detect: str = "finite", snapshot: Mapping[str, Any] = SNAPSHOT, **fields: Any
) -> Trial:
    """A small trial with a ladder."""
    actions = {action for rung in rungs for action in rung["action"].split("+")}
    options = {f"playbook.{name}": OPTIONS[name] for name in actions if name in OPTIONS}
    if any(ACTIONS[name].goes_back for name in actions):
        options["playbook.snapshot"] = snapshot
    book = {"name": "test", "ladder": canonical(list(rungs))}
    return trial(**{"seed": 1, **OWN, "detect": {"name": detect}, "playbook": book} | options | fields)


def rung(action: str, detector: str = "any", limit: int | None = 3, cool_down: int = 4) -> dict[str, Any]:
    return {"detector": detector, "action": action, "limit": limit, "cool_down": cool_down}


def nan(start: int = START, duration: int | None = 1, **fields: Any) -> Value:
    """What makes the gradient of one step NaN, and leaves nothing else behind."""
    options = {"site": "reduced_gradient", "tensor": "head", "element": 3, "model": "set", "value": float("nan")}
    return Value(start=start, duration=duration, **options | fields)


def struck(golden: Trial, fault: Any = None) -> Trial:
    return replace(golden, fault=nan() if fault is None else fault)


def verdicts(found: Run, number: int) -> list[str]:
    acts = [act for incident in found.result.incidents[number] for act in incident["acts"]]
    return [act["detail"]["verdict"] for act in acts if "verdict" in act["detail"]]
