"""The mixture of experts: against transformers' blocks, by hand, and that one expert's NaN stays with its tokens."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.basics import devices
from harness.config import ConfigError, Trial
from harness.kernels import use
from harness.memory.footprint import footprint
from harness.model.branches import branches_of
from harness.model.routing import ExpertSlots, balance_loss, chosen, router_z_loss
from harness.testing import check_setting, engine
from harness.training.config_checks import check_trial
from harness.training.pack import Pack
from sweeps.planning.planner import activation_elements
from tests.harness.test_model_parts_memory import SHAPE as MEMORY
from tests.harness.test_model_parts_memory import kept_by_a_token_of

NAME, WIDTH, HIDDEN, EXPERTS, TOP = "blocks.0.moe", 16, 12, 8, 2
SHAPE: dict[str, Any] = {
    "depth": 1,
    "width": WIDTH,
    "context": 8,
    "batch": 2,
    "precision": "fp64",
    "activation": "swiglu",
}
SHAPE |= {"block": {"channel_mixer": "moe"}}
SIZES = {"experts": EXPERTS, "top": TOP, "hidden": HIDDEN, "balance": 0.0}


def mixed(moe: dict[str, Any] | None = None, **fields: Any) -> Trial:
    return engine.trial(**{**SHAPE, **fields, "moe": {**SIZES, **(moe or {})}})


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
        {"moe": {"gate_alpha": 1.702, "up_offset": 1.0}, "biases": True, "micro_batches": 2},
    ],
    ids=["softmax", "DeepSeek-V3", "DeepSeek-V4", "bf16, plain", "gpt-oss"],
)
def test_it_keeps_the_promises_of_settings(fields: dict[str, Any]) -> None:
    check_setting(**{"block": {"channel_mixer": "moe"}, "activation": "swiglu", **fields})


# --- against transformers -------------------------------------------------------------------------------------------


def branch_of(trial: Trial) -> tuple[Pack, Callable[[Tensor], Tensor]]:
    """A pack of two rows with rough weights, and its branch as a function of [R, N, D]."""
    pack = engine.pack_of([trial, trial])
    with torch.no_grad():
        pack.weights.normal_(0, 0.3, generator=torch.Generator().manual_seed(1))
    (branch,) = (one for one in branches_of(trial) if one.kind == "moe")
    tools = pack.model.tools()
    return pack, lambda x: branch(tools, NAME, x, trial.model.context)


@contextmanager
def in_float64() -> Iterator[None]:
    """Routers of transformers ask for float32 by name."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("float", "float32"):
            patch.setattr(torch, name, torch.float64)
        patch.setattr(Tensor, "float", Tensor.double)
        yield


def stacked(pack: Pack, row: int, *names: str, flat: Tensor | None = None) -> Tensor:
    """[E, out, in]: the matrices of all experts, gate and up below one another where both are asked for."""
    tensors = pack.tensors(pack.weights if flat is None else flat, row)
    parts = [torch.stack([tensors[f"{NAME}.{name}.{expert}"] for expert in range(EXPERTS)]) for name in names]
    return torch.cat(parts, 1)


def mixtral(**config: Any) -> nn.Module:
    from transformers import MixtralConfig
    from transformers.models.mixtral import modeling_mixtral as theirs

    sizes = {
        "hidden_size": WIDTH,
        "intermediate_size": HIDDEN,
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": TOP,
    }
    return theirs.MixtralSparseMoeBlock(eager(MixtralConfig(**sizes)))


def olmoe(**config: Any) -> nn.Module:
    from transformers import OlmoeConfig
    from transformers.models.olmoe import modeling_olmoe as theirs

    sizes = {"hidden_size": WIDTH, "intermediate_size": HIDDEN, "num_experts": EXPERTS, "num_experts_per_tok": TOP}
    return theirs.OlmoeSparseMoeBlock(eager(OlmoeConfig(**sizes)))


def qwen3(**config: Any) -> nn.Module:
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe import modeling_qwen3_moe as theirs

    sizes = {"hidden_size": WIDTH, "moe_intermediate_size": HIDDEN, "num_experts": EXPERTS, "num_experts_per_tok": TOP}
    return theirs.Qwen3MoeSparseMoeBlock(eager(Qwen3MoeConfig(**sizes, norm_topk_prob=False)))


