"""Parts of the model that contradict each other are refused in a line that names key, value and what is allowed."""

from __future__ import annotations

import pytest

from harness.config import ConfigError
from harness.training.contradictions import check_trial
from tests.harness import engine
from tests.harness.variants import VARIANTS, different, with_fields

REFUSED = {
    "a clamp without a gate": ({"swiglu_clamp": 10.0}, ["model.swiglu_clamp=10.0: model.activation=gelu has no gate"]),
    "heads of no QK-norm": ({"qk_norm_shared": False}, ["model.qk_norm_shared=false: there is no model.qk_norm"]),
    "a factor that a norm divides out": (
        {"embedding_scale": "sqrt_width", "embedding_norm": True},
        ["model.embedding_scale=sqrt_width: model.embedding_norm=true divides it out"],
    ),
    "two norms on one branch": (
        {"placement": "sandwich", "projection_norm": True, "down_norm": True},
        [
            "model.projection_norm=true: model.placement=sandwich has a norm there already",
            "model.down_norm=true: model.placement=sandwich has a norm there already",
        ],
    ),
    "two norms on one branch of OLMo 2": (
        {"placement": "branch", "down_norm": True},
        ["model.down_norm=true: model.placement=branch has a norm there already"],
    ),
    "a gain for each of all heads together": (
        {"qk_norm": True, "qk_norm_over": "heads", "qk_norm_shared": False},
        ["model.qk_norm_shared=false: model.qk_norm_over=heads has a gain for each feature already"],
    ),
    "a head that starts at zero, and is the embedding": (
        {"tied_head": True, "zero_head": True},
        ["model.zero_head=true: starts the head at zero, which is the embedding with model.tied_head=true"],
    ),
    "a head of Fixup that is the embedding": (
        {"tied_head": True, "init": "fixup", "placement": "none"},
        ["model.init=fixup: starts the head at zero, which is the embedding with model.tied_head=true"],
    ),
    "Fixup with biases": (
        {"biases": True, "init": "fixup", "placement": "none"},
        ["model.biases=true: model.init=fixup has summands of its own"],
    ),
    "dropout of shares that nobody sees": (
        {"dropout": 0.1, "attention": "fused"},
        ["model.dropout=0.1: model.attention=fused keeps no logits"],
    ),
    "Fixup with the norms of a placement": (
        {"init": "fixup"},
        ["model.placement=pre: model.init=fixup goes without norms; allowed: none"],
    ),
    "Fixup with norms of their own": (
        {"init": "fixup", "placement": "none", "qk_norm": True, "embedding_norm": True},
        ["model.qk_norm=true: model.init=fixup goes", "model.embedding_norm=true: model.init=fixup goes"],
    ),
    "sizes that are divided out": (
        {"sigma_reparam": True, "init": "small", "parametrization": "mup"},
        [
            "model.init=small: model.sigma_reparam=true divides out the size of hidden matrices; allowed: standard",
            "model.parametrization=mup: model.sigma_reparam=true divides out",
        ],
    ),
    "DeepNorm's sizes divided out": (
        {"sigma_reparam": True, "placement": "deepnorm"},
        ["model.placement=deepnorm: model.sigma_reparam=true divides out"],
    ),
    "division by zero": ({"sigma_reparam": True, "init": "zero_residual"}, ["model.init=zero_residual: starts"]),
}


@pytest.mark.parametrize(("fields", "beginnings"), REFUSED.values(), ids=REFUSED)
def test_a_contradiction_is_refused(fields, beginnings):
    (trial,) = with_fields([engine.trial()], fields)
    with pytest.raises(ConfigError) as error:
        check_trial(trial)
    assert len(error.value.reasons) == len(beginnings)
    for reason, beginning in zip(error.value.reasons, beginnings, strict=True):
        assert reason.startswith(beginning) and "; allowed: " in reason and "\n" not in reason


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
