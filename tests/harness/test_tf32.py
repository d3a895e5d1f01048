"""TF32: products read 10 bits of mantissa, and nothing else differs from float32."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from harness.basics import devices
from harness.config import ConfigError, Train
from harness.model.attention import attend
from harness.model.determinism import make_deterministic, settings_kept
from harness.model.formats import round_to_tf32
from harness.model.layers import Leaf, linear
from harness.model.precision import Precision, pick_device, precision_of
from harness.model.products import differentiable_product, product
from harness.model.taps import Taps
from harness.testing import engine

TF32 = Precision(torch.float32, tf32=True)
MATMUL = torch.backends.cuda.matmul
DEVICE = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"))


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# --- rounding --------------------------------------------------------------------------------------------------------


def by_definition(x: np.ndarray) -> np.ndarray:
    """To nearest, ties to even, in float64: a multiple of the spacing of 10 bits of mantissa, which is exact there."""
    exponent = np.maximum(np.frexp(np.abs(x, dtype=np.float64))[1] - 1, -126)
    spacing = np.exp2(exponent - 10.0)
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = np.rint(x.astype(np.float64) / spacing) * spacing  # rint takes ties to even
        return np.where(np.isfinite(x), rounded, x).astype(np.float32)


def test_rounding_is_the_definitions_on_every_kind_of_word() -> None:
    """Random words are of every size and sign, subnormal, infinite and NaN; the rest are ties and their neighbours."""
    draw = np.random.default_rng(0)
    words = draw.integers(0, 1 << 32, 1 << 20, dtype=np.uint64)
    ties = (words[: 1 << 16] & ~np.uint64(0x1FFF)) | np.uint64(0x1000)
    ends = np.array([0, 1, 0xFFF, 0x1000, 0x1001, 0x7FFFFF, 0x800000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FFFFFFF])
    words = np.concatenate([words, ties - 1, ties, ties + 1, ends, ends + (1 << 31)]).astype(np.uint32)
    x, rounded = words.view(np.float32), round_to_tf32(torch.from_numpy(words.view(np.float32))).numpy()
    wanted = by_definition(x)
    assert (np.isnan(rounded) == np.isnan(x)).all() and np.isnan(x).any()
    there = ~np.isnan(x)
    assert (rounded.view(np.uint32)[there] == wanted.view(np.uint32)[there]).all()
    assert not (rounded.view(np.uint32)[there] & 0x1FFF).any()


def test_rounding_leaves_its_argument_and_its_layout() -> None:
    x = numbers(3, 5, 7)
    before = x.clone()
    assert torch.equal(round_to_tf32(x.mT), round_to_tf32(x).mT) and torch.equal(x, before)
    assert round_to_tf32(x[:, :, 1:3]).shape == (3, 5, 2)
    once = round_to_tf32(x)
    assert not torch.equal(once, x) and torch.equal(round_to_tf32(once), once)


# --- products --------------------------------------------------------------------------------------------------------


def test_products_read_rounded_factors_and_leave_float32() -> None:
    a, b = numbers(3, 16, 32), numbers(3, 32, 16, seed=1)
    wanted = product(round_to_tf32(a), round_to_tf32(b), 0.5)
    found = product(a, b, 0.5, tf32=True)
    assert torch.equal(found, wanted) and not torch.equal(found, product(a, b, 0.5))
    assert not torch.equal(round_to_tf32(found), found)
    exact = torch.matmul(a.double(), b.double()) * 0.5
    assert 1e-5 < (found - exact).abs().max() < 1e-2


def test_a_linear_layer_rounds_the_factors_of_all_three_products() -> None:
    x, weight, dy = numbers(3, 8, 16), numbers(3, 32, 16, seed=1), numbers(3, 8, 32, seed=2)
    leaf, x = Leaf(weight, torch.zeros_like(weight)), x.requires_grad_()
    y = linear(x, leaf, TF32)
    y.backward(dy)
    qx, qw, qdy = (round_to_tf32(part.detach()) for part in (x, weight, dy))
    assert torch.equal(y, product(qx, qw.mT))
    assert torch.equal(x.grad, product(qdy, qw))
    assert torch.equal(leaf.gradient, product(qdy.mT, qx))


def test_attention_rounds_the_factors_of_all_six_products() -> None:
    """Against plain torch in float64 of which each product's factors are rounded; float32 is a hundred times closer."""
    q, k, v, dy = numbers(4, 2, 2, 2, 8, 16).unbind()

    def rounded(x: torch.Tensor) -> torch.Tensor:
        return round_to_tf32(x.float()).double()

    q_, k_, v_ = (x.clone().requires_grad_() for x in (q, k, v))
    found = attend(q_, k_, v_, 0.25, True, TF32, Taps([]), "attention")
    found.backward(dy.transpose(2, 3))
    mask = torch.full((8, 8), -torch.inf).triu(1).double()
    shares = torch.softmax(rounded(q) @ rounded(k).mT * 0.25 + mask, -1)
    dshares = rounded(dy) @ rounded(v).mT
    dscores = shares * (dshares - (dshares * shares).sum(-1, keepdim=True))
    wanted = {
        "y": (found.transpose(2, 3), rounded(shares) @ rounded(v)),
        "dq": (q_.grad, rounded(dscores) @ rounded(k) * 0.25),
        "dk": (k_.grad, rounded(dscores).mT @ rounded(q) * 0.25),
        "dv": (v_.grad, rounded(shares).mT @ rounded(dy)),
    }
    with torch.no_grad():
        exact = attend(q, k, v, 0.25, True, Precision(torch.float32), Taps([]), "attention").transpose(2, 3)
    assert (exact - wanted["y"][1]).norm() > 1e-4 * exact.norm(), "rounding costs something"
    for name, (ours, theirs) in wanted.items():
        # A share that lies between two numbers in float32 and float64 may be rounded to the other one.
        assert (ours - theirs).norm() < 4e-5 * theirs.norm(), name


