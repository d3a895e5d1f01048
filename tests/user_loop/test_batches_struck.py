"""Faults of the data in loops that count their batches, that make them, and that leave out what a step changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from harness import ConfigError, attach
from harness.user_loop.tokens import as_tokens
from tests.user_loop.loops import STEPS, plain
from tests.user_loop.test_attach import STRUCK, TOKEN_FAULTS


@pytest.mark.parametrize("name", TOKEN_FAULTS)
def test_numbered_batches_are_struck_as_those_without_a_number(name: str) -> None:
    """`run.steps(list(enumerate(batches)))`, as docs/attach.md has it."""
    seen: dict[bool, list[Any]] = {False: [], True: []}
    for is_numbered in seen:
        loop = plain()
        loader = list(loop.loader())
        batches = list(enumerate(loader)) if is_numbered else loader
        fault = {"name": name, "start": STRUCK, "duration": 2}
        with attach(loop.model, loop.optimizer, loop.extra, fault=fault, twin=False) as run:
            for batch in run.steps(batches):
                if is_numbered:
                    assert batch[0] == len(seen[True])
                    batch = batch[1]
                seen[is_numbered].append(batch)
                run.observe(loop.body(batch))
        assert [event.step for event in run.events] == [STRUCK, STRUCK + 1]
    assert len(seen[True]) == STEPS
    for one, other in zip(seen[False], seen[True], strict=True):
        assert all(torch.equal(x, y) for x, y in zip(one, other, strict=True))


def test_a_number_may_stand_beside_inputs_and_targets() -> None:
    text = torch.arange(12).reshape(2, 6)
    batch = (3, text[:, :-1], text[:, 1:])
    ids, put = as_tokens(batch, "rare_tokens")
    assert torch.equal(ids, text)
    number, inputs, targets = put(text + 1)
    assert number == 3 and torch.equal(inputs, text[:, :-1] + 1) and torch.equal(targets, text[:, 1:] + 1)


@pytest.mark.parametrize("name", [*TOKEN_FAULTS, "duplicated_batch"])
@pytest.mark.parametrize(("is_next", "kind"), [(False, "int"), (True, "None")], ids=["run.steps", "run.next"])
def test_a_loop_that_makes_its_batches_is_told_to_hand_them_out(name: str, is_next: bool, kind: str) -> None:
    loop = plain()
    fault = {"name": name, "start": 1, "duration": 1}
    batches = iter(list(loop.loader()))
    words = rf"^fault={name}: strikes batches, .* \({kind}\); allowed: run.steps\(batches\) with tensors in them, in "
    with (
        pytest.raises(ConfigError, match=words),
        attach(loop.model, loop.optimizer, loop.extra, fault=fault, steps=5) as run,
    ):
        if is_next:
            while run.next():
                run.observe(loop.body(next(batches)))
        for _ in run.steps(5):
            run.observe(loop.body(next(batches)))


def test_batches_of_another_kind_are_described() -> None:
    with pytest.raises(
        ConfigError, match=r"^fault=rare_tokens: .*\(tuple of Tensor \[8, 3\] float32, int\); allowed: ids"
    ):
        as_tokens((torch.zeros(8, 3), 4), "rare_tokens")


def test_a_scheduler_that_is_left_out_is_asked_for() -> None:
    loop = plain()
    words = r"the learning rate of parameter group 0; allowed: extra=\[scheduler\] for a scheduler of rates, run.step "
    with (
        pytest.warns(UserWarning, match=words),
        attach(loop.model, loop.optimizer, fault="weight_bit", twin=True) as run,
    ):
        for batch in run.steps(loop.loader()):
            run.observe(loop.body(batch))
