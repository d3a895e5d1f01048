"""Models and loops of many kinds: compiled, in half precision, of several processes, under any optimizer of torch."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.multiprocessing
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from harness import ConfigError, attach
from tests.user_loop.loops import BATCH, Loop, Mixer, Texts, attached, loss_of, plain, same, seeded, shuffled, train
from tests.user_loop.test_attach import traces

FEW = 12


def with_optimizer(make: Any) -> Loop:
    seeded()
    model = Mixer()
    optimizer = make(model)

    def body(batch: Any) -> torch.Tensor:
        loss = loss_of(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return Loop(model, optimizer, [], shuffled(FEW), body)


OPTIMIZERS = {
    "Adadelta": {},
    "Adagrad": {},
    "Adam": {},
    "AdamW": {"amsgrad": True},
    "Adamax": {},
    "NAdam": {},
    "RAdam": {},
    "RMSprop": {"momentum": 0.9},
    "Rprop": {},
    "SGD": {"momentum": 0.9},
    "ASGD": {},
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_of_torch(name: str) -> None:
    """Disarmed no bit, a strike at what it keeps, and after a rollback as if nothing had been."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        return getattr(torch.optim, name)(model.parameters(), **OPTIMIZERS[name])

    untouched = with_optimizer(make)
    losses = train(untouched)
    loop = with_optimizer(make)
    assert attached(loop)[0] == losses and same(loop.state(), untouched.state())
    loop = with_optimizer(make)
    fault = {"name": "nan_gradient", "start": 6}
    back = {"ladder": [{"action": "roll_back", "limit": 3, "cool_down": 2}], "snapshot": {"every": 2, "kept": 2}}
    _, run = attached(loop, fault=fault, detect="finite", recover=back)
    assert len(run.incidents) == 1 and same(loop.state(), untouched.state())
    loop = with_optimizer(make)
    site = "moment_1" if name in ("Adam", "AdamW", "Adamax", "NAdam", "RAdam", "SGD") else "moment_2"
    fault = {"name": "moment_bit", "site": site, "start": 5, "bit": 27, "tensor": "norm.weight"}
    if name in ("Rprop", "ASGD"):
        with pytest.raises(ConfigError, match="fault.site=moment_2: optimizer=.* keeps no such array; allowed: "):
            attached(loop, fault=fault)
        return
    _, run = attached(loop, fault=fault)
    assert [event.changed for event in run.events] == [True] and run.events[0].site == site


@pytest.mark.parametrize("site", ["activation", "activation_gradient"])
def test_a_loop_that_samples_first_is_struck_where_it_learns(site: str) -> None:
    """A call of the model without gradients is no part of a step."""
    loop, sampled, learned = plain(), [], []
    loop.model.eval()
    layer = loop.model.get_submodule("layers.0")
    layer.register_forward_hook(
        lambda *of: (learned if of[2].requires_grad else sampled).append(of[2].detach().clone())
    )
    fault = {"name": "bit_flip", "site": site, "tensor": "layers.0", "start": 5, "bit": 30}
    with attach(loop.model, loop.optimizer, loop.extra, fault=fault) as run:
        for batch in run.steps(loop.loader()):
            with torch.no_grad():
                loop.model(batch[0])
            run.observe(loop.body(batch))
    (event,) = run.events
    assert event.step == 5 and event.changed
    assert max(values.abs().max() for values in sampled) < 100
    assert [step for step, values in enumerate(learned) if values.abs().max() > 100] == [5] * (site == "activation")


