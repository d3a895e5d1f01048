"""How weights start: the sizes of real weights against the papers' formulas, written out."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from harness.config import Model
from harness.model.scaling import INITS, deepnorm_beta, tensor_table
from harness.testing import engine
from sweeps.compose.arguments import config_loader, expand
from sweeps.compose.grid import Composer

WIDTH, DEPTH, VOCABULARY = 64, 8, 64
STANDARD = {
    "embedding": 1 / 8,
    "attention.query": 1 / 8,
    "attention.key": 1 / 8,
    "attention.value": 1 / 8,
    "attention.projection": 1 / 8,
    "feedforward.up": 1 / 8,
    "feedforward.down": 1 / 16,
    "head": 1 / 8,
}
"""Wortsman et al. 2023: 1/sqrt(64), and 1/sqrt(256) behind the hidden layer."""

XAVIER = dict.fromkeys([name for name in STANDARD if "." in name], 0.0790569)  # sqrt(2 / (5 * 64))
SHARE = 1 / 4  # 1/sqrt(2 * 8)
EXPECTED = {
    "standard": STANDARD,
    "small": STANDARD | XAVIER,
    # Xavier's sqrt(2 / (fan_in + fan_out)): sqrt(2 / (64 + 64)) is 1/8, too.
    "xavier": STANDARD | {name: size for name, size in XAVIER.items() if name.startswith("feedforward")},
    "scaled_residual": STANDARD | {"attention.projection": SHARE / 8, "feedforward.down": SHARE / 16},
    # Takase et al. 2023: every matrix at sqrt(2 / (5 * 64)), embeddings too.
    "small_scaled": dict.fromkeys(STANDARD, 0.0790569)
    | {"attention.projection": SHARE * 0.0790569, "feedforward.down": SHARE * 0.0790569},
    "zero_residual": STANDARD | {"attention.projection": 0.0, "feedforward.down": 0.0},
    # 16 branches: 16^(-1/6) for the four matrices of attention, 16^(-1/2) for the two of a feed-forward part.
    "fixup": {
        "embedding": 1 / 8,
        "attention.query": 0.6299605 / 8,
        "attention.key": 0.6299605 / 8,
        "attention.value": 0.6299605 / 8,
        "attention.projection": 0.0,
        "feedforward.up": 0.25 / 8,
        "feedforward.down": 0.0,
        "head": 0.0,
    },
    "normal": dict.fromkeys(STANDARD, 0.02),
    "gpt2": dict.fromkeys(STANDARD, 0.02)
    | {"attention.projection": SHARE * 0.02, "feedforward.down": SHARE * 0.02},  # as nanoGPT has them
}
CUT = EXPECTED.keys() - {"normal", "gpt2"}


def trial_of(init="standard", **fields):
    """A trial with `model.init`; `engine.trial` calls a seed so."""
    fields = {"width": WIDTH, "depth": DEPTH, "head_dim": 16, "vocabulary": VOCABULARY, **fields}
    trial = engine.trial(**fields)
    return dataclasses.replace(trial, model=dataclasses.replace(trial.model, init=init))


def weights_of(init="standard", **fields):
    """The weights of two trials by tensor, [2, ...]."""
    pack = engine.pack_of([trial_of(init, seed=seed, **fields) for seed in range(2)])
    return {name: pack.layout.view(pack.weights, name) for name in pack.layout.by_name}


def short(name: str) -> str:
    """Without the block's number."""
    return name.split(".", 2)[2] if name.startswith("blocks.") else name


@pytest.mark.parametrize("init", INITS)
def test_sizes_of_real_weights(init):
    weights = weights_of(init, placement="none" if init == "fixup" else "pre")
    seen = set()
    for name, values in weights.items():
        if values.dim() != 3:
            continue
        want, found = EXPECTED[init][short(name)], values.double().square().mean().sqrt().item()
        # Of n normal numbers the root mean square is known to 1/sqrt(2n); these are 5 of that and more.
        assert found == pytest.approx(want, rel=5 / math.sqrt(2 * values.numel())), name
        is_cut = values.abs().max() <= 2.274 * want * 1.001  # at two standard deviations of what was cut
        assert is_cut == (init in CUT), f"{name} is {'' if is_cut else 'not '}cut"
        if init not in CUT:
            share = (values.abs() > 2 * want).double().mean().item()
            assert share == pytest.approx(0.0455, abs=5 * math.sqrt(0.0455 / values.numel())), name
        assert want == 0 or abs(values.double().mean()) < 5 * want / math.sqrt(values.numel()), name
        seen.add(short(name))
    assert seen == EXPECTED[init].keys()


def test_every_init_is_tested():
    assert EXPECTED.keys() == INITS.keys()


