"""Matrix products by a program of Triton, for those that cuBLAS rounds by how many there are."""

from __future__ import annotations

import torch
from torch import Tensor

from harness.kernels.launch import launch

HALF = {"LINES": 64, "COLUMNS": 64, "SOME": 32, "num_warps": 4, "num_stages": 3}
SINGLE = {"LINES": 64, "COLUMNS": 64, "SOME": 16, "num_warps": 4, "num_stages": 2}
DOUBLE = {"LINES": 32, "COLUMNS": 32, "SOME": 16, "num_warps": 8, "num_stages": 1}
TILES = {torch.bfloat16: HALF, torch.float16: HALF, torch.float32: SINGLE, torch.float64: DOUBLE}
LEAST = 16  # lines and columns of a tile


def multiply(a_GxMxK: Tensor, b_GxKxN: Tensor, scale: float, out_GxMxN: Tensor, tf32: bool) -> None:
    """scale x a @ b into `out`, whose columns follow one another. Bits go by one product's shape and strides alone."""
    torch.ops.stability_harness.multiply(a_GxMxK, b_GxKxN, scale, out_GxMxN, tf32)


@torch.library.custom_op("stability_harness::multiply", mutates_args=("out",))
def _multiply(a: Tensor, b: Tensor, scale: float, out: Tensor, tf32: bool) -> None:
    import triton.language as tl

    (groups, lines, inner), columns = a.shape, b.shape[-1]
    if out.stride(-1) != 1:
        raise ValueError("multiply: the columns of the result have to follow one another")
    sizes = dict(TILES[a.dtype])
    for name, length in (("LINES", lines), ("COLUMNS", columns)):
        sizes[name] = max(LEAST, min(sizes[name], 1 << (length - 1).bit_length()))
    tiles = -(-lines // sizes["LINES"]) * -(-columns // sizes["COLUMNS"])
    strides = (*a.stride(), *b.stride(), *out.stride()[:2])
    state = tl.float64 if a.dtype == torch.float64 else tl.float32
    constants = {"SCALE": scale, "FORM": "tf32" if tf32 else "ieee", "STATE": state, **sizes}
    launch("multiply", (groups * tiles,), *map(_first, (a, b, out)), lines, columns, inner, *strides, **constants)


@_multiply.register_fake
def _(a: Tensor, b: Tensor, scale: float, out: Tensor, tf32: bool) -> None:
    pass


def _first(x: Tensor) -> Tensor:
    """Where it begins: the program has its strides."""
    return x.as_strided((1,), (1,))
