"""Triton's interpreter with the arithmetic of a GPU, for files of tests that run in it.

They are run by test_kernels.py in a process of their own, with TRITON_INTERPRET=1: Triton looks at it when imported.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from harness.basics import devices
from harness.kernels import use
from harness.testing import engine

CAST = InterpreterBuilder.cast_impl
SMALLER = {"depth": 1, "validate_tokens": 16, "validate_between": 16, "validate_every": 2}  # what takes longest


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Data on a CPU takes an accelerator's ways, on which Triton interprets its programs."""
    assert use.are_interpreted()
    monkeypatch.setattr(devices, "CPUS", ())
    for name, value in SMALLER.items():
        monkeypatch.setitem(engine.SMALL, name, value)
    monkeypatch.setattr(interpreter, "_patch_builtin", patch_builtins)
    monkeypatch.setattr(InterpreterBuilder, "create_fma", fused)
    monkeypatch.setattr(InterpreterBuilder, "cast_impl", rounded)
    monkeypatch.setattr(InterpreterBuilder, "create_dot", product)
    with np.errstate(all="ignore"):
        yield


ASKING = [  # whether there are programs
    "harness.model.attention",
    "harness.model.layers",
    "harness.model.sums",
    "harness.objectives.loss",
    "harness.optim.clipping",
    "harness.optim.optimizers.adamw",
    "harness.readings.base",
]


def alone(monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    """The programs of these modules alone: to interpret those of the others, too, takes minutes."""
    for name in ASKING:
        if name not in modules:
            monkeypatch.setattr(f"{name}.are_used", lambda device: False)


@cache
def builtins_of(package: Any) -> list[tuple[str, Any]]:
    return [(name, member) for name, member in inspect.getmembers(package) if tl.core.is_builtin(member)]


def patch_builtins(package: Any, builder: Any, scope: Any) -> None:
    """As the interpreter does before each launch, and within it; to look for them takes a fifth of the time."""
    known = builtins_of(package)
    if known and getattr(package, known[0][0]) is known[0][1]:  # not patched yet
        for name, member in known:
            interpreter._patch_attr(package, name, member, builder, scope)


def fused(_: Any, x: TensorHandle, y: TensorHandle, z: TensorHandle) -> TensorHandle:
    """x y + z, rounded once, as on a GPU: the interpreter has none of its own, and rounds twice."""
    a, b, c = x.data, y.data, z.data
    with np.errstate(all="ignore"):
        if c.dtype == np.float32:
            return TensorHandle((a.astype(np.float64) * b + c).astype(np.float32), z.dtype.scalar)
        product, rest = _product(*np.broadcast_arrays(a, b))
        total = product + c
        back = total - product
        rest = rest + ((product - (total - back)) + (c - back))
        return TensorHandle(np.where(np.isfinite(rest), total + rest, total), z.dtype.scalar)


def _product(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The float64 product and what it lacks (Dekker 1971)."""
    (high_a, low_a), (high_b, low_b) = ((high := x * 134217729.0 - (x * 134217729.0 - x), x - high) for x in (a, b))
    product = a * b
    return product, ((high_a * high_b - product) + high_a * low_b + low_a * high_b) + low_a * low_b


def rounded(builder: Any, source: TensorHandle, to: Any) -> TensorHandle:
    """A cast, to bfloat16 too, to the nearest number: there the interpreter cuts digits off."""
    if (source.dtype.scalar, to.scalar) != (tl.float32, tl.bfloat16):
        return CAST(builder, source, to)
    near = torch.from_numpy(np.ascontiguousarray(source.data)).bfloat16().view(torch.uint16).numpy()
    return TensorHandle(near, to.scalar)  # kept in 16 bits


def product(_: Any, a: TensorHandle, b: TensorHandle, c: TensorHandle, *others: Any) -> TensorHandle:
    """a b + c: the interpreter takes the bits of bf16 for whole numbers."""
    left, right = (
        (x.data.astype(np.uint32) << 16).view(np.float32) if x.dtype.scalar == tl.bfloat16 else x.data for x in (a, b)
    )
    return TensorHandle(np.matmul(left, right, dtype=c.data.dtype) + c.data, c.dtype.scalar)
