"""Faults of a policy: rewards, advantages, and the sampler's copy of the model."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.config import ConfigError, Fault
from harness.faults.facts import facts_of
from harness.policy.advantages import advantages
from harness.testing import engine
from harness.testing.faults import START as PROMISED_START
from harness.testing.faults import FaultPromises
from harness.training.pack import Pack
from injectors.rewards import LateReward, ShiftedAdvantage
from injectors.value import Value

START, STEPS, BATCH, GROUP = 3, 6, 4, 2
FIELDS: dict[str, Any] = {"context": 8, "batch": BATCH, "objective": {"name": "policy"}}
FIELDS |= {"policy": {"reward": "count", "group": GROUP, "prompt": 4}, "policy.count": {"token": 3}, "vocabulary": 8}
VALUE = {"name": "value", "start": START, "duration": 1, "format": "fp32"}
FAULTS: dict[str, Any] = {
    "late": LateReward(start=START, duration=1),
    "shifted": ShiftedAdvantage(start=START, duration=1),
    "flipped": Value(**VALUE, site="reward", tensor="reward", model="sign", elements=None),
    "stuck": Value(**VALUE, site="reward", tensor="reward", model="set", value=1.0, elements=None),
    "sampler": Value(**VALUE, site="sampler_weight", tensor="embedding", model="scale", value=3.0, elements=None),
}
PROMISES = FaultPromises(list(FAULTS), lambda name: replace(FAULTS[name], start=PROMISED_START), FIELDS)


@pytest.mark.parametrize("promise", FaultPromises.names())
@pytest.mark.parametrize("name", FAULTS)
def test_each_promise(name: str, promise: str) -> None:
    """Of all of them together, in packs that are trained once for each promise."""
    PROMISES.check(promise, name)


@cache
def struck() -> tuple[engine.Run, list[Tensor]]:
    """A golden trial, and one for each fault behind it, and the advantages of each step."""
    given = {**FIELDS, "steps": STEPS, "lr": 0.03, "seed": 5}
    trials = [engine.trial(**given), *(engine.trial(**given, fault=fault) for fault in FAULTS.values())]
    seen: list[Tensor] = []

    def listen(pack: Pack) -> None:
        learn = pack.learn

        def listened(*arguments: Any, **named: Any) -> Tensor:
            seen.append(pack.objective.rollouts.advantages.clone())  # type: ignore[attr-defined]
            return learn(*arguments, **named)

        pack.learn = listened  # type: ignore[method-assign]

    return engine.run(trials, prepare=listen), seen


def test_each_is_nothing_before_and_seen_after() -> None:
    run, seen = struck()
    assert all(torch.equal(x[0].expand_as(x), x) for x in seen[:START])
    for number, name in enumerate(FAULTS, 1):
        (event, *_) = run.result.events[number]
        assert event.step == START
        assert not torch.equal(run.weights[START][0], run.weights[START][number]) or name == "late", name
    quality = run.signals["quality"]
    assert (quality[1:5, : START + 1] == quality[0, : START + 1]).all()


def test_advantages_are_those_of_struck_rewards() -> None:
    run, seen = struck()
    golden, names = seen[START][0], list(FAULTS)
    assert golden.any()
    assert torch.equal(seen[START][1 + names.index("shifted")], golden.roll(1))
    torch.testing.assert_close(seen[START][1 + names.index("flipped")], -golden)
    assert not seen[START][1 + names.index("stuck")].any()
    torch.testing.assert_close(seen[START][1 + names.index("late")], seen[START - 1][0])
    mismatch = run.signals["mismatch_max"][1 + names.index("sampler")]
    assert (mismatch > 0).tolist() == [step == START for step in range(STEPS)]
    assert not advantages(torch.ones(1, BATCH), GROUP, "group", "group").any()


@pytest.mark.parametrize(
    ("fault", "fields", "said"),
    [
        (LateReward(start=1, late=2), {}, "fault.late=2: before the first step; allowed: 1 to fault.start=1"),
        (ShiftedAdvantage(start=1, places=8), {}, "fault.places=8: all of the 4 completions of a rollout are in their"),
        (ShiftedAdvantage(start=1), {"objective": {}}, "fault.kind=shifted_advantage: this run samples no completions"),
        (
            Value(start=1, site="reward"),
            {"objective": {}},
            "fault.site=reward: this run samples no completions; allowed",
        ),
        (
            Value(start=1, site="reward", element=4),
            {},
            "fault.element=4: beyond fault.tensor=*, whose smallest match has 4",
        ),
    ],
)
def test_what_is_refused(fault: Fault, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        fault.check(facts_of(engine.trial(**{**FIELDS, **fields}, fault=fault)))  # type: ignore[attr-defined]
    assert any(reason.startswith(said) for reason in refused.value.reasons), refused.value.reasons
