"""Faults of routing: where tokens are sent, and what comes of it, against models that are changed by hand."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.config import ConfigError, Fault
from harness.config.names import NEXT_BEST
from harness.faults.facts import facts_of
from harness.model import routing
from harness.model.branches import moe
from harness.model.routing import merged
from harness.testing import engine
from harness.testing.faults import START as PROMISED_START
from harness.testing.faults import FaultPromises
from harness.training.pack import Pack
from injectors.replay import record_of
from injectors.routing import (
    BypassedExpert,
    LateRouting,
    LostExpert,
    OneExpert,
    RoutingFault,
    SwappedExperts,
    WrongExpert,
)
from tests.harness.experts import EXPERTS, TOP, mixed

START, STEPS, LATE = 3, 6, 2
FIELDS: dict[str, Any] = {"depth": 2, "steps": STEPS, "batch": 4, "lr": 0.03, "precision": "fp32", "seed": 5}
MOE = {"block": {"channel_mixer": "moe"}, "activation": "swiglu", "moe": {"experts": EXPERTS, "top": TOP}}
FAULTS: dict[str, RoutingFault] = {
    "wrong": WrongExpert(start=START, duration=1, share=0.25),
    "swapped": SwappedExperts(start=START, duration=1, expert=1, other=4),
    "one": OneExpert(start=START, duration=1, expert=2),
    "lost": LostExpert(start=START, duration=1, expert=3),
    "late": LateRouting(start=START, duration=1, late=LATE),
    "bypassed": BypassedExpert(start=START, duration=1, expert=3),
}


PROMISES = FaultPromises(list(FAULTS), lambda name: replace(FAULTS[name], start=PROMISED_START), MOE)


@pytest.mark.parametrize("promise", FaultPromises.names())
@pytest.mark.parametrize("name", FAULTS)
def test_each_promise(name: str, promise: str) -> None:
    """Of all of them together, in packs that are trained once for each promise."""
    PROMISES.check(promise, name)


class Sent:
    """By step and layer, the experts of the tokens of all rows as they are sent, behind all strikes."""

    def __init__(self, pack: Pack):
        self.experts: list[Tensor] = []
        self.first = pack.weights.clone()
        pack.model.taps.attach("blocks.*.moe.experts", lambda name, x: self.experts.append(x.clone()))

    def __call__(self, step: int, layer: int) -> Tensor:
        return self.experts[2 * step + layer]


@cache
def struck() -> tuple[engine.Run, Sent]:
    """A golden trial, and one for each fault behind it."""
    trials = [mixed(**FIELDS), *(mixed(**FIELDS, fault=fault) for fault in FAULTS.values())]
    kept: list[Sent] = []
    return engine.run(trials, prepare=lambda pack: kept.append(Sent(pack))), kept[0]


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("layer", range(2))
def test_tokens_are_sent_as_it_says(name: str, layer: int) -> None:
    """In the struck step alone; what the second layer is sent follows from a first one that was struck too."""
    _, sent = struck()
    number = 1 + list(FAULTS).index(name)
    for step in range(START):
        assert torch.equal(sent(step, layer)[number], sent(step, layer)[0])
    now, golden = sent(START, layer)[number], sent(START, layer)[0]
    if name == "one":
        assert (now == 2).all()
    elif name == "late":
        assert torch.equal(now, sent(START - LATE, layer)[0]) and not torch.equal(now, golden)
    elif name == "lost":
        assert not (now == 3).any() and (now == EXPERTS).any()
    if layer == 0:
        changed = now != golden
        if name == "wrong":
            assert int(changed.sum()) == round(0.25 * golden.numel()) and (now[changed] < EXPERTS).all()
        elif name == "lost":
            assert torch.equal(changed, golden == 3)
        elif name == "bypassed":
            assert torch.equal(changed, golden == 3) and (now[changed] == EXPERTS + NEXT_BEST).all()
        elif name == "swapped":
            names = torch.arange(EXPERTS)
            names[[1, 4]] = names[[4, 1]]
            assert torch.equal(now, names[golden]) and changed.any()


def test_the_others_are_as_without_them() -> None:
    """Bit for bit, though passes in which something is struck make room for what is sent nowhere."""
    found, _ = struck()
    plain = engine.run([mixed(**FIELDS)] * 2)
    engine.assert_same_trials(found, plain, {0: 0})
    assert found.result.changes[1:] == [2] * len(FAULTS)


def by_hand(change: Any) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of the struck step in a golden model whose weights before it were changed."""
    trial, kept = mixed(**FIELDS), []

    def prepare(pack: Pack) -> None:
        learn, steps = pack.learn, iter(range(STEPS))

        def changed(batch: Tensor, *rest: Any) -> Tensor:
            is_struck = next(steps) == START
            before = pack.weights.clone()
            if is_struck:
                change(pack)
            loss = learn(batch, *rest)
            if is_struck:
                gradients = pack.tensors(pack.gradients, 0)
                kept.append((float(loss[0]), {name: x.clone() for name, x in gradients.items()}))
            pack.weights.copy_(before)
            return loss

        pack.learn = changed  # type: ignore[method-assign]

    engine.run([trial] * 2, prepare=prepare, until=START + 1)
    return kept[0]