def gpt_oss() -> nn.Module:
    from transformers import GptOssConfig
    from transformers.models.gpt_oss import modeling_gpt_oss as theirs

    sizes = {
        "hidden_size": WIDTH,
        "intermediate_size": HIDDEN,
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": TOP,
    }
    config = eager(GptOssConfig(**sizes))
    config.swiglu_limit, config.swiglu_alpha = 0.7, 1.702
    return theirs.GptOssMLP(config)


def deepseek_v3() -> nn.Module:
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as theirs

    sizes = {
        "hidden_size": WIDTH,
        "moe_intermediate_size": HIDDEN,
        "n_routed_experts": EXPERTS,
        "num_experts_per_tok": TOP,
    }
    sizes |= {"num_local_experts": EXPERTS, "n_group": 4, "topk_group": 2, "n_shared_experts": 1}
    return theirs.DeepseekV3MoE(eager(DeepseekV3Config(**sizes, routed_scaling_factor=2.5)))


def deepseek_v4() -> nn.Module:
    from transformers.models.deepseek_v4 import configuration_deepseek_v4
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as theirs

    config = eager(configuration_deepseek_v4.DeepseekV4Config())
    for name, value in {
        **{"hidden_size": WIDTH, "intermediate_size": HIDDEN, "moe_intermediate_size": HIDDEN, "swiglu_limit": 0.7},
        **{"num_local_experts": EXPERTS, "n_routed_experts": EXPERTS, "num_experts_per_tok": TOP, "mlp_bias": False},
        **{"mlp_layer_types": ["moe"], "routed_scaling_factor": 1.5, "scoring_func": "sqrtsoftplus"},
    }.items():
        setattr(config, name, value)
    return theirs.DeepseekV4SparseMoeBlock(config, 0)


def eager(config: Any) -> Any:
    config._experts_implementation = "eager"
    return config


def put(theirs: nn.Module, pack: Pack, row: int) -> dict[str, tuple[nn.Parameter, Callable[[Tensor], Tensor]]]:
    """Our weights in their module; their parameters by name, with what reads the same of ours from a flat array."""
    router = theirs.router if hasattr(theirs, "router") else theirs.gate
    experts, is_oss = theirs.experts, hasattr(theirs, "router")

    def plain(name: str) -> Callable[[Tensor], Tensor]:
        return lambda flat: pack.tensors(flat, row)[f"{NAME}.{name}"]

    def of_experts(*names: str) -> Callable[[Tensor], Tensor]:
        return lambda flat: stacked(pack, row, *names, flat=flat)

    def woven(flat: Tensor) -> Tensor:
        gate, up = (stacked(pack, row, name, flat=flat) for name in ("gate", "up"))
        return torch.stack([gate, up], 2).flatten(1, 2).mT

    def biases(*names: str) -> Callable[[Tensor], Tensor]:
        def read(flat: Tensor) -> Tensor:
            tensors = pack.tensors(flat, row)
            each = [torch.stack([tensors[f"{NAME}.{name}.{e}_bias"] for e in range(EXPERTS)]) for name in names]
            return torch.stack(each, 2).flatten(1)

        return read

    found = {"router": (router.weight, plain("router"))}
    if is_oss:
        found |= {"router bias": (router.bias, plain("router_bias"))}
        found |= {
            "inner": (experts.gate_up_proj, woven),
            "inner bias": (experts.gate_up_proj_bias, biases("gate", "up")),
        }
        found |= {"down": (experts.down_proj, lambda flat: stacked(pack, row, "down", flat=flat).mT)}
        found |= {"down bias": (experts.down_proj_bias, biases("down"))}
    else:
        found |= {
            "inner": (experts.gate_up_proj, of_experts("gate", "up")),
            "down": (experts.down_proj, of_experts("down")),
        }
    if hasattr(theirs, "shared_experts"):
        for name in ("gate", "up", "down"):
            found[f"shared {name}"] = getattr(theirs.shared_experts, f"{name}_proj").weight, plain(f"shared.{name}")
    with torch.no_grad():
        for parameter, ours in found.values():
            parameter.data = ours(pack.weights).clone()
    return found


