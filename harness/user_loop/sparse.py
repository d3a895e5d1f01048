"""Sparse gradients as faults see them: dense, and sparse again afterwards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from harness.basics.tensor_bytes import byte_view


@contextmanager
def dense_views(gradients: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """The gradients by name, sparse ones as dense copies whose changes are put into the weights' gradients.

    Rows that were there stay there, even where they are zero, because a sparse optimizer updates the rows that a
    gradient has; rows that were changed are added.
    """
    dense = {name: g.to_dense() for name, g in gradients.items() if g.layout == torch.sparse_coo}
    before = {name: values.clone() for name, values in dense.items()}
    yield {**gradients, **dense}
    for name, values in dense.items():
        old = gradients[name].coalesce()
        dims = old.sparse_dim()
        rest = tuple(range(dims, values.dim()))
        # Bits are compared: what became NaN differs from itself, and zero is not minus zero.
        differs = byte_view(values) != byte_view(before[name])
        differs = differs.view(*values.shape, -1).any(-1)
        if not bool(differs.any()):
            continue
        keeps = differs.any(rest) if rest else differs
        keeps[tuple(old.indices())] = True
        places = keeps.nonzero().T
        kept = values[tuple(places)]
        weights[name].grad = torch.sparse_coo_tensor(
            places, kept, values.shape, check_invariants=True, is_coalesced=True
        )


def has_any(gradient: Tensor) -> bool:
    """Whether an element is not 0."""
    return bool((gradient._values() if gradient.layout == torch.sparse_coo else gradient).any())
