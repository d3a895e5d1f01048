"""Taps: every activation by its name, read without a trace, changed only by what a reader returns."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from harness.config import Model
from harness.model.outline import tap_shapes
from harness.model.taps import Taps
from harness.testing import engine
from tests.harness.variants import VARIANTS, with_fields

SHAPES = {
    "plain": {},
    "SwiGLU, QK-norm": {"activation": "swiglu", "qk_norm": True},
    "learned positions, fused attention": {"positions": "learned", "attention": "fused"},
    "muP": {"parametrization": "mup", "base_width": 8},
    "Mix-LN, fused attention": {"placement": "mix", "mix": 0.5, "attention": "fused", "depth": 5},
}


def forward(pack, step=0):
    batch = pack.objective.batch(step)
    with torch.no_grad():
        return pack.loss(batch)


@pytest.mark.parametrize("fields", (SHAPES | VARIANTS).values(), ids=SHAPES | VARIANTS)
def test_each_point_is_passed_once_in_the_order_of_its_name(fields):
    trials = with_fields(engine.different(3), fields)
    model, pack = trials[0].model, engine.pack_of(trials)
    seen = []
    pack.model.taps.attach("*", lambda name, x: seen.append((name, tuple(x.shape))))
    forward(pack)
    expected = tap_shapes(model, 2, 64)
    names = [name for name, _ in seen]
    if model.attention == "fused":  # scores come one sequence after the other
        assert names.count("blocks.0.attention.scores") == 2
        for name, shape in expected.items():
            expected[name] = (1, *shape[1:]) if name.endswith(".scores") else shape
    assert list(dict.fromkeys(names)) == list(expected)
    assert len(seen) == len(expected) + model.depth * (model.attention == "fused")
    assert dict(seen) == {name: (3, *shape) for name, shape in expected.items()}


def test_values_are_those_of_the_forward_pass():
    pack = engine.pack_of(engine.different(2))
    values = {}
    pack.model.taps.attach("*", lambda name, x: values.update({name: x.clone()}))
    batch = pack.objective.batch(0)
    loss = forward(pack)
    table = pack.layout.view(pack.weights, "embedding")
    for r in range(2):
        assert torch.equal(values["embedding"][r], table[r][batch[r, :, :-1].flatten()])
    block = [values[f"blocks.0.{part}"] for part in ("attention.projection", "feedforward.down", "residual")]
    torch.testing.assert_close(values["embedding"] + block[0] + block[1], block[2])
    logits = values["logits"].flatten(0, 1)
    each = torch.nn.functional.cross_entropy(logits, batch[:, :, 1:].flatten(), reduction="none")
    torch.testing.assert_close(each.view(2, -1).mean(1), loss)


def test_a_norm_behind_the_sum_is_fed_the_sum():
    """Of what a block reads and what its branch gives; what it leaves is read by the next branch as it is."""
    pack = engine.pack_of(with_fields(engine.different(2), {"placement": "deepnorm"}))
    values = {}
    pack.model.taps.attach("*", lambda name, x: values.update({name: x.clone()}))
    forward(pack)
    attention = 2 ** (2 / 4) * values["embedding"] + values["blocks.0.attention.projection"]
    torch.testing.assert_close(values["blocks.0.attention.sum"], attention)
    normed = torch.nn.functional.layer_norm(values["blocks.0.feedforward.sum"], [16], eps=1e-6)
    torch.testing.assert_close(values["blocks.0.residual"], normed)
    torch.testing.assert_close(values["head.input"], values["blocks.1.residual"])


def test_the_tap_of_a_matrix_shows_it_before_a_norm():
    """So that a fault there passes the norm, as it would in a machine."""
    names = ("attention.projection", "feedforward.up", "feedforward.down")
    fields = {"projection_norm": True, "up_norm": True, "down_norm": True}
    pack = engine.pack_of(with_fields(engine.different(2), fields))
    before = forward(pack)
    for name in names:
        pack.model.taps.attach(f"blocks.*.{name}", lambda name, x: x * 64.0)
    torch.testing.assert_close(forward(pack), before, rtol=1e-4, atol=0)


def test_scores_are_the_same_with_both_kernels():
    """And both show the future as -inf. Rounding: products of 8 numbers near one."""
    found = {"explicit": [], "fused": []}
    for kernel, parts in found.items():
        pack = engine.pack_of(engine.different(2, attention=kernel, qk_norm=True, batch=3))
        pack.model.taps.attach("blocks.0.*.scores", lambda name, x, parts=parts: parts.append(x.clone()))
        forward(pack)
    explicit, fused = (torch.cat(parts, 1) for parts in found.values())
    torch.testing.assert_close(explicit, fused, rtol=1e-5, atol=1e-6)
    future = torch.ones(8, 8, dtype=torch.bool).triu(1)
    assert torch.isinf(explicit[..., future]).all() and torch.isfinite(explicit[..., ~future]).all()


def test_the_largest_score_is_that_of_the_whole_batch():
    """Where attention is fused it is read at every tenth step."""
    signals = {}
    for kernel in ("explicit", "fused"):
        run = engine.run(engine.different(2, attention=kernel, steps=12, batch=4), block=5)
        signals[kernel] = run.signals["attention_logit_max"]
    read = ~np.isnan(signals["fused"]).any((0, 2))
    assert read.nonzero()[0].tolist() == [0, 10] and np.isfinite(signals["explicit"]).all()
    np.testing.assert_allclose(signals["fused"][:, read], signals["explicit"][:, read], rtol=1e-4)


@pytest.mark.parametrize(
    ("placement", "name"),
    [(placement, name) for placement in ("pre", "post") for name in tap_shapes(Model(placement=placement), 1, 1)],
)
def test_what_a_reader_returns_takes_effect_forward_and_backward(placement, name):
    """Scaling one trial's features, each by its own factor, changes its loss and gradients, and not the other's."""
    trials = engine.different(2, activation="swiglu", placement=placement)
    plain, changed = engine.pack_of(trials), engine.pack_of(trials)

    def scale_the_first(_, x):
        scale = torch.ones(2, x.shape[-1])
        scale[0] += torch.arange(x.shape[-1])
        return x * scale.view(2, *[1] * (x.dim() - 2), -1)

    changed.model.taps.attach(name, scale_the_first)
    losses = []
    for pack in (plain, changed):
        loss = pack.loss(pack.objective.batch(0))
        loss.sum().backward()
        losses.append(loss.detach())
    assert losses[0][0] != losses[1][0] and losses[0][1] == losses[1][1]
    assert not torch.equal(plain.gradients[0], changed.gradients[0])
    assert torch.equal(plain.gradients[1], changed.gradients[1])


def test_readers_are_called_in_order_and_each_gets_what_the_last_returned():
    taps = Taps(["a", "b"])
    calls = []
    taps.attach("a", lambda name, x: calls.append(("first", x.item())))
    taps.attach("*", lambda name, x: x + 1)
    taps.attach("a", lambda name, x: calls.append(("third", x.item())))
    assert taps("a", torch.tensor(5.0)) == 6 and taps("b", torch.tensor(1.0)) == 2
    assert calls == [("first", 5.0), ("third", 6.0)]


def test_nothing_attached_returns_the_very_tensor():
    taps = Taps(["a"])
    x = torch.ones(2)
    assert taps("a", x) is x and "a" not in taps
    detach = taps.attach("a", lambda name, x: x + 1)
    assert "a" in taps and taps("a", x) is not x
    detach()
    assert "a" not in taps and taps("a", x) is x


def test_detaching_takes_off_only_what_was_attached():
    taps = Taps(["a.x", "a.y", "b"])
    detach = taps.attach("a.*", lambda name, x: x + 1)
    taps.attach("*", lambda name, x: x * 10)
    one = torch.ones(())
    assert [taps(name, one).item() for name in taps.names] == [20, 20, 10]
    detach()
    assert [taps(name, one).item() for name in taps.names] == [10, 10, 10]


def test_a_pattern_that_matches_nothing_says_what_there_is():
    with pytest.raises(KeyError, match=r"'blocks.\*'.*embedding, logits"):
        Taps(["embedding", "logits"]).attach("blocks.*", lambda name, x: None)


def test_validation_is_not_read():
    trials = engine.different(2, steps=4, validate_every=1, validate_between=64)
    seen = []
    pack = engine.run(trials, prepare=lambda p: p.model.taps.attach("embedding", lambda name, x: seen.append(x))).pack
    assert len(seen) == 4
    forward(pack)
    assert len(seen) == 5, "and the reader is still there afterwards"


def test_muting_ends_with_an_error():
    taps = Taps(["a"])
    taps.attach("a", lambda name, x: x + 1)
    with pytest.raises(ZeroDivisionError), taps.muted():
        assert taps("a", torch.zeros(())) == 0
        raise ZeroDivisionError
    assert taps("a", torch.zeros(())) == 1


def test_telemetry_leaves_nothing_attached():
    pack = engine.run(engine.different(2)).pack
    assert not any(name in pack.model.taps for name in pack.model.taps.names)
