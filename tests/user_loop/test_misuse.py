"""What cannot be is refused in one line, and whatever was acquired on the way is released."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from harness import ConfigError, attach
from tests.user_loop.loops import Loop, attached, plain, same, scaled, train
from tests.user_loop.scripts import data, loss_of, net
from tests.user_loop.test_attach import traces


def hooks_of(model: nn.Module, *optimizers: Any) -> list[str]:
    return traces(Loop(model, list(optimizers), [], list, lambda batch: batch))


# --- several attachments ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def unused() -> Iterator[None]:
    """A run that no step went through says so when it ends."""
    with pytest.warns(UserWarning, match="attach: the loop never went through run.steps"):
        yield


def test_an_optimizer_is_attached_once_at_a_time() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    with unused(), attach(model, optimizer):
        words = r"optimizer=AdamW: is attached already, to a run that has not ended; allowed: run.close\(\) of that run"
        with pytest.raises(ConfigError, match=words):
            attach(model, optimizer)
        with pytest.raises(ConfigError, match=words):
            attach(model, [torch.optim.SGD(model[0].parameters(), 0.1), optimizer])
        other = net()
        with unused():
            attach(other, torch.optim.AdamW(other.parameters())).close()
    with unused():
        attach(model, optimizer).close()
    assert hooks_of(model, optimizer) == []
    with pytest.raises(ConfigError, match="optimizer: the same one stands in the list twice; allowed: each once"):
        attach(model, [optimizer, optimizer])


def test_a_run_that_was_lost_is_detached() -> None:
    """As after an error in a notebook, which leaves no run to close."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    attach(model, optimizer, recover="repair")
    assert hooks_of(model, optimizer) and attach.detach(optimizer)
    assert hooks_of(model, optimizer) == [] and not attach.detach(optimizer)
    with unused():
        attach(model, optimizer).close()


# --- half-way ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"fault": {"name": "weight_bit", "tensor": "nowhere"}}, "fault.tensor=nowhere: matches no tensor"),
        ({"facts": {"speed": 1}}, "facts.speed=1: unknown"),
        ({"extra": [object()]}, r"extra\[0\]=object: keeps no state"),
        ({"out": 5}, "out=5: no folder; allowed: a path, or None"),
        ({"out": ""}, "out='': no folder"),
        ({"twin": "yes"}, "twin=yes: no choice; allowed: True, False, or None"),
        ({"on_alarm": 3}, "on_alarm=3: cannot be called"),
        ({"extra": 3}, "extra=int: no list"),
        ({"facts": 3}, "facts=3: no mapping"),
    ],
)
def test_nothing_stays_of_what_failed_half_way(options: dict[str, Any], words: str) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(ConfigError, match=words):
        attach(model, optimizer, **options)
    assert hooks_of(model, optimizer) == []
    with unused():
        attach(model, optimizer).close()


def test_frozen_parameters_in_the_optimizer_are_no_error() -> None:
    """Hooks on them cannot be; they are struck by name all the same, and are no part of what is trained."""
    model = net()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model[0].weight.clone()
    with attach(model, optimizer, fault={"name": "weight_bit", "start": 2, "tensor": "0.weight", "bit": 20}) as run:
        for batch in run.steps(data(5)):
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            optimizer.step()
            run.observe(loss)
    (event,) = run.events
    assert (before != model[0].weight).sum() == 1 and event.tensor == "0.weight" and hooks_of(model, optimizer) == []


# --- copies of what is attached ------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [plain, scaled])
def test_a_model_is_saved_and_copied_in_a_struck_step(make: Any) -> None:
    """A copy has no hooks that act, and the copy of a scaler scales by itself."""
    untouched = make()
    train(untouched)
    loop = make()
    body, copies = loop.body, []

    def saving(batch: Any) -> Any:
        everything = [loop.model, *loop.optimizers, *loop.extra]
        copies.append([copy.deepcopy(one) for one in everything])
        torch.save(everything, io.BytesIO())
        return body(batch)

    loop.body = saving
    fault = {"name": "activation_bit", "start": 7, "tensor": "norm", "bit": 30}
    attached(loop, fault=fault, recover="repair")
    assert same(loop.state(), untouched.state()) and traces(loop) == []
    model = copies[7][0]
    for hook in (hook for module in model.modules() for hook in module._forward_hooks.values()):
        assert hook.__module__.startswith("harness") and hook.__name__ == "idle"
    for one in copies[7][1:]:
        assert "user_loop" not in repr(vars(one).get("unscale_", ""))
        pickle.loads(pickle.dumps(one.state_dict()))


# --- sharded models ------------------------------------------------------------------------------------------------


def sharded(rank: int, address: str, words: Any) -> None:
    torch.distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    try:
        model = net()
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters())
        try:
            attach(model, optimizer)
        except ConfigError as error:
            words[rank] = str(error)
    finally:
        torch.distributed.destroy_process_group()


def test_sharded_models_are_refused_by_name(tmp_path: Any) -> None:
    with torch.multiprocessing.Manager() as manager:
        words = manager.dict()
        torch.multiprocessing.spawn(sharded, args=(f"file://{tmp_path}/group", words), nprocs=2)
        assert set(words) == {0, 1}
        for text in words.values():
            assert "is sharded by FSDP2 (fully_shard); allowed: " in text
