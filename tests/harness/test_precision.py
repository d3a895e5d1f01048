"""Half precision: what a CPU emulates is what torch computes in tensors of the format."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
import torch.nn.functional as F

from harness.config import ConfigError, Train
from harness.model.attention import attend
from harness.model.formats import round_to
from harness.model.layers import Leaf, linear
from harness.model.precision import Precision, pick_device, precision_of
from harness.model.taps import Taps
from harness.objectives.outcome import NON_FINITE
from harness.testing import engine

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
HELD = ("*.query", "*.key", "*.value", "*.scores", "*.projection", "*.up", "*.down", "logits")
WHOLE = ("embedding", "*.input", "*.residual")
SHAPES = {
    "explicit": {},
    "learned, swiglu, qk_norm": {"positions": "learned", "activation": "swiglu", "qk_norm": True},
    "fused": {"attention": "fused"},
}
CUDA = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"))
half = pytest.mark.parametrize("name", HALF)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def passed(precision, x, weight, dy):
    """Output, and gradients of input and weight, of one linear layer."""
    x, gradient = x.clone().requires_grad_(), torch.full_like(weight, math.nan)
    y = linear(x, Leaf(weight, gradient), precision)
    y.backward(dy.to(y.dtype))
    return {"y": y.detach().float(), "dx": x.grad, "dw": gradient}


# --- against torch's own tensors of the format ----------------------------------------------------------------------


@half
def test_single_products_are_those_of_torch_bit_for_bit(name):
    """A product of two such numbers is exact in float32, so both round once; from below the subnormals to overflow."""
    sizes = 10.0 ** torch.linspace(-9, 6, 4096).view(-1, 1, 1)
    x, weight, dy = ((sizes if seed else 1.0) * torch.randn(4096, 1, 1, generator=generator(seed)) for seed in range(3))
    emulated, real = (passed(p, x, weight, dy) for p in (Precision(torch.float32, name), Precision(HALF[name])))
    for part, values in emulated.items():
        assert torch.equal(values, real[part]), part
    assert torch.isfinite(emulated["y"]).all() == (name == "bf16") and (emulated["dw"] == 0).any() == (name == "fp16")


@half
def test_exact_sums_are_those_of_torch_bit_for_bit(name):
    """Eight products of integers up to 4 are at most 128, which both formats hold."""
    x, weight, dy = (
        torch.randint(-4, 5, shape, generator=generator(i)).float() / 2**i
        for i, shape in enumerate([(3, 8, 8), (3, 8, 8), (3, 8, 8)])
    )
    emulated, real = (passed(p, x, weight, dy) for p in (Precision(torch.float32, name), Precision(HALF[name])))
    for part, values in emulated.items():
        assert torch.equal(values, real[part]), part
    assert torch.equal(emulated["y"], torch.bmm(x, weight.mT))


def learned(precision, shape, device="cpu"):
    """Losses [R] and gradients [R, P] of a whole model's first step, and its layout."""
    pack = engine.pack_of([engine.trial(seed=r, **shape) for r in range(3)], device=torch.device(device))
    pack.model.precision = precision
    losses = pack.learn(pack.objective.batch(0))
    return losses[:3].cpu(), pack.gradients[:3].cpu(), pack.layout  # an accelerator has idle slots behind


@half
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_a_model_is_the_one_in_tensors_of_the_format(name, shape, device):
    """Sums in another order seldom round to another number: much less differs than what the format itself costs.

    How many do depends on the CPU's kernels, and is eight times as many in fp16, whose numbers are eight times as
    close. Fused kernels keep scores and shares to themselves, and their own rounding there: a few times the format's.
    """
    (loss, emulated, layout), (real_loss, real, _), (_, exact, _) = (
        learned(Precision(torch.float32, name), shape),
        learned(Precision(HALF[name]), shape, device),
        learned(Precision(torch.float32), shape),
    )
    epsilon = torch.finfo(HALF[name]).eps / 2
    torch.testing.assert_close(loss, real_loss, rtol=epsilon, atol=0)
    fused, share = shape.get("attention") == "fused", {"bf16": 0.25, "fp16": 0.5}[name]
    # Without the rounding of the gradients that reach linear layers it is 0.34 in fp16, and 0.35 of a tensor in bf16.
    assert fused or (emulated - real).norm() < 0.3 * (real - exact).norm()
    for tensor in layout.by_name:
        ours, theirs, whole = (layout.view(flat, tensor) for flat in (emulated, real, exact))
        cost, differs = (theirs - whole).norm(), (ours - theirs).norm()
        assert cost > 0, tensor
        assert differs < (8 * epsilon * theirs.norm() if fused else share * cost), tensor


