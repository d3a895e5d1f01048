"""The programs of norms, compiled without a GPU and traced on `meta`; test_kernels.py runs them in the interpreter."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.kernels import norms
from harness.model.layers import NORMS, Leaf, norm_beside
from harness.testing import engine
from tests.harness import test_kernels
from tests.harness.test_kernels import META, built, compiled
from tests.harness.test_norms import THEIRS
from tests.harness.tracing import steps_of

launches = test_kernels.launches  # a fixture

HALF = (torch.bfloat16, torch.float16)
TYPES = [(torch.float32, torch.float32), (torch.float64, torch.float64), *((half, torch.float32) for half in HALF)]
SIZES = [1, 7, 16, 64, 100, 1536, 8192, norms.WIDEST]


def flat(rows: int, features: int, dtype: torch.dtype) -> Tensor:
    """Columns of a flat array, as gains are."""
    return torch.ones(rows, 2 * (-(-features // 16) * 16), dtype=dtype)[:, :features]


def pass_over(
    features: int, types: tuple[torch.dtype, torch.dtype], rows: int = 3, first: int = 0, odd: bool = False
) -> None:
    """Forward and backward passes of both norms, beside another use of x and alone, for some rows from `first` on.

    `odd`: rows of gains start anywhere, not as in a flat array.
    """
    part, (x_dtype, dtype) = slice(first, first + rows), types
    for norm in THEIRS:
        x = torch.ones(rows + first, 37, features, dtype=x_dtype)[part].requires_grad_()
        gains = [flat(rows + first, features, dtype)[part] for _ in range(2)]
        leaf = Leaf(*(gain.contiguous() for gain in gains)) if odd else Leaf(*gains)
        NORMS[norm](x, leaf, 1e-5).sum().backward()
        near, y = norm_beside(norm, x, leaf, 1e-5)
        (near.sum() + y.sum()).backward()


@pytest.mark.parametrize(
    ("types", "capability"), list(zip([*TYPES, *((half, half) for half in HALF)], itertools.cycle([80, 90])))
)
def test_programs_compile(launches, types, capability):
    """No contraction, no quotient or root that is not rounded to nearest, no atomics; vectors are read whole."""
    for features in (64, 100):
        pass_over(features, types)
    assert {name for name, *_ in launches} == {"normed", "normed_backward", "add_blocks"}
    for key in dict.fromkeys(launches):
        assembly = compiled(key, capability)
        assert not re.search(r"\b(atom|red)\.|\.approx|\.full\.|\.ftz", assembly), key[0]
        products = re.findall(r"\bfma\.\S+ +\S+ (\S+), (\S+),", assembly)
        ones = re.findall(
            r"mov\.b16 +(%rs\d+), 0x3F80;", assembly
        )  # 1.0: by which compute capability 8.0 adds bfloat16
        assert all(factor in ones for _, factor in products), key[0]
        if dict(key[2]).get("D") == 64:
            assert re.search(r"ld\.global\.v4\.b32|ld\.global\.v2\.b64", assembly), key[0]


@pytest.mark.parametrize("types", TYPES[:2])
@pytest.mark.parametrize("features", [1, 1536, 8192])
def test_programs_of_all_sizes_compile(launches, types, features):
    pass_over(features, types)
    for key in dict.fromkeys(launches):
        assert compiled(key, 90)


@pytest.mark.parametrize("types", TYPES[:2])
@pytest.mark.parametrize("features", [48, 64, 1024])
def test_what_is_added_beside_changes_no_order(launches, types, features):
    """Elements of both programs lie alike among the threads, so they are added up alike."""
    pass_over(features, types)
    keys = [key for key in dict.fromkeys(launches) if key[0] == "normed_backward"]
    assert len(keys) == 4
    found = [(dict(key[2])["IS_LAYER"], str(built(key, 80).asm["ttgir"])) for key in keys]
    for is_layer in (True, False):
        one, other = (re.findall(r"#(?:blocked|linear)\d* = .*", text) for kind, text in found if kind == is_layer)
        assert one and one == other
        one, other = (_sums(text) for kind, text in found if kind == is_layer)
        assert one and one == other


def _sums(text: str) -> list[str]:
    """Along which axis what is added up, and how it lies."""
    return re.findall(r'"tt\.reduce".*|\}\) : (\(tensor<.*?) loc', text)


@pytest.mark.parametrize("odd", [False, True])
@pytest.mark.parametrize("features", [7, 48, 64])
def test_one_program_serves_all_packs(launches, features, odd):
    """Wherever a row stands, and with however many: bits could differ between two programs."""
    for types in TYPES:
        pass_over(features, types, 5, odd=odd)
        expected = list(launches)
        assert len(expected) == 2 * 2 * 3
        for count, first in ((1, 0), (1, 3), (2, 1), (16, 0), (64, 0)):
            launches.clear()
            pass_over(features, types, count, first, odd)
            assert launches == expected
        launches.clear()


@pytest.mark.parametrize("features", SIZES)
def test_tokens_are_cut_by_their_features_alone(features):
    sizes = norms.tile(features)
    assert sizes["COLUMNS"] >= features and sizes["COLUMNS"] < max(17, 2 * features)
    assert sizes["TOKENS"] * sizes["COLUMNS"] == max(norms.TILE, sizes["COLUMNS"])
    assert norms.block(features) % sizes["TOKENS"] == 0 and norms.block(features) >= norms.FEWEST
    assert sizes["num_warps"] in (4, 8, 16)
    for rows in (1, 64):
        x = torch.empty(rows, 999, features, device=META)
        y, kept = norms.normed(x, x[:, 0], 1e-5, True)
        assert y.shape == x.shape and kept.shape == (rows, 2, 999)
        dx, partial = torch.ops.stability_harness.normed_backward(y, x, kept, x[:, 0], None)
        assert dx.shape == x.shape and partial.shape == (rows, -(-999 // norms.block(features)), features)


def test_operators_say_what_they_change(monkeypatch):
    """As torch checks it, with a stand-in for each program that changes what that one does."""
    changed = {"normed": (2, 3), "normed_backward": (5, 6), "add_blocks": (1,)}

    def stand_in(name: str, grid: Any, *arguments: Any, **constants: Any) -> None:
        for place in changed[name]:
            arguments[place].fill_(2.0)

    monkeypatch.setattr(norms, "launch", stand_in)
    x, gain = torch.randn(3, 5, 41, 48), flat(3, 48, torch.float32)
    kept, target = torch.randn(3, 2, 205), torch.zeros(3, 60)
    given: list[tuple[str, tuple[Any, ...]]] = [
        *(("normed", (x, gain, 1e-5, is_layer)) for is_layer in (True, False)),
        *(("normed", (x.to(half), gain, 1e-5, True)) for half in HALF),
        *(("normed_backward", (x, x, kept, gain, beside)) for beside in (None, x)),
        *(("normed_backward", (x, x.to(half), kept[:, :1], gain, None)) for half in HALF),
        *(("add_blocks", (torch.randn(3, 4, 48), gains)) for gains in (target[:, :48], target[:, 5:53])),
    ]
    for name, arguments in given:
        operator = getattr(torch.ops.stability_harness, name).default
        torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))
    assert not target[:, 53:].any()


def test_a_step_has_three_passes_for_a_norm():
    """In place of six, and autograd adds no gradients of the residual stream; per-head gains are torch's."""
    (step,) = steps_of(engine.different(3, depth=3, steps=40, validate_every=40), [2])
    names = [operation.name.split(".")[1] for operation in step.trained]
    assert [names.count(name) for name in ("normed", "normed_backward", "add_blocks")] == [7, 7, 7]
    assert not any("layer_norm" in name for name in names)
    adds = [op for op in step.trained if op.name == "aten.add.Tensor" and op.tensors[0][0] == (4, 16, 16)]
    assert len(adds) == 6, "those of the forward pass"
