"""What older weights can choose in a mixture of experts, and what they cannot (harness/training/stale_routing.py)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from harness.config import Trial, shown

ASKS = "anticipate"  # the action that asks for older weights


def is_stale(moe: Any) -> bool:
    """Whether older weights choose, by the section `moe`."""
    return bool(moe.lag) or moe.routing == "frozen"


def refused_stale(moe: Any, trial: Trial) -> Iterator[str]:
    """What cannot be chosen by older weights, each a line with key, value, and what is allowed."""
    if moe.lag and moe.routing != "live":
        yield f"moe.lag={moe.lag}: moe.routing={moe.routing} has no older choice; allowed: 0"
    if is_stale(moe) and (trial.schedule.batch_start or trial.schedule.sequence_start):
        given = f"moe.lag={moe.lag}" if moe.lag else f"moe.routing={shown(moe.routing)}"
        why = "batches of one size are looked at, and schedule.batch_start or sequence_start lets them grow"
        yield f"{given}: {why}; allowed: neither of these two"
    if moe.stale_when == "asked" and not moe.lag:
        yield "moe.stale_when=asked: there is no moe.lag; allowed: always, or a lag above 0"
    if moe.stale != "choice" and not moe.lag:
        yield f"moe.stale={moe.stale}: there is no moe.lag; allowed: choice, or a lag above 0"
    if moe.frozen_from and moe.routing != "frozen":
        yield f"moe.frozen_from={moe.frozen_from}: moe.routing={moe.routing}; allowed: 0, or moe.routing=frozen"
    if moe.frozen_from >= trial.steps:
        yield f"moe.frozen_from={moe.frozen_from}: beyond the run; allowed: 0 to {trial.steps - 1}"
    if moe.routing != "live" and moe.bias_rate:
        why = f"moe.routing={moe.routing} is to choose by nothing that moves"
        yield f"moe.bias_rate={moe.bias_rate}: {why}; allowed: 0"
    if moe.routing == "hash" and trial.objective.name != "next_token":
        yield f"moe.routing=hash: objective={trial.objective.name} has no tokens; allowed: live or frozen"


def idle_stale(moe: Any, trial: Trial) -> Iterator[tuple[str, str]]:
    """(key, why) of older weights that can choose nothing in a trial."""
    if moe.lag >= trial.steps:
        yield "moe.lag", f"moe.lag={moe.lag}: no step of {trial.steps} comes so late; it takes train.steps > {moe.lag}"
    elif moe.stale_when == "asked" and ASKS not in trial.playbook.ladder:
        why = "no playbook asks for it"
        yield "moe.lag", f"moe.stale_when=asked: {why}; it takes a rung with {ASKS}, or moe.stale_when=always"
    if moe.routing == "frozen" and moe.frozen_from + 1 >= trial.steps:
        why = f"no step of {trial.steps} comes after it"
        needed = f"train.steps > {moe.frozen_from + 1}"
        yield "moe.routing", f"moe.frozen_from={moe.frozen_from}: {why}; it takes {needed}"
