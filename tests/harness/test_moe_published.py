"""The mixture of experts against the blocks and losses of transformers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.model.routing import ExpertSlots, balance_loss, chosen, router_z_loss
from harness.training.pack import Pack
from tests.harness.experts import EXPERTS, HIDDEN, NAME, TOP, WIDTH, branch_of, mixed

DEEPSEEK = {"shared": 1, "bias_rate": 1e-3}  # with biases as they have become


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
    if "router_bias" in (state := dict(pack.rows_state)):
        router.e_score_correction_bias = state["router_bias"][row, 0].clone()
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
        (deepseek_v3, DEEPSEEK | {"gate": "sigmoid", "scale": 2.5, "groups": 4, "groups_kept": 2}, {}),
        (deepseek_v4, DEEPSEEK | {"gate": "sqrt_softplus", "scale": 1.5}, {"swiglu_clamp": 0.7}),
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


@pytest.mark.parametrize("capacity", [0.5, 1.0, 1.25])
def test_tokens_are_dropped_as_by_switch(capacity: float) -> None:
    """Those of one sequence, by its top-1 router: the same tokens lose their expert."""
    from transformers import SwitchTransformersConfig
    from transformers.models.switch_transformers.modeling_switch_transformers import SwitchTransformersTop1Router

    z = torch.randn(1, 40, EXPERTS, generator=torch.Generator().manual_seed(4))
    slots = ExpertSlots.of(chosen(z, 1), EXPERTS, capacity)
    config = SwitchTransformersConfig(hidden_size=EXPERTS, num_experts=EXPERTS, expert_capacity=slots.room)
    router = SwitchTransformersTop1Router(config).eval()
    with torch.no_grad():
        router.classifier.weight.copy_(torch.eye(EXPERTS))
        kept, _, _ = router(z)
    assert slots.room == math.ceil(capacity * 40 / EXPERTS)
    assert torch.equal(slots.places[0] < EXPERTS * slots.room, kept[0].sum(-1) == 1)


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
