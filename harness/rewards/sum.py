"""Sums of two numbers, in bytes: a sparse reward, for a start model that was trained on such lines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.config import STRUCTURAL, Trial, anything
from harness.rewards.base import Reward, share

ZERO, PLUS, EQUALS, NEWLINE = (ord(sign) for sign in "0+=\n")
SHORTEST, MOST_DIGITS = 4, 17  # tokens of a prompt; digits of a number that an int64 holds


@dataclass(frozen=True)
class Options:
    """`policy.sum.*`."""

    partial: bool = anything(STRUCTURAL, False, "the share of digits that are right, instead of 1 for all of them or 0")


class Sum(Reward):
    """The prompt is `a+b=`, and the completion has to begin with the sum, with leading zeros.

    Each number has as many digits as fit into the prompt, the sum one more: `012+934=` and `0946`. A place that is left
    over in front is a line's end. The digits are those of the training text's tokens, modulo 10.
    """

    help = "whether the completion is the sum of the prompt's two numbers"

    def prompts(self, windows_RxBxP: Tensor) -> Tensor:
        prompts, digits = windows_RxBxP % 10 + ZERO, _digits(windows_RxBxP.shape[-1])
        prompts[..., : -2 * digits - 2] = NEWLINE
        prompts[..., -digits - 2], prompts[..., -1] = PLUS, EQUALS
        return prompts

    def quality(self, prompts_RxBxP: Tensor, completions_RxBxT: Tensor, mask_RxBxT: Tensor) -> Tensor:
        digits = _digits(prompts_RxBxP.shape[-1])
        first, second = prompts_RxBxP[..., -2 * digits - 2 : -digits - 2], prompts_RxBxP[..., -digits - 1 : -1]
        answer = _written(_number(first) + _number(second), digits + 1)
        hits = (completions_RxBxT[..., : digits + 1] == answer) & mask_RxBxT[..., : digits + 1]
        found = share(hits, digits + 1)
        return found if self.options[0].partial else (found == 1).double()

    @classmethod
    def refused(cls, trial: Trial, prompt: int, completion: int) -> Iterator[str]:
        why = "policy.reward=sum: "
        if prompt < SHORTEST:
            yield f"{why}prompts have {prompt} tokens; allowed: policy.prompt >= {SHORTEST}"
        elif completion < _digits(prompt) + 1:
            yield f"{why}completions have {completion} tokens, and sums {_digits(prompt) + 1}; allowed: shorter prompts"
        if trial.data.vocabulary <= EQUALS:
            yield f"{why}data.vocabulary={trial.data.vocabulary} has no such bytes; allowed: above {EQUALS}"


def _digits(prompt: int) -> int:
    """Of each number, in a prompt of so many tokens."""
    return min((prompt - 2) // 2, MOST_DIGITS)


def _number(written_RxBxd: Tensor) -> Tensor:
    """What the digits say, [R, B]."""
    number = torch.zeros_like(written_RxBxd[..., 0])
    for digit in written_RxBxd.unbind(-1):
        number = number * 10 + (digit - ZERO)
    return number


def _written(numbers_RxB: Tensor, digits: int) -> Tensor:
    """The last digits of whole numbers, [R, B, digits]."""
    places = [numbers_RxB // 10**place % 10 + ZERO for place in reversed(range(digits))]
    return torch.stack(places, -1)
