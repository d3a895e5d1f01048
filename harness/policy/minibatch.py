"""What one step trains on: the rows' last rollouts, or a part of each."""

from __future__ import annotations

from torch import Tensor

from harness.model import sums
from harness.policy.losses import mean_shares
from harness.policy.minibatches import picked
from harness.policy.rollouts import Rollouts


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
