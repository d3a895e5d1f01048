"""The table of sizes: every multiplier against the papers' tables, written out, at several widths and depths."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch

from harness.config import ConfigError, Model, Optim, Trial
from harness.model.branches.attention import attention_multiplier
from harness.model.parameters import Layout
from harness.model.scaling import (
    INITS,
    branch_multiplier,
    embedding_multiplier,
    output_multiplier,
    tensor_table,
)
from harness.optim.optimizers import OPTIMIZERS
from harness.testing import engine
from harness.training.config_checks import check_trial

BASE_WIDTH, BASE_DEPTH, HEAD_DIM, VOCABULARY = 32, 4, 8, 61
RULES = ("adam", "sgd", "relative", "relative_sgd")
NAMES = {
    "embedding": "embedding",
    "positions": "embedding",
    "blocks.1.attention.query": "hidden",
    "blocks.1.attention.projection": "residual",
    "blocks.1.feedforward.up": "hidden",
    "blocks.0.feedforward.down": "residual",
    "head": "head",
    "blocks.1.attention_norm": "gain",
    "blocks.0.feedforward_norm": "gain",
    "final_norm": "final_gain",
}


def model_of(m: float = 1, depth_ratio: float = 1, **fields) -> Model:
    """A model m times as wide as the base model and `depth_ratio` times as deep."""
    shape = {"width": int(BASE_WIDTH * m), "depth": int(BASE_DEPTH * depth_ratio), "head_dim": HEAD_DIM, "context": 16}
    base = {"base_width": BASE_WIDTH, "base_depth": BASE_DEPTH, "positions": "learned"}
    return Model(**{**shape, **base, **fields})


def column(model: Model, name: str, rule: str = "adam") -> dict[str, float]:
    """One column of the table by kind of tensor; tensors of a kind have the same."""
    rows = {row.name: getattr(row, name) for row in tensor_table(model, VOCABULARY, rule)}
    found: dict[str, set[float]] = {}
    for tensor, kind in NAMES.items():
        found.setdefault(kind, set()).add(rows[tensor])
    assert all(len(values) == 1 for values in found.values()), found
    return {kind: next(iter(values)) for kind, values in found.items()}


SIZES = [(1, 1), (4, 1), (1, 8), (4, 8), (8, 4), (0.5, 0.5)]
KINDS = ("embedding", "hidden", "residual", "head", "gain", "final_gain")


def expected(values: dict[str, float]) -> dict[str, float]:
    """`hidden` also holds for the last matrices of branches; kinds that are not named have 1."""
    return {kind: values.get("hidden" if kind == "residual" else kind, 1.0) for kind in KINDS}


# --- learning rates ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
def test_standard_multiplies_nothing(rule):
    model = model_of(4, 8)
    for name in ("learning_rate", "epsilon"):
        assert set(column(model, name, rule).values()) == {1.0}
    assert {output_multiplier(model), branch_multiplier(model), embedding_multiplier(model)} == {1.0}
    assert column(model, "decay", rule) == expected({"gain": 0.0, "final_gain": 0.0})


MUP_RATES = {
    # Yang et al. 2022 (arXiv 2203.03466), table 8: what a vector, an embedding or the head gets, and a hidden matrix.
    "adam": lambda m: {"hidden": 1 / m},
    "sgd": lambda m: {"embedding": m, "head": m, "gain": m, "final_gain": m},
    # Its argument for a step of rate x RMS(W): a hidden matrix of RMS m^-1/2 may change by 1/m.
    "relative": lambda m: {"hidden": m**-0.5},
    "relative_sgd": lambda m: {"hidden": m**-0.5, "gain": m, "final_gain": m},
}
DEPTH_RATES = {
    # Dey et al. 2025 (arXiv 2505.01618), table 1; sgd also has the branch's own multiplier m_L^-alpha in its gradient.
    "adam": lambda m_l, alpha: {"hidden": m_l ** (alpha - 1), "gain": m_l ** (alpha - 1)},
    "sgd": lambda m_l, alpha: {"hidden": m_l ** (2 * alpha - 1), "gain": m_l ** (2 * alpha - 1)},
    "relative": lambda m_l, alpha: {"hidden": m_l ** (alpha - 1), "gain": m_l ** (alpha - 1)},
    "relative_sgd": lambda m_l, alpha: {"hidden": m_l ** (alpha - 1), "gain": m_l ** (2 * alpha - 1)},
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("m", "m_l"), SIZES)
def test_mup_rates(rule, m, m_l):
    found = column(model_of(m, m_l, parametrization="mup"), "learning_rate", rule)
    assert found == pytest.approx(expected(MUP_RATES[rule](m)))


@pytest.mark.parametrize("alpha", [0.5, 0.75, 1.0])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("m", "m_l"), SIZES)
def test_completep_rates(rule, m, m_l, alpha):
    found = column(model_of(m, m_l, parametrization="completep", depth_exponent=alpha), "learning_rate", rule)
    width, depth = expected(MUP_RATES[rule](m)), expected(DEPTH_RATES[rule](m_l, alpha))
    assert found == pytest.approx({kind: width[kind] * depth[kind] for kind in KINDS})


def test_completep_in_numbers():
    """Four times as wide and 16 times as deep at alpha 1/2: all columns, for Adam, and the way forward."""
    model = model_of(4, 16, parametrization="completep", depth_exponent=0.5, embedding_scale="sqrt_width")
    shown = {name: column(model, name) for name in ("learning_rate", "decay", "epsilon")}
    assert shown == {
        "learning_rate": pytest.approx(expected({"hidden": 1 / 16, "gain": 1 / 4})),
        "decay": pytest.approx(expected({"hidden": 4.0, "gain": 0.0, "final_gain": 0.0})),
        "epsilon": pytest.approx(expected({"hidden": 1 / 16, "gain": 1 / 16})),
    }
    forward = (embedding_multiplier(model), branch_multiplier(model), output_multiplier(model))
    assert forward == pytest.approx((32**0.5, 1 / 4, 1 / 4))


def test_gains_of_heads_and_single_numbers_in_sgd():
    """A vector's rate grows with its own length (microsoft/mup): heads that share a gain do not make it longer."""
    more = {"parametrization": "mup", "qk_norm": True, "qkv_norm": True, "sigma_reparam": True, "layer_scale": 0.1}

    def rates(**fields):
        table = tensor_table(model_of(4, **more, **fields), VOCABULARY, "sgd")
        return {row.name.removeprefix("blocks.1."): row.learning_rate for row in table}

    shared, own = rates(), rates(qk_norm_shared=False)
    assert (shared["attention.query_norm"], own["attention.query_norm"]) == (1, 4)
    assert shared["attention.qkv_norm"] == shared["feedforward.layer_scale"] == 4
    assert shared["attention.query_scale"] == 1
    wider_heads = rates(head_dim=16, base_head_dim=8)
    assert wider_heads["attention.key_norm"] == 2


