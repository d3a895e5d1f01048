"""A trained trial as a GPT-2 of the library `transformers`, where its structure is one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from harness.config import ConfigError, Model, Trial, shown
from harness.model.branches.attention import attention_multiplier
from harness.model.branches.feedforward import feedforward_size
from harness.model.scaling import branch_multiplier, embedding_multiplier, output_multiplier

if TYPE_CHECKING:
    from transformers import GPT2LMHeadModel

ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_new", "relu": "relu"}  # ours -> theirs
NEEDED: Mapping[str, tuple[Any, ...]] = {  # fields of the model, and the values of them that a GPT-2 can have
    "positions": ("learned",),
    "placement": ("pre",),
    "norm": ("layer",),
    **dict.fromkeys(("attention_norm", "feedforward_norm"), (True,)),
    "activation": tuple(ACTIVATIONS),
    **dict.fromkeys(("layer_scale", "attention_temperature", "attention_cap", "soft_clip_high", "output_cap"), (None,)),
    **dict.fromkeys(("sigma_reparam", "qkv_norm", "projection_norm", "up_norm", "down_norm"), (False,)),
    **dict.fromkeys(("embedding_norm", "qk_norm", "value_norm", "depth_scaled_norms", "attention_sink"), (False,)),
    "hypersphere": (False,),
    "attention_gate": ("none",),
    "residual_streams": (1,),
}


def check_gpt2(model: Model) -> None:
    """Raises ConfigError with everything that GPT-2 has no room for, a sentence each."""
    reasons = [
        f"model.{name}={shown(getattr(model, name))}: not in a GPT-2; allowed: {', '.join(map(shown, allowed))}"
        for name, allowed in NEEDED.items()
        if getattr(model, name) not in allowed
    ]
    if model.init == "fixup":
        reasons.append("model.init=fixup: its summands are not in a GPT-2; allowed: another init")
    multipliers = (embedding_multiplier(model), branch_multiplier(model), output_multiplier(model))
    scale = attention_multiplier(model) * math.sqrt(model.head_dim)
    if any(multiplier != 1 for multiplier in (*multipliers, round(scale, 9))):
        size = f"model.parametrization={model.parametrization}, model.embedding_scale={model.embedding_scale}"
        reasons.append(f"{size}: multiplies by what a GPT-2 has not; allowed: standard, none")
    if reasons:
        raise ConfigError(*reasons)


def gpt2_of(trial: Trial, weights: Mapping[str, Tensor]) -> GPT2LMHeadModel:
    """The model of `transformers` that computes the trial's logits, in the precision of its weights, without dropout.

    `weights` are the trial's tensors by name (`analysis.load_weights`). Biases that the trial has not are zeros there.
    Raises ConfigError for a structure that is no GPT-2, and ImportError without `transformers`.
    """
    check_gpt2(trial.model)
    kinds = vars(trial.section("block"))
    if not {"attention", "feedforward"}.issuperset(kinds.values()):
        given = ", ".join(f"block.{place}={kind}" for place, kind in kinds.items())
        raise ConfigError(f"{given}: not in a GPT-2; allowed: attention, feedforward")
    from transformers import GPT2Config, GPT2LMHeadModel

    model = trial.model
    dropout = model.dropout or 0.0
    config = GPT2Config(
        vocab_size=len(weights["embedding"]),
        n_positions=model.context,
        n_embd=model.width,
        n_layer=model.depth,
        n_head=model.width // model.head_dim,
        n_inner=feedforward_size(model),
        activation_function=ACTIVATIONS[model.activation],
        layer_norm_epsilon=model.norm_epsilon,
        tie_word_embeddings=model.tied_head,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        resid_pdrop=dropout,
        bos_token_id=None,
        eos_token_id=None,
    )
    made: Any = GPT2LMHeadModel(config)
    made.to(weights["embedding"].dtype)
    made.load_state_dict(gpt2_tensors(model, weights))
    trained: GPT2LMHeadModel = made.eval()
    return trained


def gpt2_tensors(model: Model, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The trial's tensors by the names and in the shapes of `transformers`, whose matrices are [in, out]."""

    def of(name: str, like: Tensor | None = None) -> Tensor:
        return weights[name] if like is None or name in weights else torch.zeros_like(like)

    tensors = {"transformer.wte.weight": of("embedding"), "transformer.wpe.weight": of("positions")}
    norms = {"transformer.ln_f": "final_norm"}
    for i in range(model.depth):
        block, theirs = f"blocks.{i}", f"transformer.h.{i}"
        norms |= {f"{theirs}.ln_1": f"{block}.attention_norm", f"{theirs}.ln_2": f"{block}.feedforward_norm"}
        matrices = {
            f"{theirs}.attn.c_attn": [f"{block}.attention.{part}" for part in ("query", "key", "value")],
            f"{theirs}.attn.c_proj": [f"{block}.attention.projection"],
            f"{theirs}.mlp.c_fc": [f"{block}.feedforward.up"],
            f"{theirs}.mlp.c_proj": [f"{block}.feedforward.down"],
        }
        for name, parts in matrices.items():
            tensors[f"{name}.weight"] = torch.cat([of(part) for part in parts]).T.contiguous()
            tensors[f"{name}.bias"] = torch.cat([of(f"{part}_bias", of(part)[:, 0]) for part in parts])
    for name, ours in norms.items():
        tensors[f"{name}.weight"], tensors[f"{name}.bias"] = of(ours), of(f"{ours}_bias", of(ours))
    return tensors | {"lm_head.weight": of("embedding" if model.tied_head else "head")}
