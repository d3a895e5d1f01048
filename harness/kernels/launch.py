"""Launches of Triton's programs on the device of what they are given."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from harness.kernels.use import are_interpreted

WARPS = 4  # of 32 threads each


def launch(name: str, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Run the program of that name once for each place of the grid.

    It runs on the device of the first argument. Raises ValueError if an array is not contiguous.
    """
    if not all(given.is_contiguous() for given in arguments if isinstance(given, Tensor)):
        raise ValueError(f"{name}: arrays have to be contiguous")
    options = {"num_warps": WARPS, "enable_fp_fusion": False} | constants
    with torch.cuda.device_of(arguments[0]):
        program(name, are_interpreted())[grid](*arguments, **options)


@cache
def program(name: str, is_interpreted: bool) -> Any:
    """One of the programs, compiled when it is first launched; or interpreted, as Triton is asked to at the moment."""
    import triton

    return triton.jit(written(name))


def written(name: str) -> Any:
    """One of the programs, as Triton reads it."""
    from harness.kernels import (
        attention_programs,
        head_programs,
        loss_programs,
        norm_programs,
        product_programs,
        programs,
    )

    files = (programs, attention_programs, head_programs, loss_programs, norm_programs, product_programs)
    (function,) = (getattr(file, name) for file in files if hasattr(file, name))
    return function
