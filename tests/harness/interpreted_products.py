"""The program of products in Triton's interpreter, on a CPU, against torch's own.

Run by test_kernels.py in a process of its own, with TRITON_INTERPRET=1: Triton looks at it when it is imported.
"""

from __future__ import annotations

import pytest
import torch

from harness.kernels.products import multiply
from harness.testing.engine import bits
from tests.harness.interpreting import interpreted  # noqa: F401

SHAPES = [(1, 1, 1), (3, 5, 7), (16, 16, 16), (64, 65, 33), (130, 20, 64), (17, 130, 100)]


def normal(*shape: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize(
    ("dtype", "lies"),
    [
        (torch.float32, "as it is"),
        (torch.float32, "turned"),
        (torch.float32, "apart"),
        (torch.float64, "turned"),
        (torch.bfloat16, "apart"),
        (torch.float16, "as it is"),
    ],
)
@pytest.mark.parametrize("shape", SHAPES)
def test_products_are_right_and_go_by_the_row_alone(shape, dtype, lies):
    """Of matrices that lie as they are, turned, or in larger ones, which the result may do too."""
    lines, inner, columns = shape
    a, b = normal(3, lines, inner, seed=0, dtype=dtype), normal(3, inner, columns, seed=1, dtype=dtype)
    out = torch.full((3, lines, columns + 5), 7.0, dtype=dtype)
    if lies == "turned":
        a, b = a.mT.contiguous().mT, b.mT.contiguous().mT
    if lies == "apart":
        a = torch.cat((a, a), 2)[:, :, :inner]
        b = torch.cat((b, b), 1)[:, :inner]
    multiply(a, b, 0.5, out[..., :columns], False)
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-13, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
    expected = 0.5 * a.double() @ b.double()
    torch.testing.assert_close(out[..., :columns].double(), expected, rtol=tolerance, atol=tolerance * inner**0.5)
    assert (out[..., columns:] == 7.0).all()
    for row in range(3):
        one = torch.empty(1, lines, columns, dtype=dtype)
        multiply(a[row : row + 1], b[row : row + 1], 0.5, one, False)
        assert torch.equal(bits(one[0]), bits(out[row, :, :columns].contiguous()))


def test_columns_of_the_result_follow_one_another():
    a = torch.ones(2, 4, 4)
    with pytest.raises(ValueError, match="multiply: the columns of the result have to follow one another"):
        multiply(a, a, 1.0, torch.empty(2, 4, 4).mT, False)
