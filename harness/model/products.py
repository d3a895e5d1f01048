"""Matrix products of a pack, a stack of them for each trial.

A CPU's BLAS may round differently where a matrix does not start on a boundary of memory (16 bytes on AMD's CPUs). The
first of an array does, and so does every trial's, if a trial takes whole cache lines. Otherwise where a trial starts
would depend on its row in the pack: then trials are copied and multiplied one by one.

On a GPU cuBLAS chooses a kernel by how many products there are, among others. Where the kernels that it takes round
differently (`harness.model.alike`), a program of Triton takes their place, which is told nothing of that.

Products in TF32 read float32 factors to 10 bits of mantissa, and sum in float32. On CUDA torch is told so for the call
alone, because other products of the same pack (spectral norms, readings) are not in TF32. A CPU rounds the factors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from harness.basics.devices import on_cpu
from harness.kernels import products
from harness.model import alike
from harness.model.formats import round_to_tf32
from harness.model.gradients import WithBackward, differentiable

CACHE_LINE = 64  # bytes
VECTOR = 16  # bytes that an accelerator reads at once
LARGE = 1024  # numbers in a line of a matrix that is worth a copy


def product(
    a_RxxxMxK: Tensor, b_RxxxKxN: Tensor, scale: float = 1.0, out: Tensor | None = None, tf32: bool = False
) -> Tensor:
    """scale x a @ b, [R, ..., M, N], in `out` if that is given, which holds nothing but the result; no gradient."""
    a, b = a_RxxxMxK, b_RxxxKxN
    if not on_cpu(a):
        return _on_accelerator(a, b, scale, out, tf32)
    out = a.new_empty(*a.shape[:-1], b.shape[-1]) if out is None else out
    if tf32:
        a, b = round_to_tf32(a), round_to_tf32(b)
    if start_alike(a, b, out):
        return _multiply(a, b, scale, out)
    for one_a, one_b, one_out in zip(a, b, out, strict=True):
        one_out.copy_(_multiply(one_a.clone()[None], one_b.clone()[None], scale, torch.empty_like(one_out)[None])[0])
    return out


def start_alike(*arrays: Tensor) -> bool:
    """Whether every trial's part of each array [R, ...] starts on a cache line."""
    places = 0
    for x in arrays:
        places |= x.data_ptr() | x.stride(0) * x.itemsize
    return places % CACHE_LINE == 0


# --- on an accelerator ---------------------------------------------------------------------------------------------


def _on_accelerator(a: Tensor, b: Tensor, scale: float, out: Tensor | None, tf32: bool) -> Tensor:
    columns = b.shape[-1]
    if _lacks(a, a.shape[-1]):  # zeros that are multiplied with zeros
        a, b = _filled(a, -1), _filled(b, -2)
    if _lacks(b, columns) and out is None:
        b = _filled(b, -1)
    a, b = _in_vectors(a), _in_vectors(b)
    out = a.new_empty(*a.shape[:-1], b.shape[-1]) if out is None else out
    with _in_tf32() if tf32 else contextlib.nullcontext():
        rows = alike.rows_at_once(a, b, tf32, _multiply) if len(a) > 1 and _is_cuda(a) else len(a)
        if not rows:
            products.multiply(a.flatten(0, -3), b.flatten(0, -3), scale, out.view(-1, *out.shape[-2:]), tf32)
        for first in range(0, len(a) if rows else 0, rows or 1):
            here = slice(first, first + rows)
            _multiply(a[here], b[here], scale, out[here])
    return out[..., :columns]


def _is_cuda(x: Tensor) -> bool:
    return x.device.type == "cuda"


# Where a matrix of half precision begins its lines, or ends, between two whole vectors, cuBLAS takes kernels that read
# number by number: on an H200 the gradient of a head with 50,257 columns took three times as long.


def _lacks(x: Tensor, length: int) -> int:
    """How many numbers a long line of so many lacks to be whole vectors."""
    return 0 if x.itemsize != 2 or length < LARGE else -length % (VECTOR // x.itemsize)


def _filled(x: Tensor, dim: int) -> Tensor:
    """A copy that has as many more zeros in a dim as are lacking."""
    shape = list(x.shape)
    shape[dim] += _lacks(x, shape[dim])
    keeps_order = x.stride(-1) == 1 or x.stride(-2) != 1
    filled = x.new_zeros(shape) if keeps_order else x.new_zeros(*shape[:-2], shape[-1], shape[-2]).mT
    filled.narrow(dim, 0, x.shape[dim]).copy_(x)
    return filled


def _in_vectors(x: Tensor) -> Tensor:
    """x, or a copy whose lines begin at whole vectors, if those of a large matrix do not."""
    lines = x if x.stride(-1) == 1 else x.mT
    lacking = _lacks(lines, lines.shape[-1])
    if not lacking or lines.stride(-1) != 1 or lines.stride(-2) * lines.itemsize % VECTOR == 0:
        return x
    apart = lines.new_empty(*lines.shape[:-1], lines.shape[-1] + lacking)[..., : lines.shape[-1]].copy_(lines)
    return apart if lines is x else apart.mT


@contextlib.contextmanager
def _in_tf32() -> Iterator[None]:
    """cuBLAS multiplies float32 in TF32 meanwhile."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "tf32"
    try:
        yield
    finally:
        matmul.fp32_precision = before


def _multiply(a: Tensor, b: Tensor, scale: float, out: Tensor) -> Tensor:
    flat = out.view(-1, *out.shape[-2:])
    torch.baddbmm(flat, a.flatten(0, -3), b.flatten(0, -3), beta=0, alpha=scale, out=flat)
    return out


@differentiable
def differentiable_product(a_RxxxMxK: Tensor, b_RxxxKxN: Tensor, tf32: bool = False) -> WithBackward[Tensor]:
    """`product`, through which gradients pass."""

    def backward(dy: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return product(dy, b.mT, tf32=tf32), product(a.mT, dy, tf32=tf32)

    return product(a_RxxxMxK, b_RxxxKxN, tf32=tf32), backward, (a_RxxxMxK, b_RxxxKxN)
