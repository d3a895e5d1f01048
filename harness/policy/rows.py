"""What an objective that samples is shown of a step: the rows that pass, and who strikes in between."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from harness.config.names import Site


class SiteStrikes(Protocol):
    """Injectors at the sites of one step."""

    def __call__(self, site: Site, tensors: Callable[[int], Mapping[str, Tensor]]) -> None:
        """Show those that are due the tensors of their rows, by name."""

    def is_due(self, site: Site) -> bool:
        """Whether any is."""


@dataclass(frozen=True)
class PassingRows:
    """The rows of a step: weights [R, P], and the parts in which they pass through the model.

    `here` [R] are those that train in this pass. In no other anything changes.
    """

    weights: Tensor
    parts: Sequence[slice]
    here: Tensor


def picked(index_Rxb: Tensor | None, x_RxBxxx: Tensor) -> Tensor:
    """Those completions of what a rollout has of each, [R, b, ...]."""
    if index_Rxb is None:
        return x_RxBxxx
    index = index_Rxb.view(*index_Rxb.shape, *[1] * (x_RxBxxx.dim() - 2))
    return x_RxBxxx.gather(1, index.expand(*index_Rxb.shape, *x_RxBxxx.shape[2:]))
