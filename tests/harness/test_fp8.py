"""fp8: operands of linear layers in e4m3 forwards and e5m2 backwards, each trial's at a scale of its own."""

from __future__ import annotations

import math
import re
from fractions import Fraction

import numpy as np
import pytest
import torch

from harness.config import ConfigError, Train
from harness.model.formats import round_scaled, round_to
from harness.model.layers import Leaf, linear
from harness.model.precision import FORMATS, Precision, pick_device, precision_of
from harness.testing import engine
from harness.training.activation_counts import idle_parts
from harness.training.config_checks import check_trial
from tests import number_formats as oracle
from tests.harness.test_precision import CUDA, learned, passed

EMULATED, REAL = Precision(torch.float32, "bf16", fp8=True), Precision(torch.bfloat16, fp8=True)
LARGEST = {"fp8_e4m3": 448, "fp8_e5m2": 57344}
formats = pytest.mark.parametrize("name", LARGEST)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def nearest(x, name):
    """The table's number next to each of one trial's, at the largest power of two that fits; float64."""
    values = x.double().numpy()
    largest = Fraction(float(np.abs(values).max()))
    exponent = math.frexp(LARGEST[name] / largest)[1]
    exponent = next(e for e in (exponent + 1, exponent, exponent - 1) if largest * Fraction(2) ** e <= LARGEST[name])
    exponent = min(exponent, 126)
    scaled = np.ldexp(values, exponent)
    return torch.from_numpy(np.ldexp(oracle.decode(oracle.encode(scaled, name), name), -exponent))


# --- rounding -------------------------------------------------------------------------------------------------------


@formats
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_trial_is_rounded_at_its_own_scale(name, dtype):
    sizes = 10.0 ** torch.tensor([-37, -20, -4, 0, 1, 5, 30, 38])
    x = (normal(8, 30, 11).clamp(-3, 3) * sizes[:, None, None]).to(dtype)
    x[3] = normal(30, 11).exp().pow(6).to(dtype)  # from normal numbers to zero
    rounded = round_scaled(x, name)
    assert rounded.dtype == dtype
    for r in range(8):
        assert torch.equal(rounded[r].double(), nearest(x[r], name)), r
        assert torch.equal(rounded[r], round_scaled(x[r : r + 1], name)[0])
    assert (rounded[3] == 0).any() and (rounded != x).any()


@formats
def test_a_trial_that_fills_the_format_is_rounded_as_torch_casts_it(name):
    x = normal(4, 1000) * LARGEST[name] / 8
    x[:, 0] = torch.tensor([LARGEST[name], -LARGEST[name], 0.51 * LARGEST[name], 0.99 * LARGEST[name]])
    x.clamp_(-LARGEST[name], LARGEST[name])
    kind = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}[name]
    assert torch.equal(round_scaled(x, name), x.to(kind).float())


@formats
def test_the_largest_element_decides_and_is_not_cut_off(name):
    """Just above a power of two of the largest number, one bit of room is left; just below, none."""
    edge = LARGEST[name] * 2.0**-3
    for largest in (
        np.nextafter(np.float32(edge), np.float32(0)),
        edge,
        np.nextafter(np.float32(edge), np.float32(9e9)),
    ):
        x = torch.tensor([[float(largest), edge / 3]])
        rounded = round_scaled(x, name)
        assert torch.equal(rounded[0].double(), nearest(x[0], name))
        assert rounded[0, 0] == edge


@formats
def test_what_is_not_finite_stays_in_its_trial(name):
    x = normal(5, 6, 7)
    ruined = x.clone()
    ruined[1, 2, 3], ruined[2, 2, 3], ruined[3] = math.nan, -math.inf, 0.0
    rounded = round_scaled(ruined, name)
    for r in (0, 4):
        assert torch.equal(rounded[r], round_scaled(x, name)[r])
    assert rounded[1, 2, 3].isnan() and rounded[2, 2, 3] == -math.inf and (rounded[3] == 0).all()
    assert torch.isfinite(rounded[1]).sum() == torch.isfinite(rounded[2]).sum() == 41


@formats
@pytest.mark.parametrize("shape", [(3, 30, 11), (2, 3, 30, 5)])  # rows and tokens; rows, experts and tokens
def test_each_channel_may_have_a_scale_of_its_own(name, shape):
    x = normal(*shape) * 10.0 ** normal(*shape[:-2], 1, shape[-1], seed=1).mul(6)
    x[0, ..., 3, 1], x[-1, ..., 2] = math.nan, 0.0
    rounded = round_scaled(x, name, by_channel=True)
    for place in np.ndindex(*shape[:-2]):
        for channel in range(shape[-1]):
            alone = x[place][:, channel]
            assert torch.equal(
                rounded[place][:, channel].nan_to_num(7), round_scaled(alone[None], name)[0].nan_to_num(7)
            )
    assert (rounded != round_scaled(x, name)).any()


# --- linear layers --------------------------------------------------------------------------------------------------


def operands():
    """Three trials of very different sizes."""
    sizes = torch.tensor([1e-4, 1.0, 1e6])[:, None, None]
    return sizes * normal(3, 20, 30), normal(3, 10, 30, seed=1) / sizes.sqrt(), normal(3, 20, 10, seed=2) * sizes


@pytest.mark.parametrize("precision", [EMULATED, REAL])
def test_a_layer_and_its_gradients_are_those_of_rounded_operands(precision):
    """In float64, from the table. What is left is the sum's order in float32, and one rounding to bf16."""
    x, weight, dy = operands()
    found = passed(precision, x, weight, dy)
    for r in range(3):
        qx, qw = (nearest(round_to(part[r], "bf16"), "fp8_e4m3") for part in (x, weight))
        qdy = nearest(round_to(dy[r], "bf16"), "fp8_e5m2")
        for part, exact in {"y": qx @ qw.T, "dx": qdy @ qw, "dw": qdy.T @ qx}.items():
            ours = found[part][r].double()
            assert torch.equal(round_to(ours, "bf16"), ours)
            # Where terms cancel, the error is that of their sum's steps.
            atol = 1e-6 * exact.abs().max().item()
            torch.testing.assert_close(ours, exact, rtol=2.0**-8, atol=atol)


