"""The mixture of experts: by hand, what is read of it, and that one expert's NaN stays with its tokens."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from harness.basics import devices
from harness.config import ConfigError
from harness.faults.facts import facts_of
from harness.kernels import use
from harness.memory.footprint import footprint
from harness.model.branches import branches_of
from harness.model.dropout import jittered
from harness.model.routing import ExpertSlots, balance_loss, chosen
from harness.testing import check_setting, engine
from harness.testing.changes import Change, fill_first
from harness.training.config_checks import check_trial
from harness.training.pack import Pack
from harness.training.sites import Site
from injectors.value import Value
from sweeps.planning.planner import activation_elements
from tests.harness.experts import EXPERTS, NAME, SHAPE, TOP, WIDTH, branch_of, mixed
from tests.harness.test_model_parts_memory import SHAPE as MEMORY
from tests.harness.test_model_parts_memory import kept_by_a_token_of


@pytest.mark.parametrize(
    "fields",
    [
        {"moe": {"router_z": 1e-3, "balance_sequence": 1e-3}},
        {
            "moe": {
                "experts": 8,
                "top": 3,
                "gate": "sigmoid",
                "shared": 1,
                "groups": 4,
                "groups_kept": 2,
                "scale": 2.5,
            }
        },
        {"moe": {"gate": "sqrt_softplus", "top": 1, "balance": 0.0}, "swiglu_clamp": 0.5},
        {"moe": {"weights": "plain", "router_precision": "products"}, "precision": "bf16", "activation": "gelu"},
        {"moe": {"bias_rate": 0.01, "gate": "sigmoid", "balance": 0.0}, "ranks": 2, "batch": 4},
        {"moe": {"capacity": 0.8, "router_z": 1e-3, "jitter": 0.1}},
        {"moe": {"gate_alpha": 1.702, "up_offset": 1.0}, "biases": True, "micro_batches": 2},
        {"parametrization": "mup", "base_width": 8, "biases": True},
    ],
    ids=["softmax", "DeepSeek-V3", "DeepSeek-V4", "bf16, plain", "bias", "capacity", "gpt-oss", "muP"],
)
def test_it_keeps_the_promises_of_settings(fields: dict[str, Any]) -> None:
    check_setting(**{"block": {"channel_mixer": "moe"}, "activation": "swiglu", **fields})


def test_mup_is_the_standard_parametrisation_at_the_base_width_and_has_routers_as_heads() -> None:
    """Bit for bit; at another width a router starts as at the base, and a bias of it is not multiplied."""
    plain, same = (engine.pack_of([mixed({}, **fields)] * 2) for fields in ({}, {"parametrization": "mup", **AT_BASE}))
    for pack in (plain, same):
        pack.begin(0)
        pack.learn(pack.objective.batch(0))
    assert torch.equal(plain.weights, same.weights) and torch.equal(plain.gradients, same.gradients)
    wide, ours = branch_of(mixed({}, parametrization="mup", base_width=WIDTH // 4, biases=True))
    router = wide.layout.by_name[f"{NAME}.router"]
    assert (router.std, router.learning_rate) == (pytest.approx((WIDTH // 4) ** -0.5), 1.0)
    tensors, seen = wide.tensors(wide.weights, 0), []
    tensors[f"{NAME}.router_bias"].fill_(3.0)
    wide.model.taps.attach(f"{NAME}.logits", lambda name, x: seen.append(x.clone()))
    x = torch.randn(2, 16, WIDTH, dtype=torch.float64)
    ours(x)
    torch.testing.assert_close(seen[0][0], x[0] @ tensors[f"{NAME}.router"].T / 4 + 3.0)


AT_BASE = {"base_width": WIDTH, "base_head_dim": None}


# --- by hand --------------------------------------------------------------------------------------------------------


def test_of_equal_scores_the_lower_number_is_chosen() -> None:
    scores = torch.tensor([[[0.5, 0.9, 0.9, 0.1], [0.0, 0.0, 0.0, 0.0]]])
    assert chosen(scores, 2).tolist() == [[[1, 2], [0, 1]]]


def test_the_best_groups_are_those_of_the_two_largest_scores() -> None:
    """The largest score of all is in a group whose second is small."""
    scores = torch.tensor([[[0.9, 0.0, 0.5, 0.6, 0.1, 0.2]]])
    assert chosen(scores, 2, 3, 1).tolist() == [[[3, 2]]]
    assert chosen(scores, 2, 3, 2).tolist() == [[[0, 3]]]


def test_slots_are_those_of_the_tokens_in_their_order() -> None:
    choice = torch.tensor([[[1, 0], [1, 2], [0, 1]]])
    slots = ExpertSlots.of(choice, 4)
    assert slots.loads.tolist() == [[2, 3, 1, 0]]
    assert slots.sources.view(4, 3).tolist() == [[1, 4, 6], [0, 2, 5], [3, 6, 6], [6, 6, 6]], "6: nobody's"
    assert slots.places.tolist() == [[3, 0, 4, 6, 1, 5]]


def test_beyond_its_capacity_an_expert_drops_the_last_tokens() -> None:
    """Room for two of each: ceil(0.9 x 2 x 3 / 4). The third token's second choice has none."""
    slots = ExpertSlots.of(torch.tensor([[[1, 0], [1, 2], [0, 1]]]), 4, 0.9)
    assert slots.room == 2 and slots.loads.tolist() == [[2, 3, 1, 0]], "loads are of what was chosen"
    assert slots.sources.view(4, 2).tolist() == [[1, 4], [0, 2], [3, 6], [6, 6]]
    assert slots.places.tolist() == [[2, 0, 3, 4, 1, 8]], "8: behind the last slot"


