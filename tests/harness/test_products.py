"""Products of a pack: right, and the same bits for a trial wherever it stands."""

from __future__ import annotations

import itertools
from functools import cache

import pytest
import torch

from harness.model.products import differentiable_product, product, start_alike

SIZES = [1, 2, 7, 10, 16, 33, 65]


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@cache
def operand(seed, *shape):
    """Seven trials' numbers."""
    return numbers(7, *shape, seed=seed)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("left, right", [(False, True), (False, False), (True, False)])
def test_a_product_has_the_same_bits_in_every_pack(left, right, threads):
    """Every order of the operands in memory that a layer uses, `left` and `right` say which is transposed."""
    torch.set_num_threads(threads)
    for m, n, k, stack in itertools.product(SIZES, SIZES, SIZES, [(), (3,)]):
        a = operand(0, *stack, *((k, m) if left else (m, k)))
        b = operand(1, *stack, *((n, k) if right else (k, n)))
        together = product(*_turned(a, b, left, right), 0.5)
        exact = torch.matmul(*_turned(a.double(), b.double(), left, right)).mul_(0.5)
        assert torch.allclose(together.double(), exact, rtol=1e-5, atol=1e-5), (m, n, k, stack)
        for members in ([5, 3], [6, 2, 4]):
            apart = product(*_turned(a[members], b[members], left, right), 0.5)
            assert torch.equal(apart, together[members]), (m, n, k, stack)


def _turned(a, b, left, right):
    return a.mT if left else a, b.mT if right else b


def test_gradients_pass_through_a_product_of_trials_that_do_not_start_alike():
    a, b = numbers(3, 2, 5, 7).double().requires_grad_(), numbers(3, 2, 7, 3, seed=1).double().requires_grad_()
    assert not start_alike(a)
    torch.testing.assert_close(differentiable_product(a, b), torch.matmul(a, b))
    assert torch.autograd.gradcheck(differentiable_product, (a, b))


def test_a_result_goes_where_it_is_asked_to():
    flat = torch.full((3, 50), 9.0)
    out = flat[:, 5:40].view(3, 5, 7)
    a, b = numbers(3, 5, 4), numbers(3, 4, 7, seed=1)
    assert product(a, b, out=out) is out
    torch.testing.assert_close(out, torch.bmm(a, b))
    assert (flat[:, :5] == 9).all() and (flat[:, 40:] == 9).all()
