"""Placements: the constants of the papers, the tensors that a model then has, and faults on what a norm is fed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

import sweeps
from harness.config import Model
from harness.model.placements import PLACEMENTS, has_final_norm, placement_of
from harness.model.scaling import tensor_table
from harness.testing import engine
from injectors.value import Value
from tests.harness.variants import with_fields


def skips(**fields):
    model = Model(**fields)
    found = [[placement_of(model, block, place).skip for place in (0, 1)] for block in range(model.depth)]
    assert all(first == second for first, second in found)
    return [first for first, _ in found]


@pytest.mark.parametrize(
    ("depth", "deepnorm", "glm"),
    [
        (1, 1.1892071150, 1.4142135624),
        (8, 2.0, 4.0),
        (48, 3.1301691601, 9.7979589711),
        (70, 3.4397906283, 11.8321595662),  # GLM-130B's depth
        (1000, 6.6874030498, 44.7213595500),
    ],
)
def test_the_constants_of_deepnorm(depth, deepnorm, glm):
    """(2N)^(1/4) and (2N)^(1/2), from a calculator."""
    assert skips(placement="deepnorm", depth=depth) == pytest.approx([deepnorm] * depth, rel=1e-6)
    assert skips(placement="deepnorm_glm", depth=depth) == pytest.approx([glm] * depth, rel=1e-6)


@pytest.mark.parametrize("placement", sorted(PLACEMENTS.keys() - {"deepnorm", "deepnorm_glm"}))
def test_no_other_placement_weighs_the_stream(placement):
    assert skips(placement=placement, depth=7) == [1.0] * 7


@pytest.mark.parametrize(
    ("depth", "mix", "behind"),
    [
        (12, 0.25, 3),  # LLaMA-71M of the paper: 3 of 12
        (24, 0.25, 6),  # and LLaMA-1B: 6 of 24
        (6, 0.25, 1),  # whole blocks: the paper's floor
        (10, 0.3, 3),  # 0.3 x 10 is a little less than 3 in binary
        (100, 0.29, 29),
        (2, 0.25, 1),  # at least one, or it would be pre-LN
        (2, 0.0, 0),
        (2, 1.0, 2),
    ],
)
def test_the_blocks_of_mix_ln(depth, mix, behind):
    model = Model(placement="mix", mix=mix, depth=depth)
    placements = [placement_of(model, block, 0) for block in range(depth)]
    assert placements == [placement_of(model, block, 1) for block in range(depth)]
    assert [(p.before, p.after) for p in placements] == [(False, True)] * behind + [(True, False)] * (depth - behind)
    assert has_final_norm(model) == (behind < depth)


@pytest.mark.parametrize(
    ("fields", "inside", "final"),
    [
        ({}, {"attention_norm", "feedforward_norm"}, True),
        ({"attention_norm": False}, {"feedforward_norm"}, True),
        ({"attention_norm": False, "feedforward_norm": False}, set(), True),
        ({"placement": "post"}, {"attention_sum_norm", "feedforward_sum_norm"}, False),
        ({"placement": "hybrid"}, {"attention_sum_norm"}, True),
        ({"placement": "hybrid_star"}, {"attention_norm", "feedforward_norm"}, True),
        ({"placement": "post", "feedforward_norm": False}, {"attention_sum_norm", "feedforward_sum_norm"}, False),
        ({"placement": "branchnorm"}, {"attention_sum_norm", "feedforward_sum_norm"}, False),
        ({"placement": "deepnorm"}, {"attention_sum_norm", "feedforward_sum_norm"}, False),
        (
            {"placement": "sandwich"},
            {"attention_norm", "attention_output_norm", "feedforward_norm", "feedforward_output_norm"},
            True,
        ),
        ({"placement": "none"}, set(), False),
        ({"placement": "none", "init": "fixup"}, set(), False),
    ],
)
def test_the_norms_of_a_model(fields, inside, final):
    rows = tensor_table(Model(depth=1, **fields), 61)
    norms = {row.name for row in rows if row.name.endswith("_norm")}
    assert norms == {f"blocks.0.{name}" for name in inside} | ({"final_norm"} if final else set())


def test_fixup_has_a_number_before_each_layer_and_a_factor_for_each_branch():
    for activation, first in (("gelu", "up"), ("swiglu", "gate")):
        model = Model(depth=1, init="fixup", placement="none", activation=activation)
        rows = {row.name: row for row in tensor_table(model, 61)}
        shifts = {name for name in rows if name.endswith("_shift")}
        places = ["attention.query", "attention.projection", f"feedforward.{first}"]
        places += ["feedforward.activation", "feedforward.down"]
        assert shifts == {f"blocks.0.{place}_shift" for place in places} | {"head_shift"}
        factors = {name for name in rows if name.endswith(".multiplier")}
        assert factors == {"blocks.0.attention.multiplier", "blocks.0.feedforward.multiplier"}
        assert all((rows[name].mean, rows[name].std, rows[name].size) == (0.0, 0.0, 1) for name in shifts)
        assert all((rows[name].mean, rows[name].std, rows[name].size) == (1.0, 0.0, 1) for name in factors)


def test_fixup_starts_as_the_identity():
    """Every branch gives zero, and so does the head: the loss is that of equal probabilities."""
    trials = with_fields(engine.different(2), {"init": "fixup", "placement": "none"})
    pack = engine.pack_of(trials)
    streams = {}
    pack.model.taps.attach("*.residual", lambda name, x: streams.update({name: x.clone()}))
    pack.model.taps.attach("embedding", lambda name, x: streams.update({name: x.clone()}))
    loss = pack.loss(pack.objective.batch(0))
    assert torch.equal(streams["embedding"], streams["blocks.1.residual"])
    torch.testing.assert_close(loss.detach(), torch.full((2,), 64.0).log())


@pytest.mark.parametrize("values", [(0.5, 0.125), (1e-5, 3.0)])
def test_layer_scale_starts_at_the_value_of_its_trial(values):
    pack = engine.pack_of(with_fields(engine.different(2), {"layer_scale": values}))
    for block in range(2):
        for part in ("attention", "feedforward"):
            gains = pack.layout.view(pack.weights, f"blocks.{block}.{part}.layer_scale")
            assert torch.equal(gains, torch.tensor(values)[:, None].expand(2, 16))


# --- what a norm is fed -----------------------------------------------------------------------------------------------

ZERO_NORM_INPUT = Path(sweeps.__file__).with_name("conf") / "fault" / "zero_norm_input.yaml"


@pytest.mark.parametrize("placement", sorted(PLACEMENTS.keys() - {"none"}))
def test_a_norm_that_is_fed_zeros_gives_zeros(placement):
    """The fault finds the norm at every placement: in front of attention, or behind the sum."""
    fields = yaml.safe_load(ZERO_NORM_INPUT.read_text())
    fault = Value(start=1, **{name: value for name, value in fields.items() if name not in ("defaults", "about")})
    golden = with_fields(engine.different(2, steps=3), {"placement": placement, "mix": 0.5, "branch_steps": 1})
    seen = {}

    def watch(pack):
        pack.model.taps.attach("*", lambda name, x: seen.setdefault(name, []).append(x.clone()))

    run = engine.run([*golden, replace(golden[0], fault=fault)], prepare=watch)
    assert [len(events) for events in run.result.events] == [0, 0, 1]
    unstruck = engine.run(golden)
    assert [engine.same_bits(run[i], unstruck[i]) for i in range(2)] == [[], []]
    losses = run.signals["loss"]
    assert losses[2, 0] == losses[0, 0] and losses[2, 1] != losses[0, 1]
    if placement_of(golden[0].model, 0, 0).after:  # the sum is the stream, so nothing of the tokens is left behind it
        assert "blocks.0.attention.input" not in seen
        struck, whole = seen["blocks.0.attention.sum"][1][2], seen["blocks.0.residual"][1][2]
        assert not struck.any() and (whole == whole[0]).all()
    else:  # and here the stream passes by
        assert "blocks.0.attention.sum" not in seen
        assert not seen["blocks.0.attention.input"][1][2].any() and not seen["blocks.0.attention.query"][1][2].any()
        assert torch.equal(seen["blocks.0.feedforward.input"][1][2], seen["embedding"][1][2])
