"""Triton's programs of sums, cross-entropy and products, compiled without a GPU; and what their operators say."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.kernels import losses, operators, products
from harness.model import sums
from tests.harness.test_kernels import assembled, compiled, launches  # noqa: F401

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
Launches = list[tuple[Any, ...]]


def pass_sums(rows: int, dtype: torch.dtype) -> None:
    """Over the last dim, in one block and in several, and over one in the middle."""
    for size in (64, 3000):
        sums.total(torch.zeros(rows, size, dtype=dtype))
        sums.powers(torch.zeros(rows, size, dtype=dtype), 4)
    sums.total(torch.zeros(rows, 600, 48, dtype=dtype), 1)


def pass_losses(rows: int, dtype: torch.dtype) -> None:
    for vocabulary in (256, 5003):
        logits, targets = torch.zeros(rows, 64, vocabulary, dtype=dtype), torch.zeros(rows, 64, dtype=torch.int64)
        _, log_z = losses.log_likelihood(logits, targets)
        for masked in (True, False):
            losses.likelihood_backward(logits, targets, log_z, log_z, log_z, masked)


def pass_products(rows: int, dtype: torch.dtype) -> None:
    """Of matrices as they are and turned, and into a part of a larger array."""
    for lines, inner, columns in ((64, 32, 128), (17, 5, 33)):
        a, b = torch.zeros(rows, lines, inner, dtype=dtype), torch.zeros(rows, inner, columns, dtype=dtype)
        out = torch.zeros(rows, lines, columns, dtype=dtype)
        for one, other in ((a, b), (a.mT.contiguous().mT, b), (a, b.mT.contiguous().mT)):
            products.multiply(one, other, 0.5, out, False)
        products.multiply(a, b, 1.0, torch.zeros(rows, lines, 4 * columns, dtype=dtype)[..., :columns], False)


PASSES = {"sums": pass_sums, "losses": pass_losses, "products": pass_products}
CASES = [(name, dtype) for name in PASSES for dtype in FLOATS if name != "losses" or dtype.itemsize > 2]


@pytest.mark.parametrize(
    ("name", "dtype", "capability"),
    [(*case, capability) for case, capability in zip(CASES, itertools.cycle([80, 90]))],
)
def test_they_compile(launches: Launches, name: str, dtype: torch.dtype, capability: int) -> None:  # noqa: F811
    """Into registers; nothing is atomic, no quotient is approximate, and float32 is multiplied as it is.

    In float64 a logarithm begins with an approximate reciprocal, and makes it exact.
    """
    PASSES[name](2, dtype)
    assert launches
    approximate = r"\b(atom|red)\.|div\.approx|div\.full|tf32" + ("" if dtype == torch.float64 else r"|rcp\.approx")
    for key in dict.fromkeys(launches):
        assembly = compiled(key, capability)
        assert not re.search(approximate, assembly), key[0]
        spilled = re.search(r"(\d+) bytes spill stores", assembled(assembly, capability))
        assert spilled is not None and int(spilled[1]) == 0, key[0]


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_one_program_serves_all_packs(launches: Launches, name: str, dtype: torch.dtype) -> None:  # noqa: F811
    PASSES[name](3, dtype)
    expected = list(launches)
    for rows in (2, 16, 64):
        launches.clear()
        PASSES[name](rows, dtype)
        assert launches == expected


def test_products_in_tf32_compile(launches: Launches) -> None:  # noqa: F811
    a = torch.zeros(2, 64, 64)
    products.multiply(a, a, 1.0, torch.zeros_like(a), True)
    assert "tf32" in compiled(launches[0], 90)


def test_their_operators_say_what_they_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch checks it, with a stand-in for each program that changes what that one does."""
    changed = {"powers": (1,), "add_columns": (1,), "multiply": (2,)}
    changed |= {"log_likelihood": (2, 3), "likelihood_back": (0,)}

    def stand_in(name: str, grid: Any, *arguments: Any, **constants: Any) -> None:
        for place in changed[name]:
            arguments[place].fill_(2.0)

    for file in (operators, losses, products):
        monkeypatch.setattr(file, "launch", stand_in)
    logits, targets, of_each = torch.randn(2, 3, 7), torch.zeros(2, 3, dtype=torch.int64), torch.randn(2, 3)
    a, b, out = torch.randn(2, 3, 4), torch.randn(2, 4, 5), torch.zeros(2, 3, 5)
    given: dict[str, tuple[Any, ...]] = {
        "add_columns": (torch.randn(2, 300, 5),),
        "multiply": (a, b, 0.5, out, False),
        "log_likelihood": (logits, targets),
        "likelihood_backward": (logits, targets, of_each, of_each, of_each, True),
    }
    for name, arguments in given.items():
        operator = getattr(torch.ops.stability_harness, name).default
        torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))


def test_gradients_take_no_second_array_of_the_size_of_the_logits() -> None:
    """On `meta`, where nothing is computed: the operators give what they say, and no more."""
    logits = torch.empty(2, 8, 50257, device="meta")
    targets: Tensor = torch.empty(2, 8, dtype=torch.int64, device="meta")
    found, log_z = losses.log_likelihood(logits, targets)
    assert found.shape == log_z.shape == targets.shape
    losses.likelihood_backward(logits, targets, log_z, log_z, log_z, False)