def test_a_blocks_biases_stand_together():
    """As they are stored and as faults address them: first those of its matrices, then those of its norms."""
    names = [row.name for row in tensor_table(engine.trial(biases=True, depth=2, qk_norm=True).model, 61)]
    biases = [name for name in names if name.startswith("blocks.") and name.endswith("_bias")]
    of_block = ["attention.query", "attention.key", "attention.value", "attention.projection"]
    of_block += ["feedforward.up", "feedforward.down", "attention_norm", "feedforward_norm"]
    of_block += ["attention.query_norm", "attention.key_norm"]
    assert biases == [f"blocks.{block}.{name}_bias" for block in range(2) for name in of_block]


def test_gains_shifts_and_layer_scale():
    weights = weights_of(layer_scale=0.01, qk_norm=True, sigma_reparam=True)
    starts = {name: set(values.unique().tolist()) for name, values in weights.items() if values.dim() == 2}
    layer_scale = torch.tensor(0.01).item()
    for name, found in starts.items():
        assert found == ({layer_scale} if name.endswith("layer_scale") else {1.0}), name
    fixup = weights_of("fixup", placement="none")
    assert all(not values.any() for name, values in fixup.items() if name.endswith("_shift"))


@pytest.mark.parametrize("width", [64, 256])
@pytest.mark.parametrize("parametrization", ["standard", "mup", "completep"])
@pytest.mark.parametrize("zero_head", [False, True])
def test_sizes_over_width(parametrization, width, zero_head):
    """muP (table 8): embeddings and head keep their size, matrices 1/sqrt(fan_in); a head at zero is a choice."""
    model = Model(width=width, depth=2, parametrization=parametrization, base_width=64, zero_head=zero_head)
    std = {row.name: row.std for row in tensor_table(model, VOCABULARY)}
    vectors = 1 / 8 if parametrization != "standard" else 1 / math.sqrt(width)
    assert std["embedding"] == pytest.approx(vectors)
    assert std["head"] == pytest.approx(0.0 if zero_head else vectors)
    assert std["blocks.1.attention.query"] == pytest.approx(1 / math.sqrt(width))
    assert std["blocks.1.feedforward.down"] == pytest.approx(1 / math.sqrt(4 * width))


# --- constants of the depth --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("placement", "depth", "beta"),
    [
        # (8N)^(-1/4), Wang et al. 2022 (arXiv 2203.00555)
        ("deepnorm", 2, 0.5),
        ("deepnorm", 12, 0.31947155),
        ("deepnorm", 32, 0.25),
        ("deepnorm", 200, 0.15811388),
        ("deepnorm", 1250, 0.1),
        # (2N)^(-1/2), Zeng et al. 2022 (arXiv 2210.02414); GLM-130B has 70 layers
        ("deepnorm_glm", 2, 0.5),
        ("deepnorm_glm", 8, 0.25),
        ("deepnorm_glm", 70, 0.08451543),
        ("pre", 12, 1.0),
        ("post", 12, 1.0),
        ("sandwich", 12, 1.0),
    ],
)
def test_deepnorm_beta(placement, depth, beta):
    assert deepnorm_beta(Model(placement=placement, depth=depth)) == pytest.approx(beta)


@pytest.mark.parametrize("init", ["standard", "small"])
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize(("placement", "depth", "beta"), [("deepnorm", 2, 0.5), ("deepnorm_glm", 8, 0.25)])
def test_deepnorm_scales_all_but_query_and_key(placement, depth, beta, activation, init):
    def table(placement):
        model = Model(depth=depth, placement=placement, activation=activation, init=init)
        return {row.name: row.std for row in tensor_table(model, VOCABULARY) if row.std}

    plain, scaled = table("post"), table(placement)
    assert plain.keys() == scaled.keys()
    ratios = {name: scaled[name] / plain[name] for name in plain}
    untouched = ("embedding", "head", ".query", ".key")
    assert ratios == pytest.approx({name: 1.0 if name.endswith(untouched) else beta for name in plain})


@pytest.mark.parametrize(("name", "depth", "beta"), [("deepnorm", 2, 0.5), ("deepnorm_glm", 8, 0.25)])
def test_deepnorm_is_that_of_its_paper(name, depth, beta):
    """`xavier_normal_` with a gain of beta, and of 1 for query and key (Wang et al. 2022, figure 2)."""
    loader = config_loader(None)
    (trial,) = Composer(loader, "grid").trials(expand({}, [f"mitigation={name}", f"model.depth={depth}"], loader))
    std = {short(row.name): row.std for row in tensor_table(trial.model, VOCABULARY) if row.std}
    for matrix in ("query", "key", "value", "projection"):
        gain = 1.0 if matrix in ("query", "key") else beta
        assert std[f"attention.{matrix}"] == pytest.approx(gain * math.sqrt(2 / (64 + 64)))
    assert std["feedforward.up"] == std["feedforward.down"] == pytest.approx(beta * math.sqrt(2 / (64 + 256)))


def weights_of_blocks(**fields) -> int:
    table = tensor_table(Model(head_dim=2, **fields), VOCABULARY)
    return sum(row.size for row in table if row.name.startswith("blocks.0.feedforward.") and len(row.shape) == 2)


