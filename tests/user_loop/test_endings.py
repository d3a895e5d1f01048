"""Runs that were not what was asked for say so at their end, in a warning and in their outcome."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from harness import attach
from tests.user_loop.loops import seeded
from tests.user_loop.scripts import data, loss_of, net

STEPS = 12


class Unused(nn.Module):
    """A layer that has no part in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


def run_of(count: int = STEPS, stop: int | None = None, model: nn.Module | None = None, **options: Any) -> Any:
    seeded()
    model = net() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with attach(model, optimizer, **options) as run:
        for batch in run.steps(data(count)):
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            optimizer.step()
            run.observe(loss)
            if run.step == stop:
                break
    return run


EATEN = {
    "ladder": [{"detector": "any", "action": "skip_batches", "limit": 1, "cool_down": 1}],
    "skip_batches": {"count": 8},
    "snapshot": {"every": 1, "kept": 2},
}
BROKEN = {"name": "weight_bit", "start": 5, "bit": 30, "tensor": "0.weight"}


@pytest.mark.parametrize(
    ("options", "label", "words"),
    [
        ({"steps": 20}, "ended early", "steps=20: the loop ended after 12 steps; allowed: steps=12, or a longer loop"),
        (
            {"fault": BROKEN, "recover": EATEN},
            "ended early",
            "the loader ended after . of 12 steps, because answers have passed",
        ),
        (
            {"fault": {"name": "weight_bit", "start": 10}, "stop": 7},
            "never struck",
            "it begins at step 10, and the run",
        ),
        (
            {"fault": {"name": "gradient_bit", "start": 4, "tensor": "unused.weight"}, "model": Unused()},
            "never struck",
            "nothing of fault.tensor=unused.weight was there to strike at its steps, as where a layer has no part",
        ),
        ({"twin": True, "stop": 7}, "no twin", "twin=true: the loop ended after 8 of 12 steps, so its twin was not"),
    ],
)
def test_what_fell_short_is_said(options: dict[str, Any], label: str, words: str) -> None:
    with pytest.warns(UserWarning, match=words) as warned:
        run = run_of(**options)
    assert label in run.outcome.split("; ") and {warning.filename for warning in warned} == {__file__}
    assert any(label == one.label for one in run.shortcomings)


def test_a_loop_without_steps_is_said() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match="the loop never went through run.steps") as warned:  # noqa: SIM117
        with attach(model, optimizer, fault="weight_bit") as run:
            for batch in data(3):
                optimizer.zero_grad()
                loss_of(model, batch).backward()
                optimizer.step()
    assert run.outcome == "trained; no steps" and len(warned) == 1


def test_a_whole_run_says_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = run_of(fault={"name": "weight_bit", "start": 4}, twin=True, detect=None)
    assert run.outcome == "trained" and run.shortcomings == []


def test_a_preset_strikes_in_the_middle_of_a_run_that_is_shorter_than_its_own_start() -> None:
    """A start of one's own beyond the run is refused."""
    run = run_of(fault="weight_bit")
    assert [event.step for event in run.events] == [STEPS // 2]
    assert {event.step for event in run_of(fault="nan_gradient").events} == {STEPS // 2}
    with pytest.raises(ValueError, match="fault.start=100: after the run of 12 steps; allowed: 0 to 11"):
        run_of(fault={"name": "weight_bit", "start": 100})


@pytest.mark.parametrize("recover", ["olmo", "palm", "ladder", "repair"])
def test_playbooks_bring_their_own_detectors(recover: str) -> None:
    """By default; those that are asked for come first."""
    seeded()
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    run = attach(model, optimizer, recover=recover, steps=1000)
    for number, batch in enumerate(run.steps(data(1000))):
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        run.observe(loss)
        if number == 3:
            break
    with pytest.warns(UserWarning, match="ended"):
        run.close()
