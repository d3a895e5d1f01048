"""A playbook does the same for a row of a pack and for a run of the user's own loop, alarm by alarm."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness.guards.base import FREEZE, GO, Parts
from harness.guards.playbook import ANSWERS, UNANSWERED, PlaybookGuard
from harness.incidents.escalation import Expectation
from harness.model.state import State
from harness.testing.engine import run as train_pack
from injectors.value import Value
from tests.harness.ladders import START, STEPS, rung, struck, trained
from tests.user_loop.loops import attached, plain

QUICK = {"deepest": 0, "data": "odd"}
EVERY_STEP = ("grad_norm_skip", {"limit": 1e-6})  # a limit that each is above
FINITE = ("finite", {})


@dataclass(frozen=True)
class Scene:
    """A ladder, what watches, and a fault of all steps from START on (`duration` None), of some, or of none."""

    rungs: Sequence[dict[str, Any]]
    watches: tuple[str, dict[str, Any]] = FINITE
    duration: int | None = 1
    is_struck: bool = True
    snapshot: dict[str, int] = field(default_factory=lambda: {"every": 1, "kept": 4})
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def fault(self) -> Value | None:
        return (
            Value(start=START, duration=self.duration, site="reduced_gradient", model="infinity")
            if self.is_struck
            else None
        )


SCENES = {
    "a fault that is over": Scene([rung("re_execute")]),
    "one that stays with its device": Scene([rung("re_execute", limit=1)], duration=None),
    "an alarm that is right": Scene(
        [rung("re_execute", limit=3)], EVERY_STEP, is_struck=False, options={"re_execute": QUICK}
    ),
    "an alarm that is right, and a rung that comes after": Scene(
        [rung("re_execute", limit=1), rung("skip", limit=2)],
        EVERY_STEP,
        is_struck=False,
        options={"re_execute": QUICK},
    ),
    "the same, where other batches are tried": Scene(
        [rung("re_execute", limit=1), rung("skip", limit=2)],
        EVERY_STEP,
        is_struck=False,
        options={"re_execute": {"deepest": 1, "data": "any"}},
    ),
    "skipped": Scene([rung("skip")], duration=2),
    "back": Scene([rung("roll_back")]),
    "back to what is older": Scene([rung("roll_back", limit=2)], snapshot={"every": 4, "kept": 3}),
    "back until nothing is left": Scene([rung("roll_back", limit=2)], duration=None),
    "a lower rate, and skipped": Scene([rung("lower_rate+skip", limit=1), rung("skip", limit=None)], duration=2),
    "taken": Scene([rung("carry_on", limit=2), rung("skip", limit=1)], EVERY_STEP, is_struck=False),
    "moments that are forgotten": Scene([rung("reset_moments", limit=2)], duration=1),
    "the oracle": Scene([rung("undo", detector="oracle", limit=1)]),
}


def of_pack(scene: Scene) -> list[dict[str, Any]]:
    """The incidents of the second of two rows."""
    name, constants = scene.watches
    fields = {f"playbook.{action}": values for action, values in scene.options.items()}
    fields |= {f"detect.{name}": constants} if constants else {}
    golden = trained(*scene.rungs, detect=name, snapshot=scene.snapshot, **fields)
    found = train_pack([golden, golden if scene.fault is None else struck(golden, scene.fault)])
    return found.result.incidents[1]


def of_loop(scene: Scene) -> list[dict[str, Any]]:
    """Those of a loop of another model, on other data."""
    name, constants = scene.watches
    playbook = {"ladder": list(scene.rungs), **scene.options}
    if any("roll_back" in one["action"] or one["action"] in ("re_execute", "undo") for one in scene.rungs):
        playbook["snapshot"] = scene.snapshot
    watches = {"name": name, **({name: constants} if constants else {})}
    with warnings.catch_warnings(action="ignore"):
        _, run = attached(plain(), fault=scene.fault, detect=watches, recover=playbook, steps=STEPS, twin=False)
    return list(run.incidents)


def told(incidents: Sequence[dict[str, Any]]) -> list[Any]:
    """What has happened, less what is each model's own: losses, norms and scores."""
    return [
        {key: value for key, value in one.items() if key != "acts"}
        | {"acts": [(act["step"], act["action"], act["to"], act["detail"], [*act["detectors"]]) for act in one["acts"]]}
        for one in incidents
    ]