@pytest.mark.parametrize("width", [32, 48, 64, 96, 100, 128, 192, 256, 768, 1000, 1024, 4096, 12288])
def test_a_gate_takes_no_more_weights(width):
    """8/3 of the width in place of 4 (Shazeer 2020, section 3), rounded to whole vectors where that costs under 1%."""
    plain, gated = weights_of_blocks(width=width), weights_of_blocks(width=width, activation="swiglu")
    assert plain == 8 * width**2
    assert abs(gated / plain - 1) <= 0.01
    hidden = gated / 3 / width
    assert width < 256 or hidden % 8 == 0
    assert weights_of_blocks(width=width, activation="swiglu", expansion=4) == 12 * width**2
    assert weights_of_blocks(width=width, expansion=2) == 4 * width**2
    assert weights_of_blocks(width=width, activation="swiglu", expansion=3, feedforward=10) == 30 * width


@pytest.mark.parametrize(
    ("depth", "activation", "attention", "feedforward"),
    [
        (2, "gelu", 4 ** (-1 / 6), 4 ** (-1 / 2)),
        (32, "gelu", 1 / 2, 1 / 8),
        (32, "swiglu", 1 / 2, 64 ** (-1 / 4)),
        (50, "relu", 100 ** (-1 / 6), 1 / 10),
    ],
)
def test_fixup_factors(depth, activation, attention, feedforward):
    """L^(-1/(2m - 2)) of Zhang et al. 2019 (arXiv 1901.09321), section 3.2, for L = 2 depth branches of m matrices."""
    model = Model(depth=depth, activation=activation, placement="none", init="fixup")
    std = {row.name.removeprefix("blocks.0."): row.std * math.sqrt(64) for row in tensor_table(model, VOCABULARY)}
    assert [std[f"attention.{name}"] for name in ("query", "key", "value")] == pytest.approx([attention] * 3)
    first = [name for name in ("feedforward.gate", "feedforward.up") if name in std]
    assert [std[name] for name in first] == pytest.approx([feedforward] * len(first))
    assert std["attention.projection"] == std["feedforward.down"] == std["head"] == 0


@pytest.mark.parametrize("depth", [1, 6, 12, 48])
def test_residual_factor_at_depths(depth):
    def down(init):
        table = tensor_table(Model(depth=depth, init=init), VOCABULARY)
        return next(row.std for row in table if row.name == "blocks.0.feedforward.down")

    assert down("scaled_residual") / down("standard") == pytest.approx(1 / math.sqrt(2 * depth))
    assert down("small_scaled") / down("small") == pytest.approx(1 / math.sqrt(2 * depth))


# --- what the sizes are for --------------------------------------------------------------------------------------


def growth(depth, init, embedding_scale):
    """What the blocks do at the start: RMS of the residual stream behind them over that in front, and the gradient norm
    of the first block's matrices over that of the last one's; means over three trials.
    """
    fields = {"context": 16, "batch": 8, "depth": depth, "embedding_scale": embedding_scale}
    pack = engine.pack_of([trial_of(init, seed=seed, **fields) for seed in range(3)])
    sizes = {}

    def read(name, x):
        sizes[name] = x.detach().double().flatten(1).square().mean(1).sqrt()

    detach = pack.model.taps.attach("*", read)
    pack.learn(pack.objective.batch(0))
    detach()

    def gradient(block):
        names = [
            scaled.name for scaled in pack.layout.tensors if scaled.name.startswith(f"blocks.{block}.") and scaled.std
        ]
        return torch.cat([pack.layout.view(pack.gradients, name).flatten(1) for name in names], dim=1).norm(dim=1)

    stream = (sizes[f"blocks.{depth - 1}.residual"] / sizes["embedding"]).mean().item()
    return stream, (gradient(0) / gradient(depth - 1)).mean().item()


def test_small_branches_beside_a_large_shortcut_keep_gradients_alike():
    """Takase et al. 2023 (arXiv 2312.16903): without both, gradients grow towards the first blocks with the depth."""
    stream, gradient = growth(24, "small_scaled", "sqrt_width")
    assert stream < 1.2 and 0.8 < gradient < 1.3
    for init, embedding_scale in (("standard", "none"), ("standard", "sqrt_width"), ("small_scaled", "none")):
        shallow, deep = (growth(depth, init, embedding_scale) for depth in (4, 24))
        assert deep[1] > 1.8, (init, embedding_scale, deep)
        assert deep[1] > 1.2 * shallow[1], (init, embedding_scale)
        assert deep[0] > 3, (init, embedding_scale)


def test_blocks_that_start_as_the_identity():
    for init, placement in (("zero_residual", "pre"), ("fixup", "none")):
        pack = engine.pack_of([trial_of(init, placement=placement, depth=4)] * 2)
        seen = {}
        detach = pack.model.taps.attach("*", lambda name, x, seen=seen: seen.setdefault(name, x.detach().clone()))
        with torch.no_grad():
            pack.model(pack.objective.batch(0)[:, :, :-1])
        detach()
        assert torch.equal(seen["blocks.3.residual"], seen["embedding"])
