"""Against independent implementations: a plain PyTorch GPT with torch's own AdamW and clipping, and torch's layers."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from harness.model.attention import attend, rotate, split_heads
from harness.model.layers import Leaf, add_positions, embedding, layer_norm, linear, silu
from harness.model.precision import Precision
from harness.model.taps import Taps
from harness.objectives.loss import cross_entropy
from harness.optim.schedules import learning_rates, rates_of
from harness.testing import engine
from tests.plain_gpt import PlainGPT, copy_weights, tensors, train_plain

STEPS = 20
TOLERANCE = 1e-9  # float64 rounds at 1e-16; Adam divides gradients by their own size, which amplifies that

SHAPES = {
    "rotary and gelu": {},
    "learned positions": {"positions": "learned"},
    "swiglu": {"activation": "swiglu", "expansion": 4},
    "qk_norm": {"qk_norm": True},
    "all at once": {"positions": "learned", "activation": "swiglu", "qk_norm": True, "feedforward": 37, "width": 24},
    "one head, odd sizes": {"width": 6, "head_dim": 6, "context": 7, "batch": 3, "vocabulary": 61, "feedforward": 5},
    "large norm epsilon": {"norm_epsilon": 0.1},
    "fused attention": {"attention": "fused"},
    "muP": {"parametrization": "mup", "base_width": 8, "base_head_dim": 4},
    "muP below its base width": {
        "parametrization": "mup",
        "base_width": 24,
        "qk_norm": True,
        "activation": "swiglu",
        "expansion": 4,
    },
    "muP with fused attention": {"parametrization": "mup", "base_width": 4, "base_head_dim": 2, "attention": "fused"},
}
TRIALS = [
    {"lr": 1e-2, "clip": 0.3, "beta2": 0.95, "weight_decay": 0.1, "decay": "cosine", "warmup": 5},
    {"lr": 3e-3, "clip": None, "beta1": 0.8, "eps": 1e-4, "decay": "linear", "warmup": 0, "final": 0.1},
    {"lr": 3e-2, "clip": 1.0, "beta2": 0.9, "eps": 1e-6, "weight_decay": 1.0, "decay": "constant", "warmup": 3},
]


def share_of_peak(step, decay, warmup, final):
    """The schedule, written once more from its description."""
    if step < warmup:
        return (step + 1) / warmup
    done = (step + 1 - warmup) / (STEPS - warmup)
    falls = {"cosine": 0.5 + 0.5 * math.cos(math.pi * done), "linear": 1.0 - done}
    return 1.0 if decay == "constant" else final + (1.0 - final) * falls[decay]


def plain_gpt(trial):
    """The plain model, and how many times its base width it has."""
    model = trial.model
    kwargs = {
        "vocabulary": trial.data.vocabulary,
        "width": model.width,
        "depth": model.depth,
        "head_dim": model.head_dim,
        "context": model.context,
        "feedforward": model.feedforward,
        "activation": model.activation,
        "positions": model.positions,
        "qk_norm": model.qk_norm,
        "norm_epsilon": model.norm_epsilon,
    }
    if model.parametrization == "standard":
        return PlainGPT(**kwargs).double(), 1.0
    wider = model.width / model.base_width
    base_head_dim = model.base_head_dim or model.head_dim
    scales = {"attention_scale": base_head_dim**0.5 / model.head_dim, "output_scale": 1 / wider}
    return PlainGPT(**kwargs, **scales).double(), wider


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_each_trial_of_a_pack_equals_a_plain_gpt(shape):
    trials = [engine.trial(seed=r, steps=STEPS, precision="fp64", **shape, **own) for r, own in enumerate(TRIALS)]
    fresh = engine.pack_of(trials)
    trained = engine.run(trials)
    clipped = 0
    for r, trial in enumerate(trials):
        optim, schedule = trial.optim, trial.schedule
        plain, wider = plain_gpt(trial)
        copy_weights(plain, fresh, r)
        losses, norms = train_plain(
            plain,
            lambda step, r=r: fresh.objective.batch(step)[r],
            STEPS,
            optim.lr,
            optim.clip,
            (optim.beta1, optim.beta2),
            optim.eps,
            optim.weight_decay,
            wider,
            lambda step, s=schedule: share_of_peak(step, s.decay, s.warmup, s.final),
            fused=False,
        )
        clipped += sum(bool(norm > (optim.clip or math.inf)) for norm in norms)
        expected = {"loss": torch.stack(losses), "grad_norm": torch.stack(norms).detach()}
        expected |= {name: weight.detach() for name, weight in tensors(plain).items()}
        found = {name: torch.from_numpy(trained.signals[name][r]) for name in ("loss", "grad_norm")}
        found |= trained.pack.tensors(trained.pack.weights, r)
        assert found.keys() == expected.keys()
        for name, values in found.items():
            torch.testing.assert_close(
                values, expected[name], rtol=0, atol=TOLERANCE, msg=lambda m, n=name: f"{n}: {m}"
            )
        moved = (trained.pack.weights[r] - fresh.weights[r]).abs().max()
        assert moved > 1e-3, "it hardly trained, so the comparison says little"
    assert clipped > STEPS / 4, "clipping was hardly needed, so the comparison says little about it"


# --- layers: values and gradients, each trial against torch's own function ------------------------------------------


def normal(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def leaf(weight):
    """Gradients are written, not accumulated, so whatever stood there before must not show."""
    return Leaf(weight, torch.full_like(weight, math.nan))


def assert_equal_to_torch(ours, theirs, x, weight=None):
    """`ours(x, leaf)` on all trials against `theirs(x[r], weight[r])` on each, values and gradients."""
    our_x = x.clone().requires_grad_(x.is_floating_point())
    own = None if weight is None else leaf(weight.clone())
    y = ours(our_x, own)
    dy = normal(*y.shape, seed=9)
    y.backward(dy)
    for r in range(len(x)):
        their_x = x[r].clone().requires_grad_(x.is_floating_point())
        their_weight = None if weight is None else weight[r].clone().requires_grad_()
        expected = theirs(their_x, their_weight)
        expected.backward(dy[r])
        torch.testing.assert_close(y[r].detach(), expected.detach(), rtol=1e-12, atol=1e-12)
        if x.is_floating_point():
            torch.testing.assert_close(our_x.grad[r], their_x.grad, rtol=1e-12, atol=1e-12)
        if weight is not None:
            torch.testing.assert_close(own.gradient[r], their_weight.grad, rtol=1e-12, atol=1e-12)


def test_linear():
    x, weight = normal(3, 10, 4), normal(3, 6, 4, seed=1)
    assert_equal_to_torch(lambda x, own: linear(x, own, Precision(torch.float64)), F.linear, x, weight)


def test_embedding():
    ids = torch.tensor([[0, 4, 4, 1], [4, 4, 4, 4], [0, 1, 2, 3]])
    root = torch.zeros((), dtype=torch.float64, requires_grad=True)
    assert_equal_to_torch(lambda x, own: embedding(root, x, own), F.embedding, ids, normal(3, 5, 2))


def test_positions():
    x, weight = normal(3, 8, 5), normal(3, 4, 5, seed=1)  # two sequences of four tokens
    ours, theirs = lambda x, own: add_positions(x, own, 4), lambda x, w: (x.view(2, 4, 5) + w).view(8, 5)
    assert_equal_to_torch(ours, theirs, x, weight)
    ours, theirs = lambda x, own: add_positions(x, own, 2), lambda x, w: (x.view(4, 2, 5) + w[:2]).view(8, 5)
    assert_equal_to_torch(ours, theirs, x, weight)  # four sequences of half the length


@pytest.mark.parametrize("heads", [(), (2,)])
def test_layer_norm(heads):
    x, weight = 3 + 2 * normal(3, 8, *heads, 5), normal(3, 5, seed=1)
    ours, theirs = lambda x, own: layer_norm(x, own, 1e-3), lambda x, w: F.layer_norm(x, [5], w, None, 1e-3)
    assert_equal_to_torch(ours, theirs, x, weight)


@pytest.mark.parametrize("size", [1.0, 1e3])
def test_silu(size):
    whole = size * normal(3, 8, 10)
    assert_equal_to_torch(lambda x, _: silu(x), lambda x, _: F.silu(x), whole)
    assert_equal_to_torch(lambda x, _: silu(x.chunk(2, -1)[1]), lambda x, _: F.silu(x[..., 5:]), whole)


def rotated(x):
    """[B, H, T, D], with sines and cosines."""
    context, head_dim = x.shape[2:]
    angles = torch.tensor(
        [[t * 10000 ** (-2 * i / head_dim) for i in range(head_dim // 2)] for t in range(context)], dtype=x.dtype
    )
    cos, sin = angles.cos(), angles.sin()
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("shape", [(2, 3, 7, 6), (1, 1, 1, 2), (3, 1, 5, 4)])
def test_rotary_positions(shape, threads):
    torch.set_num_threads(threads)
    assert_equal_to_torch(lambda x, _: rotate(x, 10000.0, torch.float64), lambda x, _: rotated(x), normal(3, *shape))


def test_heads():
    def theirs(x, _):  # trial, B sequences of T tokens, three times H heads of D features
        q, k, v = x.view(2, 5, 3, 4, 6).permute(2, 0, 3, 1, 4)
        return torch.cat((q, 2 * k, 3 * v))

    def ours(x, _):
        q, k, v = split_heads(x, context=5, heads=4)
        return torch.cat((q, 2 * k, 3 * v), 1)

    assert_equal_to_torch(ours, theirs, normal(3, 10, 72))


@pytest.mark.parametrize("explicit", [True, False])
def test_attention(explicit):
    def ours(x, _):
        return attend(*x.unbind(3), 0.3, explicit, Precision(torch.float64), Taps([]), "attention")

    def theirs(x, _):  # every token's own softmax over itself and those before it
        q, k, v = x.unbind(2)
        rows = []
        for t in range(q.shape[2]):
            weights = torch.softmax(0.3 * torch.einsum("bhd,bhsd->bhs", q[:, :, t], k[:, :, : t + 1]), -1)
            rows.append(torch.einsum("bhs,bhsd->bhd", weights, v[:, :, : t + 1]))
        return torch.stack(rows, 1)

    assert_equal_to_torch(ours, theirs, normal(3, 2, 4, 3, 5, 6))


@pytest.mark.parametrize("size", [1.0, 1e4])
def test_loss(size):
    logits = (size * normal(3, 6, 5)).requires_grad_()
    targets = torch.tensor([[0, 1, 2, 3, 4, 0], [4, 4, 4, 4, 4, 4], [0, 0, 1, 1, 2, 2]])
    loss = cross_entropy(logits, targets, torch.zeros(len(logits), dtype=logits.dtype))
    weights = torch.tensor([1.0, 2.0, -3.0], dtype=torch.float64)
    loss.backward(weights)
    for r in range(3):
        theirs = logits[r].detach().requires_grad_()
        expected = F.cross_entropy(theirs, targets[r])
        expected.backward(weights[r])
        torch.testing.assert_close(loss[r].detach(), expected.detach(), rtol=1e-14, atol=1e-14)
        torch.testing.assert_close(logits.grad[r], theirs.grad, rtol=1e-14, atol=1e-14)


# --- schedules at their knots ---------------------------------------------------------------------------------------

KNOTS = [
    # warmup, decay, final -> {step: share of the peak}, in 12 steps
    ((4, "cosine", 0.0), {0: 0.25, 2: 0.75, 3: 1.0, 7: 0.5, 11: 0.0}),
    ((4, "cosine", 0.2), {0: 0.25, 3: 1.0, 5: 0.2 + 0.8 * (2 + 2**0.5) / 4, 7: 0.6, 11: 0.2}),
    ((4, "linear", 0.0), {0: 0.25, 3: 1.0, 4: 0.875, 7: 0.5, 10: 0.125, 11: 0.0}),
    ((4, "linear", 0.5), {3: 1.0, 7: 0.75, 11: 0.5}),
    ((4, "constant", 0.0), {0: 0.25, 3: 1.0, 4: 1.0, 11: 1.0}),
    ((0, "linear", 0.0), {0: 11 / 12, 5: 0.5, 11: 0.0}),
    ((0, "constant", 0.3), {0: 1.0, 11: 1.0}),
    ((12, "cosine", 0.0), {0: 1 / 12, 5: 0.5, 11: 1.0}),
    ((1, "cosine", 1.0), {0: 1.0, 6: 1.0, 11: 1.0}),
]


@pytest.mark.parametrize(("schedule", "knots"), KNOTS)
def test_schedule_at_its_knots(schedule, knots):
    warmup, decay, final = schedule
    trial = engine.trial(steps=12, warmup=warmup, decay=decay, final=final, lr=2.0)
    for step, share in knots.items():
        assert rates_of(trial)[step] == pytest.approx(2.0 * share, abs=1e-15)


def test_rates_of_a_pack_are_those_of_its_trials():
    trials = engine.different(5, steps=12)
    rates = learning_rates(trials, torch.float64)
    assert rates.shape == (12, 5)
    assert rates.tolist() == [[rates_of(trial)[step] for trial in trials] for step in range(12)]