@pytest.mark.parametrize("name", SCENES)
def test_both_do_the_same(name: str) -> None:
    """Steps, actions, where they go back to, verdicts, alarms, and what it costs."""
    ours, theirs = told(of_pack(SCENES[name])), told(of_loop(SCENES[name]))
    assert ours == theirs and ours


@pytest.mark.parametrize("incidents_of", [of_pack, of_loop])
def test_a_step_that_is_said_to_be_skipped_is_not_taken(incidents_of: Callable[..., list[dict[str, Any]]]) -> None:
    """Also where an action has waited for it, and found the alarm to be right: each costs the step."""
    incident = incidents_of(SCENES["an alarm that is right, and a rung that comes after"])[0]
    acts = [act["action"] for act in incident["acts"]]
    assert acts == ["re_execute"] * 3 + ["skip"] * 2
    assert incident["steps_lost"] == 2 + 2  # run again twice, and skipped


# --- what the guard of a pack answers, and what a loop does --------------------------------------------------------


def guard_of(rows: int, detectors: int) -> PlaybookGuard:
    """A guard of so many rows under so many detectors."""
    any_part: Any = None
    parts = Parts(any_part, State(rows), any_part, rows, torch.device("cpu"))
    guard = PlaybookGuard(parts)
    names = {"name": "+".join(f"d{number}" for number in range(detectors))}
    sections = {"detect": names, "playbook.snapshot": {"every": 1, "kept": 1, "on": "device"}}
    trial: Any = SimpleNamespace(
        section=lambda name: SimpleNamespace(**sections[name]), playbook=SimpleNamespace(ladder="[]")
    )
    guard.bind([trial] * rows)
    return guard


def test_a_guard_answers_as_a_loop_does() -> None:
    """For every order of what is told to it, one step at a time: calls, awaited steps, alarms, and what is finite."""
    calls = [UNANSWERED, 0 * ANSWERS + 5, 1 * ANSWERS + 1]  # none, ask, and take and ask
    cases = list(
        itertools.product(
            itertools.product(calls, repeat=2),  # now
            itertools.product(calls, repeat=2),  # beyond the incident
            [-1, 7, 9],  # it is over
            [-1, 7, 8],  # awaited
            [False, True],  # takes
            itertools.product([False, True], repeat=2),  # alarms
            [False, True],  # finite
        )
    )
    guard, step = guard_of(len(cases), 2), 8
    expected = []
    for row, (now, first, over, awaited, takes, raised, is_finite) in enumerate(cases):
        one = Expectation([*now], [*first], over, awaited, takes)
        guard.expect(row, one.now, one.first, one.over, one.awaited, one.takes)
        answer = one.answer(step, raised, is_finite)
        expected.append(GO if answer == FREEZE else answer)  # in a pack another guard freezes what is not finite
    alarms = torch.tensor([case[5] for case in cases])
    scores, never = torch.zeros(len(cases), dtype=torch.float64), torch.zeros(len(cases), dtype=torch.bool)
    for number in range(2):
        guard.parts.alarms[f"d{number}"] = (alarms[:, number], scores, never)
    is_finite = torch.tensor([case[6] for case in cases])
    loss = torch.where(is_finite, 1.0, torch.nan)
    seen: Any = SimpleNamespace(
        trains=~never, here=~never, usable=~never, step=torch.full((len(cases),), step), loss=loss, norm=loss.double()
    )
    assert guard.judge(seen).tolist() == expected
