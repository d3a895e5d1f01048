"""Matrix products of a pack, a stack of them for each trial.

A CPU's BLAS may round differently where a matrix does not start on a boundary of memory (16 bytes on AMD's CPUs). The
first of an array does, and so does every trial's, if a trial takes whole cache lines. Otherwise where a trial starts
would depend on its row in the pack: then trials are copied and multiplied one by one.

Products in TF32 read float32 factors to 10 bits of mantissa, and sum in float32. On CUDA torch is told so for the call
alone, because other products of the same pack (spectral norms, readings) are not in TF32. A CPU rounds the factors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from harness.basics.devices import on_cpu
from harness.model.formats import round_to_tf32
from harness.model.gradients import WithBackward, differentiable

CACHE_LINE = 64  # bytes


def product(
    a_RxxxMxK: Tensor, b_RxxxKxN: Tensor, scale: float = 1.0, out: Tensor | None = None, tf32: bool = False
) -> Tensor:
    """scale x a @ b, [R, ..., M, N], in `out` if that is given, which holds nothing but the result; no gradient."""
    a, b = a_RxxxMxK, b_RxxxKxN
    if out is None:
        out = a.new_empty(*a.shape[:-1], b.shape[-1])
    if not on_cpu(a):
        with _in_tf32() if tf32 else contextlib.nullcontext():
            return _multiply(a, b, scale, out)
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
