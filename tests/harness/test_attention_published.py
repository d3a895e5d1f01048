"""Gates and sinks of attention against the classes of transformers whose papers or models brought them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from harness.testing import engine
from harness.testing.settings import roughen
from tests.harness.test_moe_published import in_float64
from tests.harness.variants import with_fields

WIDTH, HEAD, CONTEXT, BATCH, ROWS = 32, 8, 12, 3, 2
NAME = "blocks.0.attention"


def pack_of(**fields: Any) -> Any:
    plain = [engine.trial(seed=seed, precision="fp64", width=WIDTH, depth=1) for seed in range(ROWS)]
    shape = {"head_dim": HEAD, "context": CONTEXT, "positions": "learned", "norm": "rms"}  # nothing is turned
    pack = engine.pack_of(with_fields(plain, {**shape, **fields}))
    roughen(pack)
    return pack


def check(pack: Any, theirs: Any) -> None:
    """Our attention gives what `theirs` gives, a function of a row's weights and of x [B, T, D], and its gradient."""
    torch.manual_seed(0)
    x = torch.randn(ROWS, BATCH * CONTEXT, WIDTH, dtype=torch.float64, requires_grad=True)
    weigh = torch.randn(ROWS, BATCH * CONTEXT, WIDTH, dtype=torch.float64)
    branch, tools = pack.model._branches[0], pack.model.tools()
    found = branch(tools, NAME, x, CONTEXT)
    (found * weigh).sum().backward()
    for row in range(ROWS):
        weights = {name: w.clone().requires_grad_() for name, w in pack.tensors(pack.weights, row).items()}
        own = x.detach()[row].clone().requires_grad_()
        expected = theirs(weights, own.view(BATCH, CONTEXT, WIDTH)).reshape(-1, WIDTH)
        torch.testing.assert_close(found[row].detach(), expected.detach(), rtol=1e-10, atol=1e-10)
        (expected * weigh[row]).sum().backward()
        torch.testing.assert_close(x.grad[row], own.grad, rtol=1e-9, atol=1e-9)
        gradients = pack.tensors(pack.gradients, row)
        of_attention = [name for name in weights if name.startswith(f"{NAME}.")]
        for name in of_attention:
            torch.testing.assert_close(gradients[name], weights[name].grad, rtol=1e-9, atol=1e-9, msg=lambda m: m)
        assert len(of_attention) >= 5


def mask() -> Tensor:
    return torch.full((CONTEXT, CONTEXT), -torch.inf, dtype=torch.float64).triu(1)[None, None]


def still() -> tuple[Tensor, Tensor]:
    """Cosines and sines of a rotation that turns nothing."""
    return torch.ones(1, CONTEXT, HEAD, dtype=torch.float64), torch.zeros(1, CONTEXT, HEAD, dtype=torch.float64)


def called(module: Any, given: dict[str, Tensor], x: Tensor) -> Tensor:
    found: Tensor = torch.func.functional_call(module, given, (x, still(), mask()))[0]
    return found


def test_the_gate_is_that_of_qwen3_next() -> None:
    """Which has QK-norm too, and query and gate of a head side by side in one matrix; its norms multiply by 1 + w."""
    pytest.importorskip("transformers")
    from transformers.models.qwen3_next import modeling_qwen3_next as qwen
    from transformers.models.qwen3_next.configuration_qwen3_next import Qwen3NextConfig

    pack, heads = pack_of(attention_gate="element", qk_norm=True), WIDTH // HEAD
    config = Qwen3NextConfig(
        hidden_size=WIDTH, num_attention_heads=heads, num_key_value_heads=heads, head_dim=HEAD,
        rms_norm_eps=pack.planned[0].model.norm_epsilon, attention_bias=False,
    )  # fmt: skip
    config._attn_implementation = "eager"
    module = qwen.Qwen3NextAttention(config, 0).double()

    def theirs(w: dict[str, Tensor], x: Tensor) -> Tensor:
        both = [w[f"{NAME}.{part}"].unflatten(0, (heads, HEAD)) for part in ("query", "gate")]
        given = {"q_proj.weight": torch.cat(both, 1).flatten(0, 1)}
        matrices = {"k_proj": "key", "v_proj": "value", "o_proj": "projection"}
        given |= {f"{his}.weight": w[f"{NAME}.{mine}"] for his, mine in matrices.items()}
        given |= {f"{his}_norm.weight": w[f"{NAME}.{mine}_norm"] - 1 for his, mine in (("q", "query"), ("k", "key"))}
        return called(module, given, x)

    with in_float64():
        check(pack, theirs)


def test_the_sink_is_that_of_gpt_oss() -> None:
    pytest.importorskip("transformers")
    from transformers.models.gpt_oss import modeling_gpt_oss as oss
    from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig

    pack, heads = pack_of(attention_sink=True, biases=True), WIDTH // HEAD
    config = GptOssConfig(
        hidden_size=WIDTH, num_attention_heads=heads, num_key_value_heads=heads, head_dim=HEAD, num_hidden_layers=1,
    )  # fmt: skip
    config._attn_implementation = "eager"
    module = oss.GptOssAttention(config, 0).double()
    names = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "o_proj": "projection"}

    def theirs(w: dict[str, Tensor], x: Tensor) -> Tensor:
        given = {f"{his}.weight": w[f"{NAME}.{mine}"] for his, mine in names.items()}
        given |= {f"{his}.bias": w[f"{NAME}.{mine}_bias"] for his, mine in names.items()}
        half = tuple(x[..., : HEAD // 2] for x in still())
        found: Tensor = torch.func.functional_call(module, {**given, "sinks": w[f"{NAME}.sink"]}, (x, half, mask()))[0]
        return found

    check(pack, theirs)