@pytest.mark.parametrize(
    ("theirs", "moe", "fields"),
    [
        (mixtral, {}, {}),
        (olmoe, {"weights": "plain"}, {}),
        (qwen3, {"weights": "plain"}, {}),
        (gpt_oss, {"gate_alpha": 1.702, "up_offset": 1.0}, {"swiglu_clamp": 0.7, "biases": True}),
        (deepseek_v3, {"gate": "sigmoid", "scale": 2.5, "groups": 4, "groups_kept": 2, "shared": 1}, {}),
        (deepseek_v4, {"gate": "sqrt_softplus", "scale": 1.5, "shared": 1}, {"swiglu_clamp": 0.7}),
    ],
)
def test_a_block_of_transformers(theirs: Callable[[], nn.Module], moe: dict[str, Any], fields: dict[str, Any]) -> None:
    """What it gives to 1e-10, and the gradients of its input and of every tensor to 1e-9, in float64."""
    trial = mixed(moe, **fields)
    pack, ours = branch_of(trial)
    drawn = torch.Generator().manual_seed(2)
    x, dy = (torch.randn(2, 16, WIDTH, dtype=torch.float64, generator=drawn) for _ in range(2))
    given = x.clone().requires_grad_()
    y = ours(given)
    y.backward(dy)
    for row in range(2):
        oracle = theirs()
        parameters = put(oracle, pack, row)
        read = x[row].view(2, 8, WIDTH).clone().requires_grad_()
        with in_float64():
            told = oracle(read)
            told = (told[0] if isinstance(told, tuple) else told).view(16, WIDTH)
            told.backward(dy[row])
        torch.testing.assert_close(y[row], told, rtol=0, atol=1e-10)
        assert given.grad is not None and read.grad is not None
        torch.testing.assert_close(given.grad[row], read.grad.view(16, WIDTH), rtol=0, atol=1e-9)
        for name, (parameter, of) in parameters.items():
            assert parameter.grad is not None, name
            torch.testing.assert_close(of(pack.gradients), parameter.grad, rtol=0, atol=1e-9, msg=name)


def test_the_losses_of_a_router_are_those_of_transformers() -> None:
    """Theirs is k at balance, and ours 1; the z-loss of Switch."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func
    from transformers.models.switch_transformers.modeling_switch_transformers import router_z_loss_func

    z = torch.randn(2, 16, EXPERTS, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).requires_grad_()
    scores = z.softmax(-1)
    ours = balance_loss(scores, chosen(scores, TOP))
    theirs = torch.stack([load_balancing_loss_func((row,), EXPERTS, TOP).double() for row in z])
    torch.testing.assert_close(ours, theirs / TOP, rtol=1e-6, atol=0)
    gradients = (torch.autograd.grad(loss.sum(), z, retain_graph=True)[0] for loss in (ours, theirs / TOP))
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-9)
    told = torch.stack([router_z_loss_func(row[None]) for row in z])
    torch.testing.assert_close(router_z_loss(z), told, rtol=1e-12, atol=0)
    both = (torch.autograd.grad(loss.sum(), z, retain_graph=True)[0] for loss in (router_z_loss(z), told))
    torch.testing.assert_close(*both, rtol=1e-10, atol=1e-14)


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
    assert slots.tokens.view(4, 3).tolist() == [[0, 2, 3], [0, 1, 2], [1, 3, 3], [3, 3, 3]], "3: nobody's"
    assert slots.places.tolist() == [[3, 0, 4, 6, 1, 5]]


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
    entropy = -(shares * np.log(shares)).sum(-1).mean(1)
    assert found["router_entropy"][:, 0, 1] == pytest.approx(entropy, rel=1e-5)
    assert found["router_logit_max"][:, 0, 1] == pytest.approx(np.abs(z).max((1, 2)), rel=1e-5)
    margin = (ordered[..., TOP - 1] - ordered[..., TOP]).min(1)
    assert found["router_margin"][:, 0, 1] == pytest.approx(margin, rel=1e-4, abs=1e-7)


def test_a_router_that_sends_all_to_one_expert_is_an_alarm() -> None:
    """The detector is silent in the first thirty steps, and sounds at the third from there on."""
    own = {"steps": 40, "precision": "fp32", "detect": {"name": "expert_share"}}
    several, one = (engine.run([mixed({"top": 1, "experts": count}, **own)] * 2) for count in (8, 1))
    assert (one.signals["expert_share"] == 1).all()
    assert np.flatnonzero(one.signals["alarm_expert_share"][0]).tolist()[0] == 32
    assert not several.signals["alarm_expert_share"].any()


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
        ({}, {"parametrization": "mup"}, "model.parametrization=mup: is not known for experts and their router"),
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