# --- weight decay and epsilon ------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("m", "m_l"), SIZES)
def test_completep_decays_alike_at_every_width(rule, m, m_l):
    """Rate x decay is that of Adam whatever the rule, lambda m_d times rate / m_d: table 1."""
    for alpha in (0.5, 1.0):
        model = model_of(m, m_l, parametrization="completep", depth_exponent=alpha)
        rate, decay = column(model, "learning_rate", rule), column(model, "decay", rule)
        taken = {kind: rate[kind] * decay[kind] for kind in KINDS}
        assert taken == pytest.approx(expected({"hidden": m_l ** (alpha - 1), "gain": 0.0, "final_gain": 0.0}))
    if rule == "adam":
        assert decay["hidden"] == pytest.approx(m)


MUP_DECAYS = {
    # microsoft/mup's MuAdam and MuSGD, and Dey et al. 2025, table 1: the decay is divided by what multiplies the rate.
    "adam": lambda m: {"hidden": m},
    "sgd": lambda m: {"embedding": 1 / m, "head": 1 / m},
    "relative": lambda m: {"hidden": m**0.5},
    "relative_sgd": lambda m: {"hidden": m**0.5},
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("m", "m_l"), SIZES)
def test_mup_decay(rule, m, m_l):
    vectors = {"gain": 0.0, "final_gain": 0.0}
    coupled = column(model_of(m, m_l, parametrization="mup"), "decay", rule)
    assert coupled == pytest.approx(expected(MUP_DECAYS[rule](m) | vectors))
    for parametrization in ("mup", "completep"):
        plain = model_of(m, m_l, parametrization=parametrization, mup_decay="plain")
        assert column(plain, "decay", rule) == expected(vectors)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("parametrization", ["standard", "mup", "completep"])
