"""Balanced brackets: a structure that can be verified."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.config import PER_TRIAL, STRUCTURAL, Trial, anything, number
from harness.rewards.base import Reward, cumulated


@dataclass(frozen=True)
class Options:
    """`policy.brackets.*`."""

    opens: int = number(PER_TRIAL, 40, "id of the token that opens; of bytes, 40 is (", low=0, high=65535)
    closes: int = number(PER_TRIAL, 41, "id of the token that closes; of bytes, 41 is )", low=0, high=65535)
    exact: bool = anything(
        STRUCTURAL, False, "1 for a completion that is balanced as a whole and 0 otherwise, instead of a share"
    )


class Brackets(Reward):
    """Length of the longest balanced beginning of the completion, which holds nothing but brackets, over T."""

    help = "length of the balanced beginning of the completion"

    def quality(self, prompts_RxBxP: Tensor, completions_RxBxT: Tensor, mask_RxBxT: Tensor) -> Tensor:
        opens, closes = (completions_RxBxT == self.column(name) for name in ("opens", "closes"))
        depth = cumulated(opens.long() - closes.long())
        is_wrong = ~(opens | closes) | (depth < 0) | ~mask_RxBxT
        is_balanced = (cumulated(is_wrong.long()) == 0) & (depth == 0)
        length = completions_RxBxT.shape[-1]
        places = torch.arange(1, length + 1, device=depth.device)
        longest = torch.where(is_balanced, places, 0).amax(-1)
        return (longest == length).double() if self.options[0].exact else longest.double() / length

    @classmethod
    def refused(cls, trial: Trial, prompt: int, completion: int) -> Iterator[str]:
        options, vocabulary = trial.section("policy.brackets"), trial.data.vocabulary
        for name in ("opens", "closes"):
            if (token := getattr(options, name)) >= vocabulary:
                key = f"policy.brackets.{name}={token}"
                yield f"{key}: beyond the vocabulary; allowed: 0 to {vocabulary - 1}"
        if options.opens == options.closes:
            yield f"policy.brackets.closes={options.closes}: opens too; allowed: another token"
        if options.exact and completion % 2:
            length = f"completions have {completion} tokens"
            yield f"policy.brackets.exact=true: {length}, an odd number; allowed: false, or another policy.prompt"
