"""Variants of the model's structure, for tests that hold for each of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from harness.config import Trial
from harness.testing import engine

# Fields of `model`; a tuple holds a value for each trial, in turn.
VARIANTS: dict[str, dict[str, Any]] = {
    "post-LN": {"placement": "post"},
    "DeepNorm": {"placement": "deepnorm"},
    "DeepNorm of GLM": {"placement": "deepnorm_glm"},
    "Mix-LN": {"placement": "mix", "mix": 0.5},
    "BranchNorm": {"placement": "branchnorm", "branch_steps": (4, 7, 1)},
    "sandwich": {"placement": "sandwich"},
    "norm on branches alone": {"placement": "sandwich", "attention_norm": False, "feedforward_norm": False},
    "no norms": {"placement": "none"},
    "RMSNorm": {"norm": "rms"},
    "RMSNorm, post-LN, QK-norm": {"norm": "rms", "placement": "post", "qk_norm": True},
    "QKV norm": {"qkv_norm": True, "attention_norm": False},
    "QKV norm, RMSNorm": {"qkv_norm": True, "norm": "rms"},
    "QK-norm per head": {"qk_norm": True, "qk_norm_shared": False},
    "QK-norm per head, RMSNorm": {"qk_norm": True, "qk_norm_shared": False, "norm": "rms"},
    "projection norm": {"projection_norm": True},
    "up norm": {"up_norm": True},
    "up norm, SwiGLU": {"up_norm": True, "activation": "swiglu", "expansion": 4},
    "down norm": {"down_norm": True},
    "QK FC norm": {"qk_norm": True, "projection_norm": True, "down_norm": True},
    "embedding norm": {"embedding_norm": True, "positions": "learned"},
    "scaled embedding": {"embedding_scale": "sqrt_width", "positions": "learned"},
    "LayerScale": {"layer_scale": (0.5, 0.1, 1e-3)},
    "LayerScale, sandwich": {"layer_scale": (0.5, 0.1, 1e-3), "placement": "sandwich"},
    "sigma-reparametrisation": {"sigma_reparam": True},
    "sigma-reparametrisation, SwiGLU": {
        "sigma_reparam": True,
        "activation": "swiglu",
        "expansion": 4,
        "placement": "post",
    },
    "Fixup": {"init": "fixup", "placement": "none"},
    "Fixup, SwiGLU": {
        "init": "fixup",
        "placement": "none",
        "activation": "swiglu",
        "expansion": 4,
        "swiglu_clamp": (0.5, 1.0, 2.0),
    },
    "ReLU": {"activation": "relu"},
    "tanh GELU": {"activation": "gelu_tanh"},
    "GPT-2": {
        "biases": True,
        "tied_head": True,
        "activation": "gelu_tanh",
        "positions": "learned",
        "init": "gpt2",
        "norm_epsilon": 1e-5,
    },
    "tied head, scaled embedding": {"tied_head": True, "embedding_scale": "sqrt_width"},
    "biases, SwiGLU, QK-norm per head": {
        "biases": True,
        "activation": "swiglu",
        "expansion": 4,
        "qk_norm": True,
        "qk_norm_shared": False,
        "embedding_norm": True,
    },
    "biases, QKV norm, sandwich": {"biases": True, "qkv_norm": True, "placement": "sandwich", "up_norm": True},
    "biases, RMSNorm, sigma": {"biases": True, "norm": "rms", "sigma_reparam": True},
    "OLMo 2": {
        "placement": "branch",
        "norm": "rms",
        "qk_norm": True,
        "qk_norm_over": "heads",
        "rotary_base": 500.0,
        "init": "normal",
    },
    "QK-norm over all heads, biases": {"qk_norm": True, "qk_norm_over": "heads", "biases": True},
    "dropout": {"dropout": (0.1, 0.0, 0.4)},
    "dropout, post-LN": {"dropout": (0.1, 0.0, 0.4), "placement": "post", "positions": "learned"},
    "Dynamic Tanh": {"norm": "dyt", "dyt_alpha": (0.5, 0.2, 1.0)},
    "Dynamic Tanh, post-LN, biases, QK-norm": {
        "norm": "dyt",
        "placement": "post",
        "biases": True,
        "qk_norm": True,
        "dyt_alpha": (0.5, 0.2, 1.0),
    },
    "LayerNorm scaling": {"depth_scaled_norms": True},
    "LayerNorm scaling, sandwich": {"depth_scaled_norms": True, "placement": "sandwich"},
    "HybridNorm": {"placement": "hybrid", "norm": "rms", "qk_norm": True, "value_norm": True},
    "HybridNorm*": {"placement": "hybrid_star", "qk_norm": True, "value_norm": True, "biases": True},
    "gated attention": {"attention_gate": "element"},
    "gated attention, a gate for each head": {"attention_gate": "head", "biases": True},
    "attention sinks": {"attention_sink": True},
    "attention sinks, dropout, QK-norm": {"attention_sink": True, "dropout": (0.1, 0.0, 0.4), "qk_norm": True},
    "nGPT": {"hypersphere": True, "placement": "none", "activation": "swiglu", "expansion": 4},
    "nGPT, GELU, tied head": {"hypersphere": True, "placement": "none", "tied_head": True},
    "hyper-connections": {"residual_streams": 3, "stream_mixing": "free", "stream_gate": (0.01, 1.0, 0.3)},
    "hyper-connections, RMSNorm": {"residual_streams": 2, "stream_mixing": "free", "norm": "rms"},
    "manifold-constrained hyper-connections": {"residual_streams": 4, "stream_gate": (0.01, 1.0, 0.3)},
    "manifold-constrained hyper-connections, biases": {"residual_streams": 2, "biases": True, "norm": "rms"},
    "SwiGLU clamp": {"activation": "swiglu", "expansion": 4, "swiglu_clamp": (0.5, 1.0, 2.0)},
}


def with_fields(trials: list[Trial], fields: dict[str, Any]) -> list[Trial]:
    """The trials with these fields of their models."""
    return [replace(trial, model=replace(trial.model, **engine.in_turn(fields, r))) for r, trial in enumerate(trials)]


def different(variant: str, count: int, **fields: Any) -> list[Trial]:
    """Trials of a variant that differ in every per-trial field."""
    return with_fields(engine.different(count, **fields), VARIANTS[variant])