def test_forwards_keeps_three_bits_of_the_mantissa_and_backwards_two():
    one = torch.ones(2, 1, 1)
    found = passed(EMULATED, 1.125 * one, 1.125 * one, 1.125 * one)
    assert found["y"].flatten().tolist() == [1.265625] * 2, "1.125 squared, which bf16 holds"
    assert found["dx"].flatten().tolist() == found["dw"].flatten().tolist() == [1.125] * 2, "1.125 times 1"


def test_small_elements_beside_a_large_one_are_lost():
    """e4m3 spans a factor of 448 * 2^9 from its largest number to its smallest."""
    x = torch.tensor([[[448.0, 2.0**-9, 2.0**-11]]]).expand(2, -1, -1)
    found = passed(EMULATED, x, torch.eye(3).expand(2, -1, -1), torch.zeros(2, 1, 3))
    assert found["y"][0, 0].tolist() == [448.0, 2.0**-9, 0.0]


# --- the model ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_a_model_is_the_one_in_bf16_tensors(device):
    """What sums in another order change is less than what the format costs: each flip of a bit of bf16 may flip one of
    fp8, which is 16 times as much."""
    (loss, emulated, layout), (real_loss, real, _), (_, exact, _) = (
        learned(EMULATED, {}),
        learned(REAL, {}, device),
        learned(Precision(torch.float32), {}),
    )
    torch.testing.assert_close(loss, real_loss, rtol=2.0**-8, atol=0)
    for tensor in layout.by_name:
        ours, theirs, whole = (layout.view(flat, tensor) for flat in (emulated, real, exact))
        assert 0 < (ours - theirs).norm() < (theirs - whole).norm() / 2 or torch.equal(ours, theirs), tensor


SMOOTH = {"activation": "swiglu", "smooth_swiglu": True, "precision": "fp8"}


@pytest.mark.parametrize(
    ("given", "layers"),
    [
        ({}, [24]),
        ({"block": {"channel_mixer": "moe"}, "moe": {"experts": 4, "top": 1, "shared": 1, "hidden": 12}}, [12, 12]),
    ],
)
def test_smooth_swiglu_scales_the_channels_of_what_down_reads(given, layers, monkeypatch):
    """Those of each expert and of the shared one too, and of nothing else."""
    read, operand = [], Precision.operand

    def seen(self, x, by_channel=False):
        read.append((by_channel, x.shape[-1]))
        return operand(self, x, by_channel)

    monkeypatch.setattr(Precision, "operand", seen)
    trials = [engine.trial(seed=r, feedforward=24, **SMOOTH, **given) for r in range(2)]
    pack = engine.pack_of(trials)
    pack.learn(pack.objective.batch(0))
    by_channel = [size for is_by_channel, size in read if is_by_channel]
    assert by_channel == layers * trials[0].model.depth and len(read) > 3 * len(by_channel)


def test_smooth_swiglu_keeps_what_an_outlier_in_another_channel_would_cost():
    """Fishman et al. 2024, arXiv 2409.12517: s^-1 Q(s z), with s of each channel of z."""
    x = torch.tensor([[[448.0, 2.0**-12], [-3.0, 2.0**-11]]]).expand(2, -1, -1)
    leaf = Leaf(torch.eye(2).repeat(2, 1, 1), torch.zeros(2, 2, 2))
    assert linear(x, leaf, EMULATED)[0].tolist() == [[448.0, 0.0], [-3.0, 0.0]]
    assert linear(x, leaf, EMULATED, None, True)[0].tolist() == [[448.0, 2.0**-12], [-3.0, 2.0**-11]]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"activation": "gelu"},
            "model.smooth_swiglu=true: model.activation=gelu has no gate; allowed: false, or model",
        ),
        ({"precision": "bf16"}, "model.smooth_swiglu=true: train.precision=bf16 rounds nothing to 8 bits; it takes"),
    ],
)
@pytest.mark.parametrize("mixer", ["feedforward", "moe"])
def test_smooth_swiglu_wants_a_gate_and_fp8(mixer, given, said):
    trial = engine.trial(**{**SMOOTH, "block": {"channel_mixer": mixer}, **given})
    if "gate" in said:
        with pytest.raises(ConfigError, match=re.escape(said)):
            check_trial(trial)
    else:
        assert idle_parts(trial)["model.smooth_swiglu"].startswith(said)


def test_products_inside_attention_stay_bf16():
    pack = engine.pack_of([engine.trial(seed=r, precision="fp8") for r in range(2)])
    seen = {}
    pack.model.taps.attach("*.query", lambda name, x: seen.update({name: x.clone()}))
    pack.learn(pack.objective.batch(0))
    assert pack.weights.dtype == torch.float32 and FORMATS["fp8"][0].itemsize == 4
    for x in seen.values():
        assert torch.equal(round_to(x, "bf16"), x) and not torch.equal(round_scaled(x, "fp8_e4m3"), x)


def test_fp8_on_each_device(monkeypatch):
    assert precision_of(Train(precision="fp8"), torch.device("cpu")) == EMULATED
    assert precision_of(Train(precision="fp8"), torch.device("cuda")) == REAL
    assert pick_device("cpu", "fp8").type == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    with pytest.raises(ConfigError, match="train.precision=fp8: this CUDA device lacks bf16"):
        pick_device("cuda", "fp8")
