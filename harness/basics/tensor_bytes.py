"""The bytes of a tensor, whatever its type and strides are."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # this folder is loaded where torch is not needed
    from torch import Tensor


def byte_view(x: Tensor) -> Tensor:
    """Its bytes in the order of its elements, uint8 [elements x bytes of one]; a copy where they do not lie so.

    `view` alone refuses a tensor of one element that was cut out of a column: contiguous, but of another stride.
    """
    import torch

    flat = x.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)
