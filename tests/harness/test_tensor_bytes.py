"""The bytes of a tensor, however it was cut out of another one, and whoever needs them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from harness.basics.tensor_bytes import byte_view
from harness.storage.sealed import read_sealed, write_sealed
from harness.user_loop.inputs import checksum
from harness.user_loop.tokens import as_rows
from injectors.fault import digest

TABLE = torch.arange(45, dtype=torch.float64).reshape(5, 9)
CUTS: dict[str, Callable[[], Tensor]] = {
    "one of a column": lambda: TABLE[:1, 3],
    "a column of one": lambda: TABLE.T[:, 2:3],
    "a column": lambda: TABLE[:, 3],
    "turned": lambda: TABLE.T,
    "in the middle": lambda: TABLE[2:4],
    "one number": lambda: TABLE[2, 3],
    "none": lambda: TABLE[:0],
    "expanded": lambda: TABLE[:1, 3].expand(4),
    "bf16": lambda: TABLE.to(torch.bfloat16)[:1, 4],
    "bool": lambda: (TABLE > 20)[:, 8],
    "conjugated": lambda: torch.complex(TABLE, TABLE + 1)[:1, 2].conj(),
    "its imaginary part": lambda: torch.complex(TABLE, TABLE + 1).conj().imag[:, 3],
    "a parameter": lambda: torch.nn.Parameter(TABLE)[:1, 3],
}


@pytest.fixture(params=CUTS)
def cut(request: pytest.FixtureRequest) -> Tensor:
    return CUTS[request.param]()


def whole(x: Tensor) -> Tensor:
    """The same numbers in a tensor of its own."""
    made = torch.zeros(x.numel(), dtype=x.dtype)
    for place, value in enumerate(x.detach().reshape(-1).tolist()):
        made[place] = value
    return made


def test_they_are_those_of_its_elements_in_order(cut: Tensor) -> None:
    assert byte_view(cut).tolist() == whole(cut).view(torch.uint8).tolist()


def test_everyone_who_reads_them_takes_any_tensor(cut: Tensor, tmp_path: Path) -> None:
    assert digest(cut) == digest(whole(cut)) and checksum(cut) == checksum(whole(cut))
    if not cut.is_complex():
        write_sealed(tmp_path / "file", {"x": cut}, {}, 1)
        kept, _ = read_sealed(tmp_path / "file", 1)
        assert torch.equal(kept["x"], cut)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_batch_of_odd_parts_is_cut_into_rows_and_put_together(rows: int) -> None:
    """Three bytes of a mask come before numbers of eight: with one sample these lie at no multiple of eight."""
    mask, labels = torch.ones(rows, 3, dtype=torch.bool), TABLE.T[:rows, 2:3]
    values, put = as_rows([mask, labels, TABLE[:rows]], "duplicated_batch")
    assert values.shape == (rows, 3 + 8 + 72)
    again = put(values)
    assert all(torch.equal(one, other) for one, other in zip(again, [mask, labels, TABLE[:rows]], strict=True))
