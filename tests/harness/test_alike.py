"""Products whose bits go by how many there are, found out and done otherwise; and lines of whole vectors."""

from __future__ import annotations

import pytest
import torch

from harness.basics import devices
from harness.model import alike, products
from harness.model.products import LARGE, product


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alike, "_KNOWN", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


def fickle(most: int):
    """A library that adds up in another order where there are more products than so many."""

    def multiply(a, b, scale, out):
        turned = -1 if len(a) > most else 1
        for x, y, target in zip(a, b, out, strict=True):
            target.copy_(scale * sum(x[:, [k]] * y[[k]] for k in range(x.shape[1])[::turned]))
        return out

    return multiply


@pytest.mark.parametrize(("most", "expected"), [(2, 0), (8, 0), (16, 16), (64, 64), (1000, 256)])
def test_as_many_rows_at_once_as_leave_the_same_bits(monkeypatch, most, expected):
    a, b = torch.randn(3, 5, 100), torch.randn(3, 100, 7)
    monkeypatch.setattr(alike, "are_used", lambda device: True)
    assert alike.rows_at_once(a, b, False, fickle(most)) == expected
    assert alike.rows_at_once(a[:2], b[:2], False, None) == expected, "it is known by now, whatever R is"
    alike._KNOWN.clear()
    monkeypatch.setattr(alike, "are_used", lambda device: False)
    assert alike.rows_at_once(a, b, False, fickle(most)) == (expected or most), "without programs in small pieces"


def test_nothing_is_tried_while_a_graph_is_recorded(monkeypatch):
    a, b = torch.randn(2, 3, 4), torch.randn(2, 4, 5)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="a product of a kind that has not been done before"):
        alike.rows_at_once(a, b, False, fickle(100))


def test_the_users_random_numbers_stay(monkeypatch):
    torch.manual_seed(0)
    before = torch.get_rng_state()
    alike.rows_at_once(torch.randn(2, 3, 4, generator=torch.Generator()), torch.ones(2, 4, 5), False, fickle(100))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("most", [0, 2, 16])
def test_a_product_is_done_in_pieces_or_by_the_program(monkeypatch, most):
    called: list[int] = []
    multiplied = products._multiply
    monkeypatch.setattr(devices, "CPUS", ())
    monkeypatch.setattr(alike, "rows_at_once", lambda *_: most)
    monkeypatch.setattr(products, "_multiply", lambda a, *rest: (called.append(len(a)), multiplied(a, *rest))[1])
    by_program = lambda a, b, scale, out, tf32: (called.append(-len(a)), out.copy_(scale * a @ b))  # noqa: E731
    monkeypatch.setattr(products.products, "multiply", by_program)
    a, b = torch.randn(5, 2, 3, 4), torch.randn(5, 2, 4, 6)
    monkeypatch.setattr(products, "_is_cuda", lambda x: True)
    found = product(a, b, 0.5)
    torch.testing.assert_close(found, 0.5 * a @ b)
    assert called == {0: [-10], 2: [2, 2, 1], 16: [5]}[most]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("place", ["columns", "inner", "lines"])
def test_long_lines_are_filled_up_to_whole_vectors(monkeypatch, dtype, place):
    """In half precision, as large vocabularies are; the result has the shape that it should have, and its numbers."""
    sizes = {"lines": 3, "inner": 5, "columns": 6} | {place: LARGE + 1}
    a = torch.randn(2, sizes["lines"], sizes["inner"]).to(dtype)
    b = torch.randn(2, sizes["inner"], sizes["columns"]).to(dtype)
    expected = product(a.float(), b.float())
    monkeypatch.setattr(devices, "CPUS", ())
    seen = []
    multiplied = products._multiply
    monkeypatch.setattr(products, "_multiply", lambda a, b, *rest: (seen.append((a, b)), multiplied(a, b, *rest))[1])
    for one, other in ((a, b), (a.mT.contiguous().mT, b), (a, b.mT.contiguous().mT)):
        found = product(one, other)
        assert found.shape == expected.shape
        torch.testing.assert_close(found.float(), expected, rtol=2e-2, atol=0.5)
        if dtype == torch.bfloat16:
            for x in seen[-1]:
                lines = x if x.stride(-1) == 1 else x.mT
                assert lines.shape[-1] < LARGE or lines.stride(-2) % 8 == 0
