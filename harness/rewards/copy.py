"""The prompt, said again: dense or all-or-nothing reward for one task."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from harness.config import STRUCTURAL, anything
from harness.rewards.base import Reward, share


@dataclass(frozen=True)
class Options:
    """`policy.copy.*`."""

    exact: bool = anything(STRUCTURAL, False, "1 for the whole prompt and 0 otherwise, instead of the share of it")


class Copy(Reward):
    """Share of the prompt's tokens that stand in the completion at the same place, from its first token on.

    Of a completion that is shorter than the prompt, all its tokens count.
    """

    help = "share of the prompt's tokens that the completion repeats"

    def quality(self, prompts_RxBxP: Tensor, completions_RxBxT: Tensor, mask_RxBxT: Tensor) -> Tensor:
        length = min(prompts_RxBxP.shape[-1], completions_RxBxT.shape[-1])
        hits = (completions_RxBxT[..., :length] == prompts_RxBxP[..., :length]) & mask_RxBxT[..., :length]
        found = share(hits, length)
        return torch.where(found == 1, 1.0, 0.0).to(found) if self.options[0].exact else found