# --- where values are held ------------------------------------------------------------------------------------------


@half
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_taps_see_half_precision_values_and_gradients(name, shape):
    pack = engine.pack_of([engine.trial(seed=r, precision=name, **shape) for r in range(2)])
    seen, gradients = {}, {}

    def read(tap, x):
        seen[tap] = x.detach().clone()
        if x.requires_grad:
            x.register_hook(lambda dx: gradients.update({tap: dx.clone()}))

    for pattern in (*HELD, *WHOLE):
        pack.model.taps.attach(pattern, read)
    pack.learn(pack.objective.batch(0))
    assert set(seen) == set(pack.model.taps.names)
    for tap, x in seen.items():
        is_held = not tap.endswith((".input", ".residual")) and tap != "embedding"
        assert torch.equal(round_to(x, name), x) == is_held, tap
        # The gradient of logits is the loss's own, in float32.
        if tap in gradients:
            dx = gradients[tap]
            assert torch.equal(round_to(dx, name), dx) == (is_held and tap != "logits"), tap
    assert len(gradients) >= len(seen) - 2


@half
@pytest.mark.parametrize("explicit", [True, False])
def test_attention_leaves_half_precision_values_and_gradients(name, explicit):
    qkv = torch.randn(3, 2, 2, 2, 5, 4, generator=generator()).requires_grad_()
    y = attend(*qkv.unbind(), 0.5, explicit, Precision(torch.float32, name), Taps([]), "attention")
    y.backward(torch.randn(y.shape, generator=generator(1)))
    assert torch.equal(round_to(y, name), y) and torch.equal(round_to(qkv.grad, name), qkv.grad)


@half
def test_what_is_written_at_a_tap_is_held_too(name):
    """A third is no number of the format: it enters the model as the number nearest to it."""
    trials = [engine.trial(seed=r, precision=name) for r in range(2)]

    def losses(value):
        def write(_, x):
            x.data[..., 0] = value

        pack = engine.pack_of(trials)
        for pattern in ("*.up", "*.value", "*.scores", "*.down"):
            pack.model.taps.attach(pattern, write)
        return pack.learn(pack.objective.batch(0)), pack.gradients

    third, nearest, other = 1 / 3, round_to(torch.tensor(1 / 3), name).item(), 0.25
    assert third != nearest
    for written, rounded, different in zip(losses(third), losses(nearest), losses(other), strict=True):
        assert torch.equal(written, rounded) and not torch.equal(written, different)


def test_small_gradients_underflow_and_large_ones_overflow_in_fp16():
    x, weight = torch.ones(2, 1, 1), torch.ones(2, 1, 1)
    dy = torch.tensor([1e-8, 1e5]).view(2, 1, 1)
    found = {name: passed(Precision(torch.float32, name), x, weight, dy) for name in HALF}
    for part in ("dx", "dw"):
        assert found["fp16"][part].flatten().tolist() == [0, math.inf]
        torch.testing.assert_close(found["bf16"][part], dy, rtol=2**-8, atol=0)


@pytest.mark.parametrize("name", ["fp32", "fp64"])
def test_full_precision_rounds_nothing(name):
    precision, x = precision_of(Train(precision=name), torch.device("cpu")), torch.ones(3)
    x = x.double() if name == "fp64" else x
    assert precision(x) is x and precision.rounds is None


def test_an_accelerator_has_real_half_precision():
    for name, dtype in HALF.items():
        assert precision_of(Train(precision=name), torch.device("cuda")) == Precision(dtype)
        assert precision_of(Train(precision=name), torch.device("cpu")) == Precision(torch.float32, name)


# --- norms ----------------------------------------------------------------------------------------------------------