def of_experts(pack: Pack, expert: int) -> list[Tensor]:
    return [
        pack.layout.view(pack.weights, f"blocks.{i}.moe.{n}.{expert}") for i in (0, 1) for n in ("gate", "up", "down")
    ]


def test_a_lost_expert_is_one_that_gives_zero() -> None:
    def lose(pack: Pack) -> None:
        for layer in range(2):
            pack.layout.view(pack.weights, f"blocks.{layer}.moe.down.3").zero_()

    found, number = struck()[0], 1 + list(FAULTS).index("lost")
    assert found.signals["loss"][number, START] == pytest.approx(by_hand(lose)[0], rel=1e-6)
    assert found.signals["loss"][number, START] != found.signals["loss"][0, START]


def test_a_lost_expert_that_the_others_know_of_is_one_that_no_router_can_choose(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without one the next best takes its place, with weights of those that are there."""
    found, number = struck()[0], 1 + list(FAULTS).index("bypassed")

    def forbid(pack: Pack) -> None:
        def chosen(scores: Tensor, *more: Any) -> Tensor:
            return routing.chosen(scores.index_fill(-1, torch.tensor(3), -torch.inf), *more)

        monkeypatch.setattr(moe, "chosen", chosen)

    loss, gradients = by_hand(forbid)
    assert found.signals["loss"][number, START] == pytest.approx(loss, rel=1e-6)
    norm = float(torch.cat([x.flatten().double() for x in gradients.values()]).norm())
    assert found.signals["grad_norm"][number, START] == pytest.approx(norm, rel=1e-5)
    assert found.signals["loss"][number, START] != found.signals["loss"][0, START]


def test_where_all_experts_are_chosen_a_lost_one_has_no_other() -> None:
    both = {"experts": 2, "top": 2}
    faults = [kind(start=START, duration=1, expert=1) for kind in (LostExpert, BypassedExpert)]
    found = engine.run([mixed(both, **FIELDS), *(mixed(both, **FIELDS, fault=fault) for fault in faults)])
    assert found.result.changes[1:] == [2, 2]
    assert found.signals["loss"][1, START] == found.signals["loss"][2, START] != found.signals["loss"][0, START]


def test_swapped_experts_are_those_whose_weights_are_swapped() -> None:
    def swap(pack: Pack) -> None:
        for one, other in zip(of_experts(pack, 1), of_experts(pack, 4), strict=True):
            kept = one.clone()
            one.copy_(other)
            other.copy_(kept)

    found, number = struck()[0], 1 + list(FAULTS).index("swapped")
    loss, gradients = by_hand(swap)
    assert found.signals["loss"][number, START] == pytest.approx(loss, rel=1e-6)
    norm = float(torch.cat([x.flatten().double() for x in gradients.values()]).norm())
    assert found.signals["grad_norm"][number, START] == pytest.approx(norm, rel=1e-5)


def test_an_expert_that_takes_all_has_the_sum_of_the_weights() -> None:
    """Renormalised, that is 1: each token passes through the one expert."""

    def only(pack: Pack) -> None:
        for expert in range(EXPERTS):
            for one, other in zip(of_experts(pack, 2), of_experts(pack, expert), strict=True):
                other.copy_(one)

    found, number = struck()[0], 1 + list(FAULTS).index("one")
    assert found.signals["loss"][number, START] == pytest.approx(by_hand(only)[0], rel=1e-5)
    assert (found.signals["expert_share"][number, START] == 1).all()


def test_an_expert_that_is_named_twice_takes_both_weights() -> None:
    choice = torch.tensor([[[1, 1, 2], [2, 1, 2], [0, 3, 1]]])
    weights = torch.tensor([[[0.5, 0.25, 0.125]] * 3], requires_grad=True)
    experts, found = merged(choice, weights, 4)
    assert experts[0].tolist() == [[1, 4, 2], [2, 1, 4], [0, 3, 1]]
    assert found[0].tolist() == [[0.75, 0.0, 0.125], [0.625, 0.25, 0.0], [0.5, 0.25, 0.125]]
    (found * torch.tensor([1.0, 10.0, 100.0])).sum().backward()
    assert weights.grad is not None
    assert weights.grad[0].tolist() == [[1, 1, 100], [1, 10, 1], [1, 10, 100]]


def test_one_layer_and_one_rank_can_be_meant() -> None:
    """The others are sent as ever, in a step of two ranks."""
    fault = OneExpert(start=START, duration=1, expert=2, layer=1, rank=1)
    kept: list[Sent] = []
    ways = {**FIELDS, "ranks": 2}
    trials = [mixed(**ways), mixed(**ways, fault=fault)]
    run = engine.run(trials, prepare=lambda pack: kept.append(Sent(pack)))
    (event,) = run.result.events[1]
    assert (event.tensor, event.rank, event.step, event.index) == ("blocks.1.moe.experts", 1, START, None)
    of_ranks = kept[0].experts[4 * START : 4 * START + 4]  # rank by rank, layer by layer
    assert [bool((x[1] != x[0]).any()) for x in of_ranks] == [False, False, False, True]


@pytest.mark.parametrize(
    ("fault", "fields", "said"),
    [
        (LostExpert(start=1, expert=8), {}, "fault.expert=8: beyond moe.experts=8; allowed: 0 to 7"),
        (SwappedExperts(start=1, other=0), {}, "fault.other=0: is fault.expert too; allowed: another one"),
        (OneExpert(start=1, layer=2), {}, "fault.layer=2: no router of it matches"),
        (OneExpert(start=1, rank=1), {}, "fault.rank=1: beyond train.ranks=1; allowed: 0 to 0"),
        (LateRouting(start=1, late=2), {}, "fault.late=2: before the first step; allowed: 1 to fault.start=1"),
        (LostExpert(start=1), {"checkpointing": True}, "train.checkpointing=true: experts are chosen again"),
        (LostExpert(start=1), {"block": {}}, "fault.kind=lost_expert: this model has no experts; allowed with it: "),
        (WrongExpert(start=1), {"moe": {"experts": 1, "top": 1}}, "moe.experts=1: there is no other; allowed with "),
    ],
)
def test_what_is_refused(fault: Fault, fields: dict[str, Any], said: str) -> None:
    given = {**FIELDS, **MOE, **fields}
    if not given["block"]:
        del given["moe"]
    with pytest.raises(ConfigError) as refused:
        fault.check(facts_of(engine.trial(**given, fault=fault)))  # type: ignore[attr-defined]
    assert any(reason.startswith(said) for reason in refused.value.reasons), refused.value.reasons


def test_late_routing_of_batches_that_grow_is_as_it_should_be_where_sizes_differ() -> None:
    """And late where they do not: here batches grow up to step 3."""
    ways = {**FIELDS, "batch_start": 1, "batch_steps": 3}
    fault = LateRouting(start=2, duration=None, late=1)
    run = engine.run([mixed(**ways), mixed(**ways, fault=fault)])
    sizes = run.pack.curriculum.sequences.tolist()
    changed = {event.step for event in run.result.events[1] if event.changed}
    assert changed == {step for step in range(2, len(sizes)) if sizes[step] == sizes[step - 1]} and len(set(sizes)) > 2


def test_a_record_is_of_so_many_experts() -> None:
    """What is struck has other elements with another number of them, or of choices; a weight of a loss changes none."""
    shape = facts_of(mixed(**FIELDS)).shape
    assert (shape["moe.experts"], shape["moe.top"]) == (EXPERTS, TOP) and "moe.balance" not in shape
    record = record_of(mixed(**FIELDS, fault=FAULTS["lost"]).to_dict(), [], "")
    assert record["shape"] == shape
