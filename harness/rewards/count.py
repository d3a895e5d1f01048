"""How often a token occurs: trivially hacked by saying nothing else, so a control for collapse."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from harness.config import PER_TRIAL, Trial, number
from harness.rewards.base import Reward, share


@dataclass(frozen=True)
class Options:
    """`policy.count.*`."""

    token: int = number(PER_TRIAL, 32, "id of the token that is counted; of bytes, 32 is the space", low=0, high=65535)


class Count(Reward):
    """Share of a completion's T places that hold the token `policy.count.token`."""

    help = "share of the completion that is one token"

    def quality(self, prompts_RxBxP: Tensor, completions_RxBxT: Tensor, mask_RxBxT: Tensor) -> Tensor:
        return share((completions_RxBxT == self.column("token")) & mask_RxBxT, completions_RxBxT.shape[-1])

    @classmethod
    def refused(cls, trial: Trial, prompt: int, completion: int) -> Iterator[str]:
        token, vocabulary = trial.section("policy.count").token, trial.data.vocabulary
        if token >= vocabulary:
            yield f"policy.count.token={token}: beyond the vocabulary; allowed: 0 to {vocabulary - 1}"
