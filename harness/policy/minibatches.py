"""Parts of a rollout: which of its completions train in which of its optimizer steps (`policy.minibatches`).

The first M steps go once over all completions, in M parts of equal size, the next M again, in another order. Orders are
functions of the data's seed, the rollout and the pass over it, so they need no state. Completions of a group may part:
their advantages are known by then, and TRL 1.16 mixes them likewise.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from harness.basics.devices import sent
from harness.policy.sampling import streams_of, uniforms

PLACE = "policy.minibatches"


class Minibatches:
    """Of rollouts of `batch` completions, in `count` parts, each of which `updates` steps train on."""

    def __init__(self, count: int, batch: int, updates: int, device: torch.device):
        self.count, self.size = count, batch // count
        self._batch, self._updates, self._device = batch, updates, device

    def stand_at(self, seeds: Sequence[int], steps: Sequence[int]) -> None:
        """Rows of these seeds are at these steps of theirs: what the host knows of it."""
        if self.count == 1:
            return
        passes, parts = zip(*(divmod(step % self._updates, self.count) for step in steps), strict=True)
        of_rows = zip(seeds, steps, passes, strict=True)
        streams = [streams_of([seed], [step // self._updates], [f"{PLACE} {each}"])[0] for seed, step, each in of_rows]
        self._streams = sent(torch.cat(streams), self._device)
        self._firsts = sent(torch.tensor(parts) * self.size, self._device)

    def index(self) -> Tensor | None:
        """Which completions train in this step, int64 [R, b]; None: all, as they are."""
        if self.count == 1:
            return None
        order = uniforms(self._streams, (self._batch,)).argsort(dim=1, stable=True)
        places = self._firsts[:, None] + torch.arange(self.size, device=self._device)
        return order.gather(1, places)


def picked(index_Rxb: Tensor | None, x_RxBxxx: Tensor) -> Tensor:
    """Those completions of what a rollout has of each, [R, b, ...]."""
    if index_Rxb is None:
        return x_RxBxxx
    index = index_Rxb.view(*index_Rxb.shape, *[1] * (x_RxBxxx.dim() - 2))
    return x_RxBxxx.gather(1, index.expand(*index_Rxb.shape, *x_RxBxxx.shape[2:]))
