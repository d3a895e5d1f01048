"""What every reward shares: what it is shown, and what it gives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from harness.basics.devices import on_cpu
from harness.config import Trial
from harness.data.corpus import Corpus


class Reward:
    """Base of the rewards: made for a pack, keeps nothing, never waits for the device.

    What it gives of a sequence depends on that sequence and its trial alone. `options` are those of the section
    `policy.NAME` of each row; a reward without `Options` has none.
    """

    help: ClassVar[str]  # what is rewarded

    def __init__(self, vocabulary: int, device: torch.device):
        self.vocabulary, self.device = vocabulary, device

    def read(self, corpus: Corpus) -> None:
        """See the training text, once, before anything else; by default nothing is kept of it."""

    def bind(self, options: Sequence[Any]) -> None:
        """Work on the rows in use from now on, which have these options."""
        self.options = options
        names = [] if options[0] is None else [name for name, value in vars(options[0]).items() if type(value) is int]
        self._columns = {
            name: torch.tensor([getattr(one, name) for one in options], device=self.device)[:, None, None]
            for name in names
        }

    def column(self, field: str) -> Tensor:
        """A whole number of each row's options, int64 [R, 1, 1]."""
        return self._columns[field]

    def prompts(self, windows_RxBxP: Tensor) -> Tensor:
        """The prompts, int64 [R, B, P], of windows of the training text; by default these themselves."""
        return windows_RxBxP

    def quality(self, prompts_RxBxP: Tensor, completions_RxBxT: Tensor, mask_RxBxT: Tensor) -> Tensor:
        """What each completion is worth, float64 [R, B], from 0 to 1.

        Args:
            prompts_RxBxP: Token ids.
            completions_RxBxT: Token ids.
            mask_RxBxT: Which of them belong to the completion: those up to the token that ends it.
        """
        raise NotImplementedError

    @classmethod
    def refused(cls, trial: Trial, prompt: int, completion: int) -> Iterator[str]:
        """Why a trial whose prompts and completions have so many tokens cannot be rewarded so, a sentence each."""
        yield from ()


def share(hits_RxBxT: Tensor, of: int) -> Tensor:
    """How many are true, over `of`: float64 [R, B]."""
    return hits_RxBxT.sum(-1).double() / of


def repeated(tokens_RxBxT: Tensor, mask_RxBxT: Tensor) -> Tensor:
    """Of each completion, the share of its pairs of neighbours that it had before, float64 [R, B]; 0 without pairs."""
    pairs = torch.where(mask_RxBxT[..., 1:], tokens_RxBxT[..., :-1] * 2**32 + tokens_RxBxT[..., 1:], -1)
    counts = mask_RxBxT[..., 1:].sum(-1)
    return (occurred(pairs) & mask_RxBxT[..., 1:]).sum(-1).double() / counts.clamp(min=1)


def occurred(values_xxxn: Tensor) -> Tensor:
    """Which numbers along the last dim stand there before, too, [..., n]."""
    equal = values_xxxn[..., :, None] == values_xxxn[..., None, :]
    return equal.tril(-1).any(-1)


def cumulated(x_Rxxx: Tensor) -> Tensor:
    """The running sum along the last dim, whose order does not depend on the number of rows.

    On an accelerator torch cuts the scan as it likes; there each number is added to the one so many places before it.
    """
    if on_cpu(x_Rxxx):
        return x_Rxxx.cumsum(-1)
    ahead = 1
    while ahead < x_Rxxx.shape[-1]:
        x_Rxxx = torch.cat((x_Rxxx[..., :ahead], x_Rxxx[..., ahead:] + x_Rxxx[..., :-ahead]), -1)
        ahead *= 2
    return x_Rxxx
