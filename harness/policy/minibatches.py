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
from harness.model import sums
from harness.policy.losses import mean_shares
from harness.policy.rollouts import Rollouts
from harness.policy.rows import picked
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


class Minibatch:
    """What a step trains on of the rows' last rollouts: as `Rollouts` names it, of b completions.

    `share` and `token_share` [R, b] are weights in the mean that is asked for, and in one over all tokens
    (`mean_shares`). `quality` is that of each completion; of a part, the mean over the whole rollout.
    """

    def __init__(self, rollouts: Rollouts, index_Rxb: Tensor | None, mean: str):
        def of(x_RxBxxx: Tensor) -> Tensor:
            return picked(index_Rxb, x_RxBxxx)

        self.tokens, self.mask, self.advantages = of(rollouts.tokens), of(rollouts.mask), of(rollouts.advantages)
        self.old, self.behaviour, self.reference = of(rollouts.old), of(rollouts.behaviour), of(rollouts.reference)
        kept = rollouts.values_and_returns
        self.values_and_returns = None if kept is None else (of(kept[0]), of(kept[1]))
        self.share, self.token_share = (mean_shares(self.mask, over, self.old.dtype) for over in (mean, "tokens"))
        self.quality = rollouts.quality
        if index_Rxb is not None:
            self.quality = sums.mean(rollouts.quality)[:, None].expand(index_Rxb.shape)
