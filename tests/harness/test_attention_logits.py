"""What holds attention logits back: temperature, soft cap, clipped softmax, and the format of the softmax."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from harness.config import ConfigError, Model, Train
from harness.model.attention import Limits, attend
from harness.model.formats import round_to
from harness.model.precision import Precision, precision_of
from harness.model.taps import Taps
from harness.objectives.outcome import NON_FINITE
from harness.testing import engine
from harness.training.config_checks import check_trial
from injectors.value import Value
from tests.harness.features import LOGITS

SCALE, CPU = 0.3, torch.device("cpu")
BETA, CAP = [0.5, 1.0, 2.0], [0.7, 5.0, 50.0]
ZETA, GAMMA = [1.03, 1.5, 1.0], [-0.03, -0.2, 0.0]
STRENGTHS = {
    "temperature": {"temperature": BETA},
    "cap": {"cap": CAP},
    "clip": {"clip_high": ZETA, "clip_low": GAMMA},
    "all": {"temperature": BETA, "cap": CAP, "clip_high": ZETA, "clip_low": GAMMA},
}


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def limits(strengths, dtype=torch.float64):
    parts = {name: torch.tensor(x, dtype=dtype).view(-1, 1, 1, 1, 1) for name, x in strengths.items()}
    clip = (parts["clip_high"], parts["clip_low"]) if "clip_high" in parts else None
    return Limits(parts.get("temperature"), parts.get("cap"), clip)


# --- against the formulas, in float64 -------------------------------------------------------------------------------


def plain(q, k, v, beta=1.0, cap=None, high=1.0, low=0.0):
    """One trial's [B, H, T, D], a query at a time, so that nothing needs a mask. Returns [B, T, H, D] and shares."""
    rows, shares = [], []
    for t in range(q.shape[2]):
        logits = beta * SCALE * torch.einsum("bhd,bhsd->bhs", q[:, :, t], k[:, :, : t + 1])
        if cap is not None:
            logits = cap * torch.tanh(logits / cap)
        exponentials = logits.exp()
        p = exponentials / exponentials.sum(-1, keepdim=True)
        shares.append(((high - low) * p + low).clamp(0.0, 1.0))
        rows.append(torch.einsum("bhs,bhsd->bhd", shares[-1], v[:, :, : t + 1]))
    return torch.stack(rows, 1), shares


def of_trial(strengths, r):
    names = {"temperature": "beta", "cap": "cap", "clip_high": "high", "clip_low": "low"}
    return {names[name]: values[r] for name, values in strengths.items()}