def test_a_product_that_others_differentiate_rounds_too() -> None:
    a, b, dy = numbers(2, 4, 8).requires_grad_(), numbers(2, 8, 4, seed=1).requires_grad_(), numbers(2, 4, 4, seed=2)
    differentiable_product(a, b, True).backward(dy)
    qa, qb, qdy = (round_to_tf32(part.detach()) for part in (a, b, dy))
    assert torch.equal(a.grad, product(qdy, qb.mT)) and torch.equal(b.grad, product(qa.mT, qdy))


@pytest.mark.parametrize("members", [[5, 3], [6, 2, 4]])
@pytest.mark.parametrize("shape", [(16, 32, 16), (10, 7, 33)], ids=["whole lines", "others"])
def test_a_product_has_the_same_bits_in_every_pack(members: list[int], shape: tuple[int, int, int]) -> None:
    m, k, n = shape
    a, b = numbers(7, k, m).mT, numbers(7, k, n, seed=1)
    assert torch.equal(product(a[members], b[members], tf32=True), product(a, b, tf32=True)[members])


# --- a whole model ----------------------------------------------------------------------------------------------------


def learned(precision: str, **fields: object) -> tuple[torch.Tensor, torch.Tensor]:
    pack = engine.pack_of([engine.trial(seed=r, precision=precision, **fields) for r in range(3)])
    return pack.learn(pack.objective.batch(0)), pack.gradients.clone()


@pytest.mark.parametrize("fields", [{}, {"attention": "fused"}, {"activation": "swiglu", "qk_norm": True}], ids=str)
def test_a_model_differs_from_float32_by_its_rounding(fields: dict[str, object]) -> None:
    """A factor is off by 2^-11 at most, and some ten products stand in a row; bf16, of three bits less, costs more."""
    (loss, found), (exact_loss, exact), (_, coarse) = (learned(name, **fields) for name in ("tf32", "fp32", "bf16"))
    torch.testing.assert_close(loss, exact_loss, rtol=2.0**-11, atol=0)
    error, coarser = (found - exact).norm(), (coarse - exact).norm()
    assert 0 < error < 2.0**-8 * exact.norm() and error < coarser / 4