def test_decay_that_follows_the_schedule_does_not_depend_on_the_rate(name, parametrization):
    """At the peak of its rate a trial takes lambda off every matrix, whatever the rate and its multipliers are."""
    fields = {"width": 32, "depth": 4, "base_width": 16, "parametrization": parametrization, "name": name}
    trials = [engine.trial(lr=lr, weight_decay=0.01, decay_follows="schedule", **fields) for lr in (1e-3, 0.3)]
    pack = engine.pack_of(trials)
    peaks = torch.tensor([trial.optim.lr for trial in trials], dtype=torch.float64)
    for scaled, span in zip(pack.layout.tensors, pack.layout.spans, strict=True):
        taken = pack.optimizer.decay_rate(span)[:, 0] * peaks * span.learning_rate
        assert taken.tolist() == pytest.approx([0.01 if len(scaled.shape) == 2 else 0.0] * 2)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("m", "m_l"), SIZES)
def test_epsilon(rule, m, m_l):
    """Dey et al. 2025: inside the blocks 1/m_d and m_L^-alpha, and outside as the choice has it."""
    for parametrization, alpha in (("mup", 1.0), ("completep", 0.5), ("completep", 1.0)):
        inside = (m_l**-alpha if parametrization == "completep" else 1.0) / m
        outside = {"blocks": 1.0, "gradients": 1 / m, "everywhere": inside}
        for choice, others in {**outside, "none": 1.0}.items():
            model = model_of(m, m_l, parametrization=parametrization, depth_exponent=alpha, mup_epsilon=choice)
            own = inside if choice != "none" else 1.0
            want = dict.fromkeys(KINDS, others) | dict.fromkeys(("hidden", "residual", "gain"), own)
            assert column(model, "epsilon", rule) == pytest.approx(want)
    assert model_of().mup_epsilon == "blocks", "table 1"


def test_epsilon_follows_gradients():
    """What mup_epsilon=gradients says of them is so: their size against that of the base model, tensor by tensor."""
    looked_at = ("embedding", "blocks.0.attention.query", "blocks.1.feedforward.up", "blocks.1.attention_norm", "head")
    measured = {}
    for width, depth in ((32, 2), (128, 2), (32, 16)):
        shape = {"width": width, "depth": depth, "base_width": 32, "base_depth": 2, "head_dim": 16, "vocabulary": 256}
        fields = {"parametrization": "completep", "mup_epsilon": "gradients", "context": 16, "batch": 8, **shape}
        pack = engine.pack_of([engine.trial(seed=seed, embedding_scale="sqrt_width", **fields) for seed in range(3)])
        pack.learn(pack.objective.batch(0))
        rows = [row for row in pack.layout.tensors if row.name in looked_at]
        sizes = [pack.layout.view(pack.gradients, row.name).square().mean().sqrt().item() for row in rows]
        measured[width, depth] = {row.name: (size, row.epsilon) for row, size in zip(rows, sizes, strict=True)}
    for now in ((128, 2), (32, 16)):
        for name, (size, epsilon) in measured[now].items():
            base, _ = measured[32, 2][name]
            # Widths and depths are finite: a factor of 2 beside the 4 to 8 that are at stake.
            assert 0.5 < size / base / epsilon < 2.0, (now, name)


@pytest.mark.parametrize("parametrization", ["standard", "mup", "completep"])
def test_segments_are_the_longest_runs_of_equal_multipliers(parametrization):
    layout = Layout(tuple(tensor_table(model_of(4, 16, parametrization=parametrization), VOCABULARY)))
    pieces = [{name: getattr(span, name) for name in ("learning_rate", "decay", "epsilon")} for span in layout.spans]
    for span, multipliers in zip(layout.spans, pieces, strict=True):
        (segment,) = (segment for segment in layout.segments if segment.start <= span.start < segment.stop)
        assert segment == dataclasses.replace(segment, **multipliers) and span.stop <= segment.stop
    for left, right in itertools.pairwise(layout.segments):
        assert left.stop == right.start and dataclasses.replace(left, start=right.start, stop=right.stop) != right
    assert layout.segments[0].start == 0 and layout.segments[-1].stop == layout.size


# --- on the way forward ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parametrization", ["standard", "mup", "completep"])
@pytest.mark.parametrize(("m", "m_l"), SIZES)
def test_forward_multipliers(parametrization, m, m_l):
    is_scaled, is_deep = parametrization != "standard", parametrization == "completep"
    for alpha in (0.5, 1.0):
        model = model_of(m, m_l, parametrization=parametrization, depth_exponent=alpha)
        assert output_multiplier(model) == pytest.approx(1 / m if is_scaled else 1)
        assert branch_multiplier(model) == pytest.approx(m_l**-alpha if is_deep else 1)
        assert embedding_multiplier(model) == 1
        scaled = dataclasses.replace(model, embedding_scale="sqrt_width")
        assert embedding_multiplier(scaled) == pytest.approx(math.sqrt(BASE_WIDTH * (1 if is_scaled else m)))