@pytest.mark.parametrize("fault", [{"name": "weight_bit", "bit": 27}, {"name": "activation_bit", "bit": 29}])
def test_a_compiled_model(fault: dict[str, Any]) -> None:
    """Hooks would not be seen: a step whose activations are struck is run as it is written, in the twin as well."""

    def make() -> Loop:
        seeded()
        model = Mixer()
        compiled = torch.compile(model, backend="aot_eager")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

        def body(batch: Any) -> torch.Tensor:
            loss = loss_of(compiled, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss

        loop = Loop(compiled, optimizer, [], shuffled(FEW), body)
        return loop

    untouched = make()
    losses = train(untouched)
    loop = make()
    assert attached(loop)[0] == losses and same(loop.state(), untouched.state())
    loop = make()
    _, run = attached(loop, fault={"start": 5, **fault}, twin=True)
    assert not any("_orig_mod" in event.tensor for event in run.events) and len(run.events) == 1
    assert not run.deviation[:5].any() and run.deviation[5:].any() and traces(loop) == []


def test_weights_in_half_precision() -> None:
    def make() -> Loop:
        loop = with_optimizer(lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
        loop.model.to(torch.bfloat16)
        return loop

    untouched = make()
    losses = train(untouched)
    loop = make()
    assert attached(loop)[0] == losses and same(loop.state(), untouched.state())
    fault = {"name": "weight_bit", "start": 5, "format": "bf16", "bit": 14}
    _, run = attached(make(), fault=fault, twin=True)
    (event,) = run.events
    assert int(event.bits_before or "", 16) ^ int(event.bits_after or "", 16) == 1 << 14
    assert not run.deviation[:5].any()


def test_a_frozen_weight_is_none_that_is_trained() -> None:
    loop = plain()
    loop.model.layers[0].weight.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in loop.model.parameters() if p.requires_grad], lr=1e-2)
    with (
        pytest.raises(ConfigError, match="fault.tensor=layers.0.weight: matches no tensor of this model"),
        attach(loop.model, optimizer, fault={"name": "gradient_bit", "tensor": "layers.0.weight"}),
    ):
        pass


def test_accelerate() -> None:
    accelerate = pytest.importorskip("accelerate")

    def make() -> Loop:
        seeded()
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        model, optimizer = Mixer(), None
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        loader = torch.utils.data.DataLoader(Texts(2 * FEW * BATCH), batch_size=BATCH)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

        def body(batch: Any) -> torch.Tensor:
            with accelerator.accumulate(model):
                loss = loss_of(model, batch)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            return loss

        return Loop(model, optimizer, [], lambda: loader, body)

    untouched = make()
    losses = train(untouched)
    loop = make()
    assert attached(loop, steps=FEW)[0] == losses and same(loop.state(), untouched.state())
    _, run = attached(make(), steps=FEW, fault={"name": "weight_bit", "start": 5, "bit": 27}, twin=True)
    assert not run.deviation[:5].any() and run.deviation[5:].any() and len(run.deviation) == FEW


# --- several processes -------------------------------------------------------------------------------------------


def rank_of_two(rank: int, place: str, fault: dict[str, Any], recover: str | None) -> None:
    """One of two processes that train copies of a model."""
    warnings.simplefilter("error")
    distributed.init_process_group("gloo", f"file://{place}/meet", rank=rank, world_size=2)
    torch.set_num_threads(1)
    seeded()
    model = DistributedDataParallel(Mixer())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    texts = Texts(FEW * BATCH * 2)
    sampler = torch.utils.data.DistributedSampler(texts, 2, rank, shuffle=False)
    loader = torch.utils.data.DataLoader(texts, batch_size=BATCH, sampler=sampler)
    losses = []
    out = f"{place}/out" if fault else None
    with attach(model, optimizer, fault=fault or None, recover=recover, twin=bool(fault), out=out) as run:
        for batch in run.steps(loader):
            loss = loss_of(model, batch)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            run.observe(loss)
            losses.append(loss.item())
    events, first = run.events, {name: x.clone() for name, x in model.module.state_dict().items()}
    deviation = run.deviation if fault else None
    told = {"events": events, "losses": losses, "state": first, "deviation": deviation, "incidents": run.incidents}
    torch.save(told, f"{place}/{rank}.pt")
    distributed.barrier()
    os._exit(0)  # what threads of torch do when a process ends, now and then an abort, is not asked here


def two(place: Path, fault: dict[str, Any], recover: str | None = None) -> list[dict[str, Any]]:
    torch.multiprocessing.spawn(rank_of_two, (str(place), fault, recover), nprocs=2)
    return [torch.load(place / f"{rank}.pt", weights_only=False) for rank in range(2)]