def test_everything_but_products_is_float32() -> None:
    pack = engine.pack_of([engine.trial(seed=r, precision="tf32") for r in range(2)])
    seen: dict[str, torch.Tensor] = {}
    for pattern in ("*.query", "*.scores", "*.up", "*.residual", "logits"):
        pack.model.taps.attach(pattern, lambda name, x: seen.update({name: x.detach().clone()}))
    pack.learn(pack.objective.batch(0))
    assert set(seen) >= {"logits", "blocks.0.attention.query", "blocks.0.attention.scores"}
    for name, x in (seen | {"weights": pack.weights, "gradients": pack.gradients}).items():
        finite = x[torch.isfinite(x)]
        assert x.dtype == torch.float32 and not torch.equal(round_to_tf32(finite), finite), name


def test_packs_of_other_precision_in_the_same_process_keep_their_bits() -> None:
    """One after the other, and in turn."""
    alone = {name: learned(name) for name in ("fp32", "tf32")}
    trials = {name: [engine.trial(seed=r, precision=name) for r in range(3)] for name in alone}
    packs = {name: engine.pack_of(trials[name]) for name in alone}
    for name in ("tf32", "fp32", "tf32", "fp32"):
        loss = packs[name].learn(packs[name].objective.batch(0))
        assert torch.equal(loss, alone[name][0]) and torch.equal(packs[name].gradients, alone[name][1]), name


# --- devices ----------------------------------------------------------------------------------------------------------


def test_an_accelerator_is_told_for_products_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen on a CPU that takes an accelerator's ways: what torch was told whenever something was multiplied."""
    monkeypatch.setattr(devices, "CPUS", ())
    told, multiply = [], torch.baddbmm

    def watched(*arguments: object, **options: object) -> torch.Tensor:
        told.append(MATMUL.fp32_precision)
        return multiply(*arguments, **options)

    monkeypatch.setattr(torch, "baddbmm", watched)
    with settings_kept():
        make_deterministic(engine.CPU)
        for precision, sigma, wanted in (
            ("fp32", False, {"ieee"}),
            ("tf32", False, {"tf32"}),
            ("tf32", True, {"tf32", "ieee"}),  # spectral norms are in full
            ("fp32", False, {"ieee"}),
        ):
            told.clear()
            engine.run([engine.trial(seed=r, precision=precision, sigma_reparam=sigma, steps=2) for r in range(2)])
            assert set(told) == wanted and MATMUL.fp32_precision == "ieee"
        monkeypatch.setattr(torch, "baddbmm", lambda *arguments, **options: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            product(numbers(1, 2, 2), numbers(1, 2, 2), tf32=True)
        assert MATMUL.fp32_precision == "ieee", "also after an error"


def test_what_it_means_on_each_device() -> None:
    for device in ("cpu", "cuda"):
        found = precision_of(Train(precision="tf32", norms="products", softmax="products"), torch.device(device))
        assert found == TF32
        assert not precision_of(Train(), torch.device(device)).tf32


@pytest.mark.parametrize(
    ("version", "hip", "said"),
    [
        ((7, 5), None, "this CUDA device has compute capability 7.5, and TF32 begins at 8.0"),
        ((9, 4), "6.4", "this GPU is not NVIDIA's"),
    ],
)
def test_a_device_without_it_is_refused(
    monkeypatch: pytest.MonkeyPatch, version: tuple[int, int], hip: str | None, said: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: version)
    monkeypatch.setattr(torch.version, "hip", hip)
    allowed = r"\(device=auto\); allowed: fp32, fp16, fp64, or device=cpu"
    with pytest.raises(ConfigError, match=f"train.precision=tf32: {said} {allowed}"):
        pick_device("auto", "tf32")
    assert pick_device("cpu", "tf32").type == "cpu" and pick_device("auto", "fp32").type == "cuda"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (8, 0))
    monkeypatch.setattr(torch.version, "hip", None)
    assert pick_device("auto", "tf32").type == "cuda"


@pytest.mark.parametrize("device", [DEVICE])
def test_a_gpus_products_are_close_to_those_of_a_cpu(device: str) -> None:
    """How its hardware rounds factors is its own; float32 would be a hundred times closer to the exact product."""
    a, b = numbers(3, 64, 256), numbers(3, 256, 64, seed=1)
    exact = a.double() @ b.double()
    error = (product(a.to(device), b.to(device), tf32=True).cpu() - exact).norm() / exact.norm()
    assert 2.0**-13 < error < 2.0**-9