def test_attention_multiplier():
    """1/sqrt(d_head), and for muP proportional to 1/d_head, with the same value at the base head (appendix B.1)."""
    assert attention_multiplier(model_of(head_dim=16)) == pytest.approx(1 / 4)
    for parametrization in ("mup", "completep"):
        assert attention_multiplier(model_of(parametrization=parametrization, head_dim=16)) == pytest.approx(1 / 4)
        wide = model_of(4, parametrization=parametrization, head_dim=64, base_head_dim=16)
        assert attention_multiplier(wide) == pytest.approx(4 / 64)


def test_multipliers_reach_the_model():
    """The logits of a CompleteP model are those of the standard one with its multipliers applied by hand."""
    fields = {"width": 32, "depth": 4, "head_dim": 8, "embedding_scale": "sqrt_width", "name": "lamb"}
    pair = [engine.trial(**fields, base_width=16, parametrization=p) for p in ("completep", "standard")]
    scaled, plain = (engine.pack_of([trial] * 2) for trial in pair)
    plain.weights.copy_(scaled.weights)
    for each in plain.layout.tensors:
        tensor, factor = plain.layout.view(plain.weights, each.name), 1.0
        if each.name == "embedding":
            factor = math.sqrt(16 / 32)  # sqrt(base width) instead of sqrt(width)
        elif each.name.endswith(("projection", "down")):
            factor = 1 / 2  # m_L^-1
        elif each.name == "head":
            factor = 1 / 2  # 1/m
        tensor.mul_(factor)
    tokens = scaled.objective.batch(0)[:, :, :-1]
    with torch.no_grad():
        # The norms' epsilon is not scaled along, so the two differ by about 1e-6 of the logits.
        torch.testing.assert_close(scaled.model(tokens), plain.model(tokens), rtol=1e-4, atol=1e-5)


# --- what is refused ---------------------------------------------------------------------------------------------


def reasons(optimizer: str = "adamw", **fields) -> tuple[str, ...]:
    try:
        check_trial(Trial(Model(**fields), Optim(name=optimizer)))
    except ConfigError as error:
        return error.reasons
    return ()


@pytest.mark.parametrize(
    "fields",
    [
        {"parametrization": "completep", "placement": "deepnorm"},
        {"parametrization": "completep", "init": "scaled_residual"},
        {"placement": "deepnorm_glm", "init": "small_scaled"},
        {"placement": "deepnorm", "init": "scaled_residual"},
    ],
)
def test_two_answers_to_how_branches_shrink_with_depth(fields):
    (reason,) = reasons(**fields)
    assert all(f"model.{name}={value}" in reason for name, value in fields.items())
    assert "allowed: one of them" in reason
    for name, value in fields.items():
        assert not reasons(**{name: value})


def test_depth_and_width_go_together():
    assert not reasons(placement="deepnorm", init="small")
    assert not reasons(parametrization="mup", placement="deepnorm")
    assert not reasons(parametrization="completep", init="zero_residual")


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("init", INITS)
def test_steps_relative_to_weights_that_are_zero(optimizer, init):
    placement = "none" if init == "fixup" else "pre"
    found = reasons(optimizer, init=init, placement=placement)
    is_relative = OPTIMIZERS[optimizer].rule.startswith("relative")
    if is_relative and init in ("zero_residual", "fixup"):
        (reason,) = found
        assert f"model.init={init}" in reason and f"optim.name={optimizer}" in reason
        assert "allowed: standard, small, xavier, scaled_residual, small_scaled" in reason
    else:
        assert not found


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_steps_relative_to_a_head_that_is_zero(optimizer):
    found = reasons(optimizer, zero_head=True)
    if OPTIMIZERS[optimizer].rule.startswith("relative"):
        (reason,) = found
        assert reason.startswith("model.zero_head=true: ") and reason.endswith("allowed: false")
        assert f"optim.name={optimizer}" in reason
    else:
        assert not found


def test_reparametrised_matrices_that_are_zero():
    (reason,) = reasons(sigma_reparam=True, init="zero_residual")
    assert "model.init=zero_residual" in reason and "model.sigma_reparam=true" in reason