def test_two_processes_that_train_one_model(tmp_path: Path) -> None:
    from analysis import open_sweep

    for name, fault in {
        "gradient": {"name": "bit_flip", "site": "gradient", "bit": 27, "rank": 1, "start": 5},
        "reduced": {"name": "gradient_bit", "bit": 27, "start": 5},
        "weight": {"name": "weight_bit", "bit": 27, "start": 5, "rank": 1},
    }.items():
        place = tmp_path / name
        place.mkdir()
        ranks = two(place, fault)
        assert [len(each["events"]) for each in ranks] == [1, 1], "each knows of all of them"
        assert ranks[0]["events"] == ranks[1]["events"]
        for each in ranks:
            assert not each["deviation"][:5].any() and each["deviation"][5:].any()
        assert same(ranks[0]["state"], ranks[1]["state"]) == (name == "gradient"), (
            "what is struck before the mean reaches all copies, and what is struck after it one alone"
        )
        assert open_sweep(place / "out").sizes["trial"] == 2


def test_two_processes_go_back_together(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    fault = {"name": "weight_bit", "bit": 30, "start": 6, "rank": 1, "tensor": "norm.weight"}
    untouched = two(tmp_path / "a", {})
    repaired = two(tmp_path / "b", fault, "rerun")
    for rank in range(2):
        assert repaired[rank]["incidents"] and same(repaired[rank]["state"], untouched[rank]["state"])
        assert not np.any(repaired[rank]["deviation"])


def test_a_fault_that_has_to_see_a_ranks_gradients_together_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="fault.kind=stale_gradient: has to see the gradients of a rank together"):
        two(tmp_path, {"name": "stale_gradient", "start": 5})


# --- a mixture of experts --------------------------------------------------------------------------------------------


def mixtral() -> Loop:
    """That of transformers, whose experts are one tensor [E, out, in], and whose router gives several things."""
    transformers = pytest.importorskip("transformers")
    seeded()
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "pad_token_id": None}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 32}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **heads, **experts))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.randint(64, (FEW, 4, 16), generator=torch.Generator().manual_seed(1))

    def body(batch: Any) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        return loss

    return Loop(model, optimizer, [], lambda: list(ids), body)


EXPERTS = "model.layers.1.mlp.experts.down_proj"


@pytest.mark.parametrize(
    ("fault", "tensor", "first"),
    [
        ({"name": "weight_bit", "tensor": EXPERTS, "bit": 30}, EXPERTS, 5),
        ({"name": "large_expert", "tensor": EXPERTS, "elements": 64}, EXPERTS, 5),
        ({"name": "gradient_bit", "tensor": "*.1.mlp.gate.weight", "bit": 30}, "model.layers.1.mlp.gate.weight", 6),
        ({"name": "activation_bit", "tensor": "*.1.mlp.gate", "bit": 30}, "model.layers.1.mlp.gate", 5),
    ],
)
def test_experts_and_router_of_transformers_are_struck(fault: dict[str, Any], tensor: str, first: int) -> None:
    """Disarmed no bit; armed nothing differs before the strike, the weights do at the end, and the record names where.

    Not the loss: of what one element of a gradient does to it, rounding may leave nothing.
    """
    untouched = mixtral()
    losses = train(untouched)
    loop = mixtral()
    assert attached(loop)[0] == losses and same(loop.state(), untouched.state())
    struck = mixtral()
    found, run = attached(struck, fault={**fault, "start": 5})
    assert found[:first] == losses[:first] and not same(struck.state(), untouched.state())
    assert {event.tensor for event in run.events} == {tensor} and any(event.changed for event in run.events)


def test_routing_of_a_model_of_ones_own_cannot_be_struck() -> None:
    with pytest.raises(ConfigError, match="fault=lost_expert: where a model of one's own sends its tokens is not seen"):
        attached(with_optimizer(lambda model: torch.optim.SGD(model.parameters(), lr=0.1)), fault="lost_expert")
