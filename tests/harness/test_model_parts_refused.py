"""Parts of the model that contradict each other are refused in a line that names key, value and what is allowed."""

from __future__ import annotations

from typing import Any

import pytest

from harness.config import ConfigError, shown
from harness.testing import engine
from harness.training.config_checks import check_trial
from tests.harness.variants import VARIANTS, different, with_fields

Fields = dict[str, Any]
NO_NORMS: Fields = {"init": "fixup", "placement": "none"}
REFUSED: dict[str, tuple[Fields, Fields]] = {  # settings, and each that is refused with one that the line must name
    "a clamp without a gate": ({"swiglu_clamp": 10.0}, {"swiglu_clamp": "activation=gelu"}),
    "heads of no QK-norm": ({"qk_norm_shared": False}, {"qk_norm_shared": "qk_norm"}),
    "a factor that a norm divides out": (
        {"embedding_scale": "sqrt_width", "embedding_norm": True},
        {"embedding_scale": "embedding_norm=true"},
    ),
    "two norms on one branch": (
        {"placement": "sandwich", "projection_norm": True, "down_norm": True},
        {"projection_norm": "placement=sandwich", "down_norm": "placement=sandwich"},
    ),
    "two norms on one branch of OLMo 2": (
        {"placement": "branch", "down_norm": True},
        {"down_norm": "placement=branch"},
    ),
    "a gain for each of all heads together": (
        {"qk_norm": True, "qk_norm_over": "heads", "qk_norm_shared": False},
        {"qk_norm_shared": "qk_norm_over=heads"},
    ),
    "a head that starts at zero": ({"tied_head": True, "zero_head": True}, {"zero_head": "tied_head=true"}),
    "a head of Fixup that is the embedding": ({**NO_NORMS, "tied_head": True}, {"init": "tied_head=true"}),
    "Fixup with biases": ({**NO_NORMS, "biases": True}, {"biases": "init=fixup"}),
    "dropout of shares that nobody sees": ({"dropout": 0.1, "attention": "fused"}, {"dropout": "attention=fused"}),
    "a sink that nobody sees": ({"attention_sink": True, "attention": "fused"}, {"attention_sink": "attention=fused"}),
    "Fixup with a gate": ({**NO_NORMS, "attention_gate": "head"}, {"attention_gate": "init=fixup"}),
    "norms that are not there, by depth": (
        {"depth_scaled_norms": True, "placement": "post"},
        {"depth_scaled_norms": "placement=post"},
    ),
    "Fixup with the norms of a placement": ({"init": "fixup", "placement": "pre"}, {"placement": "init=fixup"}),
    "Fixup with norms of their own": (
        {**NO_NORMS, "qk_norm": True, "embedding_norm": True},
        {"qk_norm": "init=fixup", "embedding_norm": "init=fixup"},
    ),
    "sizes that are divided out": (
        {"sigma_reparam": True, "init": "small", "parametrization": "mup"},
        {"init": "sigma_reparam=true", "parametrization": "sigma_reparam=true"},
    ),
    "DeepNorm's sizes divided out": (
        {"sigma_reparam": True, "placement": "deepnorm"},
        {"placement": "sigma_reparam=true"},
    ),
    "division by zero": ({"sigma_reparam": True, "init": "zero_residual"}, {"init": "sigma_reparam=true"}),
}
for strength in ("qk_norm", "qkv_norm", "sigma_reparam"):
    REFUSED[f"QK-Clip with {strength}"] = ({"qk_clip": 100.0, strength: True}, {"qk_clip": f"{strength}=true"})
REFUSED["QK-Clip with a cap"] = ({"qk_clip": 100.0, "attention_cap": 50.0}, {"qk_clip": "attention_cap=50.0"})
for fields in ({"attention_cap": 50.0}, {"soft_clip_high": 1.03}):
    REFUSED[f"a kernel without {next(iter(fields))}"] = (
        {"attention": "fused", **fields},
        dict.fromkeys(fields, "fused"),
    )


@pytest.mark.parametrize(("fields", "refused"), REFUSED.values(), ids=REFUSED)
def test_a_contradiction_is_refused(fields: Fields, refused: Fields) -> None:
    """A line for each: the key, its value, what it contradicts, and what is allowed."""
    trial = engine.trial(**fields)
    with pytest.raises(ConfigError) as error:
        check_trial(trial)
    for reason, (key, other) in zip(error.value.reasons, refused.items(), strict=True):
        assert reason.startswith(f"model.{key}={shown(fields[key])}") and other in reason.split("; allowed: ")[0]
        assert "; allowed: " in reason and "\n" not in reason


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_alone_is_allowed(variant):
    for trial in different(variant, 3):
        check_trial(trial)


@pytest.mark.parametrize(
    "fields",
    [
        {"qkv_norm": True, "attention_norm": False, "placement": "post"},
        {"qkv_norm": True, "qk_norm": True, "projection_norm": True, "up_norm": True, "down_norm": True},
        {"placement": "sandwich", "qk_norm": True, "up_norm": True, "embedding_norm": True, "norm": "rms"},
        {"sigma_reparam": True, "layer_scale": 0.1, "placement": "none"},
        {"placement": "branchnorm", "layer_scale": 0.1, "embedding_scale": "sqrt_width"},
    ],
)
def test_combinations_train(fields):
    trials = with_fields(engine.different(2), fields)
    for trial in trials:
        check_trial(trial)
    run = engine.run(trials)
    assert (run.signals["loss"][:, -1] < run.signals["loss"][:, 0]).all()