@pytest.mark.parametrize("size", [1.0, 5.0])
@pytest.mark.parametrize(
    ("strengths", "explicit"), [*((s, True) for s in STRENGTHS.values()), (STRENGTHS["temperature"], False)]
)
def test_values_and_gradients_are_those_of_the_formula(strengths, explicit, size):
    qkv = (size * normal(3, 3, 2, 4, 5, 6)).requires_grad_()  # q, k and v of three trials
    y = attend(*qkv.unbind(), SCALE, explicit, Precision(torch.float64), Taps([]), "attention", limits(strengths))
    dy = normal(*y.shape, seed=1)
    y.backward(dy)
    clipped = 0
    for r in range(3):
        own = qkv[:, r].detach().requires_grad_()
        expected, shares = plain(*own, **of_trial(strengths, r))
        expected.backward(dy[r])
        torch.testing.assert_close(y[r].detach(), expected.detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(qkv.grad[:, r], own.grad, rtol=1e-11, atol=1e-12)
        clipped += sum(int((p == 0).sum()) for p in shares)
    assert (clipped > 10) == ("clip_high" in strengths)


def test_logits_stay_within_the_cap():
    """And masked ones stay masked: a cap that came after the mask would let the future in."""
    seen = []
    taps = Taps(["attention.scores"])
    taps.attach("*", lambda name, x: seen.append(x.clone()))
    q, k, v = 100 * normal(3, 3, 2, 4, 5, 6, dtype=torch.float32)
    attend(q, k, v, SCALE, True, Precision(torch.float32), taps, "attention", limits({"cap": CAP}, torch.float32))
    (scores,) = seen
    future = torch.ones(5, 5, dtype=torch.bool).triu(1)
    assert (scores[..., future] == -math.inf).all()
    largest = scores[..., ~future].abs().flatten(1).amax(1)
    assert (largest <= torch.tensor(CAP)).all() and (largest > 0.99 * torch.tensor(CAP)).all()


def test_what_a_tap_shows_is_what_the_softmax_reads():
    """And what is written there is read: all of the attention of each token on the first one."""
    q, k, v = normal(3, 3, 2, 4, 5, 6)
    for write in (False, True):
        seen, taps = [], Taps(["attention.scores"])

        def reader(_, x, seen=seen, write=write):
            if write:
                x.data[..., 0] = 1e4
            seen.append(x.clone())

        taps.attach("*", reader)
        y = attend(q, k, v, SCALE, True, Precision(torch.float64), taps, "attention", limits(STRENGTHS["all"]))
        zeta, gamma = limits(STRENGTHS["all"]).clip
        shares = (zeta - gamma) * torch.softmax(seen[0], -1) + gamma
        torch.testing.assert_close(y, torch.matmul(shares.clamp(0, 1), v).transpose(2, 3))
        first = v[:, :, :, :1].transpose(2, 3).expand_as(y)
        assert torch.allclose(y, first) == write


def test_a_clipped_softmax_keeps_the_future_out():
    """Values of the future are NaN; a share of exactly 0 does not save from that, so they are large instead."""
    q, k, v = normal(3, 3, 2, 4, 5, 6)
    strength = limits({"clip_high": [1.0, 1.5, 3.0], "clip_low": [0.0, -0.1, 0.0]})
    before = attend(q, k, v, SCALE, True, Precision(torch.float64), Taps([]), "attention", strength)
    v[:, :, :, 3:] = 1e30
    after = attend(q, k, v, SCALE, True, Precision(torch.float64), Taps([]), "attention", strength)
    assert torch.equal(before[:, :, :3], after[:, :, :3]) and not torch.allclose(before, after)


# --- strengths that mean nothing ------------------------------------------------------------------------------------


def test_a_cap_far_away_changes_next_to_nothing():
    """c tanh(x / c) = x - x^3 / 3c^2 + ..."""
    q, k, v = normal(3, 3, 2, 4, 5, 6)
    far, near, none = (
        attend(q, k, v, SCALE, True, Precision(torch.float64), Taps([]), "attention", limits(strengths))
        for strengths in ({"cap": [1e6] * 3}, {"cap": [1.0] * 3}, {})
    )
    torch.testing.assert_close(far, none, rtol=1e-9, atol=1e-10)
    assert not torch.allclose(near, none, atol=1e-2)


# --- the softmax in half precision ----------------------------------------------------------------------------------


HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


def shares_and_gradient(scores, dshares, precision):
    """Of attention whose values are the unit vectors, so that it gives its shares; scores come in through the tap."""
    trials, context = scores.shape[0], scores.shape[-1]
    taps = Taps(["attention.scores"])
    taps.attach("*", lambda name, x: scores.to(x.dtype))
    q = torch.zeros(trials, 1, 1, context, context)
    v = torch.eye(context).expand_as(q)
    y = attend(q, q, v, 1.0, True, precision, taps, "attention")[:, 0, :, 0]
    y.backward(dshares.to(y.dtype))
    return y.detach().float(), scores.grad


@pytest.mark.parametrize("name", HALF)
def test_each_step_of_a_softmax_in_half_precision_is_rounded(name):
    scores = (4 * normal(3, 1, 1, 40, 40, dtype=torch.float32)).to(HALF[name]).float().requires_grad_()
    dshares = normal(3, 40, 40, seed=1, dtype=torch.float32).to(HALF[name]).float()
    shares, gradient = shares_and_gradient(scores, dshares, Precision(torch.float32, name, softmax=True))

    s, ds = scores.detach()[:, 0, 0].double(), dshares.double()

    def held(x):
        return round_to(x, name)

    powers = held(held(s - s.amax(-1, keepdim=True)).exp())
    expected = held(powers / held(powers.sum(-1, keepdim=True)))
    assert torch.equal(shares.double(), expected)
    mean = held(held(ds * expected).sum(-1, keepdim=True))
    torch.testing.assert_close(gradient[:, 0, 0].double(), held(expected * held(ds - mean)))

    epsilon = torch.finfo(HALF[name]).eps / 2
    exact = torch.softmax(s, -1)
    off = (expected.sum(-1) - 1).abs()
    assert off.max() > epsilon, "shares no longer add up to one"
    # The difference to the maximum is below 32, and its rounding error comes out as a factor; three more follow.
    assert ((expected - exact).abs() <= (32 + 3) * epsilon * exact + 2 * torch.finfo(HALF[name]).tiny).all()


@pytest.mark.parametrize("name", HALF)
def test_rounded_steps_are_those_of_torch_tensors(name):
    """Sums in another order seldom round to another number."""
    scores = (2 * normal(3, 1, 1, 40, 40, dtype=torch.float32)).to(HALF[name])
    dshares = normal(3, 40, 40, seed=1, dtype=torch.float32).to(HALF[name])
    found = {}
    for kind, precision in (
        ("emulated", Precision(torch.float32, name, softmax=True)),
        ("real", Precision(HALF[name], softmax=True)),
    ):
        own = scores.float().requires_grad_()
        found[kind] = shares_and_gradient(own, dshares.float(), precision)
    for emulated, real in zip(*found.values(), strict=True):
        assert (emulated != real).float().mean() < 0.02
        torch.testing.assert_close(emulated, real, rtol=4 * torch.finfo(HALF[name]).eps, atol=1e-3)


@pytest.mark.parametrize("name", HALF)
def test_the_format_of_the_softmax_changes_shares(name):
    runs = [
        engine.run([engine.trial(seed=r, precision=name, softmax=s) for r in range(2)]) for s in ("fp32", "products")
    ]
    for i in range(2):
        assert "weights" in engine.same_bits(*(run[i] for run in runs))
    losses = [run.signals["loss"] for run in runs]
    np.testing.assert_allclose(*losses, rtol=8 * torch.finfo(HALF[name]).eps)


def test_what_the_fields_mean_on_each_device():
    for device, products in (("cpu", torch.float32), ("cuda", torch.bfloat16)):
        found = precision_of(Train(precision="bf16", softmax="products", norms="products"), torch.device(device))
        assert (found.products, found.softmax, found.norms) == (products, True, True)
        assert not precision_of(Train(precision="bf16"), torch.device(device)).softmax
    assert not precision_of(Train(precision="fp32", softmax="products", norms="products"), CPU).softmax


# --- faults ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [fields for name, fields in LOGITS.items() if "fused" not in name])
def test_a_fault_at_the_scores_acts(fields):
    """The score of a query for its own key, lifted above all others."""
    trials = engine.different(3, **fields)
    golden = engine.run(trials)
    struck = {"site": "activation", "model": "set", "value": 1e4, "tensor": "blocks.1.attention.scores", "element": 9}
    trials[1] = replace(trials[1], fault=Value(start=3, **struck))
    faulty = engine.run(trials)
    (event,) = faulty.result.events[1]
    assert event.changed and float(event.after) >= 9984
    assert faulty.signals["attention_logit_max"][1, 3, 1] == float(event.after)
    for name in ("loss", "grad_norm"):
        same = faulty.signals[name] == golden.signals[name]
        assert same[[0, 2]].all() and same[1, :3].all() and not same[1, 3]


# --- training -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", LOGITS.values(), ids=LOGITS)
def test_it_trains(fields):
    """30 steps: the loss falls by a third of a nat, and the strength of each trial is its own."""
    trials = [engine.trial(lr=1e-2, **engine.in_turn(fields, r), steps=30, batch=8, context=16) for r in range(3)]
    run = engine.run(trials)
    losses = run.signals["loss"]
    assert NON_FINITE not in run.result.outcome and (losses[:, 0] - losses[:, -1] > 1 / 3).all()
    differ = len(set(losses[:, 5].tolist()))
    assert differ == (3 if any(isinstance(values, tuple) for values in fields.values()) else 1)


# --- what cannot be had together ------------------------------------------------------------------------------------


def test_scores_that_the_model_works_on_are_explicit():
    assert not Model(context=512).explicit_attention and not Model(context=512, attention_temperature=0.5).reads_scores
    assert Model(context=512, attention_cap=50.0).explicit_attention
    assert Model(context=512, soft_clip_high=1.0).explicit_attention


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"attention": "fused", "softmax": "products"}, "train.softmax=products: .*fused.*allowed: fp32, or"),
        (
            {"context": 512, "softmax": "products"},
            "train.softmax=products: .*allowed: fp32, or model.attention=explicit",
        ),
    ],
)
def test_a_fused_kernel_has_no_room_for_it(fields, reason):
    with pytest.raises(ConfigError, match=reason) as caught:
        check_trial(engine.trial(**fields))
    assert len(caught.value.reasons) == 1


def test_a_temperature_needs_no_scores():
    check_trial(engine.trial(attention="fused", attention_temperature=0.5))
    check_trial(engine.trial(attention="explicit", attention_cap=50.0, soft_clip_high=1.03, softmax="products"))