def test_a_capacity_that_holds_all_changes_no_bit_and_a_small_one_drops() -> None:
    """What is dropped everywhere gives nothing, and has no gradient but those of the router."""
    x = torch.randn(2, 16, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    free, whole, tight = (branch_of(mixed({"capacity": capacity}))[1](x) for capacity in (None, 4.0, 0.25))
    assert torch.equal(free, whole)
    is_gone = (tight == 0).all(-1)
    assert 0 < is_gone.sum() < is_gone.numel() and not torch.equal(tight, free)
    assert not is_gone[:, 0].any(), "the first token is in all of its experts"
    pack, ours = branch_of(mixed({"capacity": 0.25}))
    given = x.clone().requires_grad_()
    ours(given).backward(torch.ones_like(x))
    assert given.grad is not None and (given.grad[is_gone] == 0).all() and (given.grad[~is_gone] != 0).any()
    assert pack.gradients.isfinite().all()


def test_the_balance_loss_is_1_at_balance_and_the_experts_over_k_where_k_take_all() -> None:
    even = torch.full((1, 8, 4), 0.25, dtype=torch.float64)
    choice = torch.arange(16).view(1, 8, 2) % 4
    assert balance_loss(even, choice).item() == pytest.approx(1)
    one_sided = torch.tensor([0.5, 0.5, 0.0, 0.0], dtype=torch.float64).expand(1, 8, 4)
    assert balance_loss(one_sided, chosen(one_sided, 2)).item() == pytest.approx(2)
    halves = torch.cat([one_sided[:, :4], one_sided[:, :4].flip(-1)], 1)
    assert balance_loss(halves, chosen(halves, 2)).item() == pytest.approx(1), "over the batch"
    assert balance_loss(halves, chosen(halves, 2), 2).item() == pytest.approx(2), "within each sequence"


def test_with_all_experts_chosen_it_is_their_weighted_sum() -> None:
    pack, ours = branch_of(mixed({"top": EXPERTS}))
    x = torch.randn(2, 16, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    y = ours(x)
    for row in range(2):
        tensors = pack.tensors(pack.weights, row)
        shares = (x[row] @ tensors[f"{NAME}.router"].T).softmax(-1)
        total = torch.zeros_like(x[row])
        for expert in range(EXPERTS):
            gate, up, down = (tensors[f"{NAME}.{part}.{expert}"] for part in ("gate", "up", "down"))
            total += shares[:, expert, None] * ((F.silu(x[row] @ gate.T) * (x[row] @ up.T)) @ down.T)
        torch.testing.assert_close(y[row], total, rtol=0, atol=1e-12)


def test_one_expert_is_the_dense_part() -> None:
    """Trained, loss for loss: the router has one choice, of weight 1."""
    dense = {key: value for key, value in SHAPE.items() if key != "block"}
    one = mixed({"experts": 1, "top": 1, "hidden": None}, steps=6)
    plain = engine.trial(**dense, steps=6)

    def alike(pack: Pack) -> None:
        for row in range(len(pack)):
            for name, values in pack.tensors(pack.weights, row).items():
                number = zlib.crc32(name.replace("moe", "feedforward").removesuffix(".0").encode())
                drawn = torch.Generator().manual_seed(number)
                values.copy_(0.2 * torch.randn(values.shape, generator=drawn, dtype=values.dtype))

    losses = [engine.run([trial, trial], prepare=alike).signals["loss"] for trial in (one, plain)]
    assert np.allclose(*losses, rtol=0, atol=1e-5) and np.isfinite(losses[0]).all()


def test_a_nan_in_one_expert_stays_with_the_tokens_that_went_to_it() -> None:
    """Forwards and backwards, bit for bit; in the other row nothing changes at all."""
    pack, ours = branch_of(mixed())
    x = torch.randn(2, 16, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    dy = torch.randn(2, 16, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(6))

    def passed() -> tuple[Tensor, Tensor, Tensor]:
        given = x.clone().requires_grad_()
        y = ours(given)
        y.backward(dy)
        assert given.grad is not None
        return y.detach(), given.grad, pack.gradients.clone()

    y, dx, gradients = passed()
    scores = (x[1] @ pack.tensors(pack.weights, 1)[f"{NAME}.router"].T).softmax(-1)[None]
    is_theirs = (chosen(scores, TOP)[0] == 3).any(-1)
    assert 0 < is_theirs.sum() < 16
    pack.tensors(pack.weights, 1)[f"{NAME}.up.3"][2, 5] = torch.nan
    struck_y, struck_dx, struck = passed()
    assert torch.equal(struck_y[0], y[0]) and torch.equal(struck_dx[0], dx[0]) and torch.equal(struck[0], gradients[0])
    assert struck_y[1, is_theirs].isnan().all() and struck_dx[1, is_theirs].isnan().all()
    assert torch.equal(struck_y[1, ~is_theirs], y[1, ~is_theirs]) and torch.equal(
        struck_dx[1, ~is_theirs], dx[1, ~is_theirs]
    )
    before, after = (pack.tensors(flat, 1) for flat in (gradients, struck))
    for name in before:
        if name.startswith(NAME) and not name.endswith((".3", ".router")):
            assert torch.equal(before[name], after[name]), name


@pytest.mark.parametrize("ways", [{}, {"ranks": 2, "micro_batches": 2, "batch": 4}])
def test_what_is_read_of_a_router(ways: dict[str, Any]) -> None:
    """Of all ranks and micro-batches, as NumPy has it from the logits of a tap."""
    trial, seen = mixed(depth=2, steps=1, **ways), []
    pack = engine.pack_of([trial, trial])
    pack.model.taps.attach("blocks.1.moe.logits", lambda name, x: seen.append(x.detach().double().numpy()))
    pack.begin(0)
    for rank, part in pack.ranks.parts(pack.objective.batch(0)):
        pack.learn(part, rank=rank)
    z = np.concatenate(seen, 1)  # [R, tokens, E]
    shares = np.exp(z) / np.exp(z).sum(-1, keepdims=True)
    ordered = -np.sort(-shares, -1)
    taken = (shares >= ordered[..., TOP - 1 : TOP]).mean(1)
    found = engine.run([trial, trial]).signals
    assert found["expert_share"][:, 0, 1] == pytest.approx(taken.max(-1), rel=1e-6)
    assert found["expert_spread"][:, 0, 1] == pytest.approx(taken.std(-1) / taken.mean(-1), rel=1e-5)
    entropy = -(shares * np.log(shares)).sum(-1).mean(1)
    assert found["router_entropy"][:, 0, 1] == pytest.approx(entropy, rel=1e-5)
    assert found["router_logit_max"][:, 0, 1] == pytest.approx(np.abs(z).max((1, 2)), rel=1e-5)
    margin = (ordered[..., TOP - 1] - ordered[..., TOP]).min(1)
    assert found["router_margin"][:, 0, 1] == pytest.approx(margin, rel=1e-4, abs=1e-7)


@pytest.mark.parametrize("capacity", [0.5, 1.0, 4.0])
def test_the_share_that_finds_no_room_is_read(capacity: float) -> None:
    """As it is counted from the choices: of each expert what is beyond its room."""
    trial, seen = mixed({"capacity": capacity}, depth=1, steps=1), []
    pack = engine.pack_of([trial, trial])
    pack.model.taps.attach("blocks.0.moe.experts", lambda name, x: seen.append(x.detach().numpy()))
    pack.begin(0)
    for rank, part in pack.ranks.parts(pack.objective.batch(0)):
        pack.learn(part, rank=rank)
    choice = np.concatenate(seen, 1)  # [R, tokens, K]
    experts, assigned = trial.section("moe").experts, choice[0].size
    room = min(choice.shape[1], int(np.ceil(capacity * assigned / experts)))
    counts = [[(row == expert).sum() for expert in range(experts)] for row in choice]
    beyond = np.maximum(np.array(counts) - room, 0).sum(1) / assigned
    found = engine.run([trial, trial]).signals["expert_dropped"][:, 0, 0]
    assert found == pytest.approx(beyond, abs=1e-7) and beyond.any() == (capacity < 4)


def test_what_experts_give_is_read() -> None:
    """The largest element, and the largest root mean square of the tokens of one expert, as each expert computes it."""
    trial, seen = mixed(depth=1, steps=1, signals={"expert_outputs": 1}), []
    plain = engine.run([trial, trial]).signals
    assert (plain["expert_output_rms"] <= plain["expert_output_max"]).all() and (plain["expert_output_max"] > 0).all()
    pack = engine.pack_of([trial, trial])
    real = pack.model._branches[1]._experts

    def watched(tools: Any, name: str, x: torch.Tensor) -> torch.Tensor:
        given = real(tools, name, x)
        seen.append((x.detach().double().numpy(), given.detach().double().numpy()))
        return given

    object.__setattr__(pack.model._branches[1], "_experts", watched)
    try:
        pack.begin(0)
        for rank, part in pack.ranks.parts(pack.objective.batch(0)):
            pack.learn(part, rank=rank)
    finally:
        object.__delattr__(pack.model._branches[1], "_experts")
    ((given_to, given),) = seen
    used = np.abs(given_to).sum(-1) > 0  # [R, E, C]
    squares = [
        [(y[u] ** 2).mean() if u.any() else 0.0 for y, u in zip(*row, strict=True)]
        for row in zip(given, used, strict=True)
    ]
    assert plain["expert_output_max"][:, 0, 0] == pytest.approx(np.abs(given).max((1, 2, 3)), rel=1e-6)
    assert plain["expert_output_rms"][:, 0, 0] == pytest.approx(np.sqrt(squares).max(1), rel=1e-6)


def test_a_planted_outlier_of_one_expert_is_an_alarm() -> None:
    """`expert_output` sounds at the step of the strike; a golden run is quiet."""
    own = {"steps": 40, "precision": "fp32", "detect": {"name": "expert_output"}, "signals": {"expert_outputs": 1}}
    fault = Value(site="weight", tensor="blocks.0.moe.down.2", elements=None, start=30, model="scale", value=30.0)
    found = engine.run([mixed({}, **own), mixed({}, fault=fault, **own)]).signals["alarm_expert_output"]
    assert not found[0].any() and np.flatnonzero(found[1]).tolist()[0] == 30


def test_what_only_tells_something_cannot_be_struck() -> None:
    """Loads, drops and sizes of outputs lead nowhere: a strike there would count, and change nothing."""
    trial = mixed({"capacity": 1.0, "lag": 1}, depth=1)
    activations = facts_of(trial).taps
    assert "blocks.0.moe.logits" in activations and "blocks.0.moe.output" in activations
    assert not {f"blocks.0.moe.{name}" for name in ("loads", "dropped", "outputs", "stale")} & activations.keys()


def test_a_router_that_sends_all_to_one_expert_is_an_alarm() -> None:
    """The detector is silent in the first thirty steps, and sounds at the third from there on."""
    own = {"steps": 40, "precision": "fp32", "detect": {"name": "expert_share"}}
    several, one = (engine.run([mixed({"top": 1, "experts": count}, **own)] * 2) for count in (8, 1))
    assert (one.signals["expert_share"] == 1).all()
    assert np.flatnonzero(one.signals["alarm_expert_share"][0]).tolist()[0] == 32
    assert not several.signals["alarm_expert_share"].any()


def test_what_a_router_reads_is_jittered_in_training_alone() -> None:
    """Within its bounds, anew at each step and sequence; a neighbour without it keeps every bit, and so do experts."""
    trials = [mixed({"jitter": width}, steps=2) for width in (0.0, 0.25)]
    pack, seen = engine.pack_of(trials), []
    pack.model.taps.attach(f"{NAME}.logits", lambda name, x: seen.append(x.detach().clone()))
    batch = pack.objective.batch(0)
    for step in range(2):
        pack.begin(step)
        pack.learn(batch)
    with torch.no_grad():
        pack.model(batch[:, :, :-1])
    first, second, plain = (x[1] for x in seen)
    assert all(torch.equal(x[0], seen[2][0]) for x in seen) and torch.equal(seen[2][0], plain)
    assert not torch.equal(first, plain) and not torch.equal(first, second)
    factors = jittered(torch.ones(1, 4096, 8), torch.tensor([0.25]), torch.tensor([7]), range(2))
    assert 0.75 <= float(factors.min()) < 0.76 and 1.24 < float(factors.max()) <= 1.25
    assert float(factors.mean()) == pytest.approx(1.0, abs=0.005)


def test_memory_is_counted_by_experts_and_slots() -> None:
    """What two more blocks keep for the backward pass lies within what is counted, and within a fifth of it."""
    counted, kept = [], []
    for depth in (1, 3):
        own = {**MEMORY, "depth": depth, "activation": "swiglu", "block": {"channel_mixer": "moe"}}
        trials = engine.different(3, **own, moe={"experts": 8, "shared": 1})
        counted.append(activation_elements(trials[0].model, MEMORY["vocabulary"], branches=branches_of(trials[0])))
        kept.append(kept_by_a_token_of(engine.pack_of(trials)))
    assert 0.8 < (kept[1] - kept[0]) / (counted[1] - counted[0]) <= 1


def test_the_ways_of_an_accelerator_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """To rounding; and its memory can be counted on a device without numbers."""
    trials = [
        mixed({"router_z": 1e-3, "balance": 0.01, "shared": 1}, precision="fp32", steps=4, seed=s) for s in range(2)
    ]
    here = engine.run(trials).signals
    monkeypatch.setattr(use, "is_installed", lambda: False)
    assert footprint(trials[0]).bytes(4) > footprint(trials[0]).bytes(2) > 0
    monkeypatch.setattr(devices, "CPUS", ())
    there = engine.run(trials).signals
    for name in ("loss", "grad_norm", "expert_share", "router_entropy"):
        np.testing.assert_allclose(here[name], there[name], rtol=1e-4, err_msg=name)


def test_a_bias_moves_towards_even_loads_after_each_step_and_weighs_nothing() -> None:
    """By its rate, against what an expert has more than the mean of a step's tokens, of all ranks and micro-batches."""
    rate, seen = 0.125, []
    trial = mixed({"bias_rate": rate, "gate": "sigmoid"}, steps=3, batch=4, ranks=2, micro_batches=2)

    def listen(pack: Pack) -> None:
        pack.model.taps.attach(f"{NAME}.loads", lambda name, x: seen.append(x.detach().clone()))

    found = dict(engine.run([trial, trial], prepare=listen).pack.rows_state)["router_bias"]
    expected = torch.zeros_like(found[:, 0])
    assert len(seen) == 3 * 4, "of neither validation nor what is computed again"
    for step in range(3):
        loads = torch.stack(seen[4 * step : 4 * step + 4]).sum(0)
        assert torch.allclose(loads.sum(-1), torch.full((2,), 4.0 * TOP, dtype=loads.dtype))
        expected += rate * (loads.mean(-1, keepdim=True) - loads).sign()
    assert torch.equal(found[:, 0], expected) and expected.any()


def test_a_row_that_does_not_step_keeps_its_biases() -> None:
    """Its gradient is not finite, and it freezes; the others go on."""
    trial = mixed({"bias_rate": 0.125}, steps=6, precision="fp32")
    ruin = Change(Site.REDUCED_GRADIENT, range(3, 4), fill_first("embedding", np.nan))
    run = engine.run([trial] * 8, {1: ruin}, block=10)  # one of eight is too few to be dropped
    bias = dict(run.pack.rows_state)["router_bias"]
    assert run.pack.rows == list(range(8))
    assert torch.equal(bias[0], bias[2]) and not torch.equal(bias[0], bias[1])
    assert run.result.acts[1]["moe.bias_rate"] == 3 and run.result.acts[0]["moe.bias_rate"] == 6


def test_losses_of_the_router_move_it_and_are_not_reported() -> None:
    """With weights of 100 the first reported loss is the same, and experts are used more evenly in the end."""
    runs = [engine.run([mixed({"balance": weight}, steps=30, lr=1e-2)] * 2) for weight in (0.0, 100.0)]
    first, other = (run.signals["loss"][0] for run in runs)
    assert first[0] == other[0] and (first[1:] != other[1:]).any()
    assert runs[1].signals["grad_norm"][0, 0] > runs[0].signals["grad_norm"][0, 0]


@pytest.mark.parametrize(
    ("moe", "fields", "said"),
    [
        ({"top": 9}, {}, "moe.top=9: more than moe.experts=8; allowed: 1 to 8"),
        ({"groups": 3}, {}, "moe.groups=3: does not divide moe.experts=8; allowed: a divisor of it"),
        ({"groups": 8}, {}, "moe.groups=8: a group needs two experts; allowed: at most 4"),
        ({"groups": 4, "groups_kept": 5}, {}, "moe.groups_kept=5: more than moe.groups=4; allowed: 1 to 4"),
        ({"groups": 4, "top": 3}, {}, "moe.top=3: more than the 2 experts of moe.groups_kept=1; allowed: 1 to 2"),
        (
            {"gate_alpha": 2.0},
            {"activation": "gelu"},
            "moe.gate_alpha=2.0: model.activation=gelu has no gate; allowed: 1.0",
        ),
        (
            {},
            {"sigma_reparam": True},
            "model.sigma_reparam=true: is not known for experts and their router; allowed: false",
        ),
        ({}, {"up_norm": True}, "model.up_norm=true: reaches nothing, as feedforward is not in a block of "),
    ],
)
def test_what_is_refused(moe: dict[str, Any], fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_trial(mixed(moe, **fields))
    assert any(reason.startswith(said) for reason in refused.value.reasons), refused.value.reasons


def test_fields_of_a_mixture_that_is_not_there_reach_nothing() -> None:
    plain = {key: value for key, value in SHAPE.items() if key != "block"}
    with pytest.raises(ConfigError, match=r"moe\.top=1: reaches nothing, as moe is not in a block of "):
        check_trial(engine.trial(**plain, moe={"top": 1}))