@half
@pytest.mark.parametrize(("norm", "torch_norm"), [("layer", F.layer_norm), ("rms", F.rms_norm)])
@pytest.mark.parametrize("norms", ["fp32", "products"])
def test_what_a_norm_reads_and_leaves_is_held_where_the_configuration_says_so(name, norm, torch_norm, norms):
    """The final norm against float64: a head of unit vectors shows it in the logits, as the head has rounded it."""
    pack = engine.pack_of([engine.trial(seed=r, precision=name, norms=norms, norm=norm) for r in range(2)])
    head, gain = (pack.layout.view(pack.weights, tensor) for tensor in ("head", "final_norm"))
    head.copy_(torch.eye(64, 16).expand_as(head))
    gain.copy_(1 + torch.rand(gain.shape, generator=generator(1)))
    seen, gradients = {}, {}

    def read(tap, x):
        seen[tap] = x.detach().clone()
        x.register_hook(lambda dx: gradients.update({tap: dx.clone()}))

    pack.model.taps.attach("head.input", read)
    pack.model.taps.attach("logits", read)
    pack.learn(pack.objective.batch(0))

    differ = {}
    for kind in ("fp32", "products"):
        for r in range(2):
            x, factor = seen["head.input"][r].double(), gain[r].double()
            if kind == "products":
                x, factor = round_to(x, name), round_to(factor, name)
            y = round_to(torch_norm(x, [16], eps=1e-6) * factor, name)
            differ[kind] = (seen["logits"][r, :, :16].double() != y).float().mean()
    other = "fp32" if norms == "products" else "products"
    assert differ[norms] < 0.01 and differ[other] > 0.2, "float32 on its way may decide a tie"
    for tap, is_held in (("head.input", norms == "products"), ("logits", False)):
        assert torch.equal(round_to(gradients[tap], name), gradients[tap]) == is_held, tap


@half
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_norms_and_softmax_in_the_format_are_those_of_its_tensors(name, shape):
    softmax = shape.get("attention") != "fused"
    (loss, emulated, layout), (real_loss, real, _), (_, whole, _) = (
        learned(Precision(torch.float32, name, norms=True, softmax=softmax), shape),
        learned(Precision(HALF[name], norms=True, softmax=softmax), shape),
        learned(Precision(torch.float32, name), shape),
    )
    epsilon = torch.finfo(HALF[name]).eps / 2
    torch.testing.assert_close(loss, real_loss, rtol=2 * epsilon, atol=0)
    for tensor in layout.by_name:
        ours, theirs, without = (layout.view(flat, tensor) for flat in (emulated, real, whole))
        assert (ours - theirs).norm() < 8 * epsilon * theirs.norm(), tensor
        assert not torch.equal(ours, without), tensor


def test_a_norm_in_fp16_overflows_where_one_in_fp32_does_not():
    """A residual stream of a million is no number of fp16; a norm in float32 makes it one again."""
    outcomes = {}
    for norms in ("fp32", "products"):

        def enlarge(pack):
            pack.layout.view(pack.weights, "embedding").mul_(1e6)

        run = engine.run([engine.trial(seed=r, precision="fp16", norms=norms) for r in range(2)], prepare=enlarge)
        outcomes[norms] = [outcome == NON_FINITE for outcome in run.result.outcome]
    assert outcomes == {"fp32": [False, False], "products": [True, True]}


@half
def test_a_residual_stream_behind_norms_is_held_with_them(name):
    """Post-LN: the last norm of a block leaves the stream."""
    for norms in ("fp32", "products"):
        pack = engine.pack_of([engine.trial(seed=r, precision=name, norms=norms, placement="post") for r in range(2)])
        seen = []
        pack.model.taps.attach("blocks.0.residual", lambda _, x, seen=seen: seen.append(x.clone()))
        pack.learn(pack.objective.batch(0))
        assert seen[0].dtype == torch.float32
        assert torch.equal(round_to(seen[0], name), seen[0]) == (norms == "products")


# --- training --------------------------------------------------------------------------------------------------------


@cache
def losses(precision):
    shape = {"steps": 30, "lr": 2e-2, "batch": 8, "context": 16}
    return engine.run([engine.trial(seed=r, precision=precision, **shape) for r in range(2)], block=30).signals["loss"]


@pytest.mark.parametrize(("precision", "most"), [("bf16", 0.05), ("fp16", 0.05), ("fp8", 0.1)])
def test_it_trains_almost_as_well_as_in_full_precision(precision, most):
    """The loss falls by half a nat, and the formats differ by a fifth of that at most."""
    first, last = (losses(each)[:, [0, -1]].T for each in ("fp32", precision))
    assert (first[0] - first[1] > 0.5).all() and (last[0] - last[1] > 0.5).all()
    assert abs(first[1] - last[1]).max() < most and (first[1] != last[1]).all()


# --- devices --------------------------------------------------------------------------------------------------------


@half
def test_a_cpu_has_every_precision(name):
    assert pick_device("cpu", name) == torch.device("cpu")


def test_a_cuda_device_without_bf16_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    assert pick_device("auto", "fp16").type == "cuda"
    with pytest.raises(
        ConfigError, match="train.precision=bf16: this CUDA device lacks bf16 .*allowed: fp32, fp16, fp64"
    ):
        pick_device("auto", "bf16")
    assert pick_device("cpu", "bf16").type == "cpu"
