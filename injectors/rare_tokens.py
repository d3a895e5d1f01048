"""Batches of the corpus' rarest tokens: the kind of data that precedes loss spikes under a slow beta2."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from harness.config import PER_TRIAL, number
from harness.sites import Event, Site
from injectors.fault import FaultContext, InjectableFault


@dataclass(frozen=True)
class RareTokens(InjectableFault):
    """Replace sequences of the batch by tokens drawn uniformly from the rarest that the training text has."""

    kind: str = "rare_tokens"
    start: int = number(PER_TRIAL, 100, "step of the first poisoned batch", low=0)
    duration: int = number(PER_TRIAL, 3, "poisoned batches in a row", low=1)
    tokens: int = number(PER_TRIAL, 16, "how many of the rarest tokens to draw from", low=1)
    share: float = number(PER_TRIAL, 1.0, "share of the batch's sequences that is replaced", above=0, high=1)

    def arm(self, context: FaultContext) -> _Poison:
        occurring = np.flatnonzero(context.token_counts)
        rarest = occurring[np.argsort(context.token_counts[occurring], kind="stable")][: self.tokens]
        return _Poison(self.steps, tuple(int(token) for token in rarest), self.share, context)


@dataclass(frozen=True)
class _Poison:
    steps: range
    rarest: tuple[int, ...]
    share: float
    context: FaultContext
    site: Site = Site.BATCH

    def strike(self, tensors: Mapping[str, Tensor], step: int) -> list[Event]:
        batch = tensors["batch"]
        sequences = max(1, round(self.share * batch.shape[0]))
        before = _digest(batch)
        drawn = self.context.generator(step).choice(self.rarest, size=(sequences, batch.shape[1]))
        batch[:sequences] = torch.as_tensor(drawn, dtype=batch.dtype, device=batch.device)
        after = _digest(batch)
        return [Event(self.site, "batch", None, None, step, before, after, None, None, before != after)]


def _digest(batch: Tensor) -> str:
    return hashlib.sha256(batch.cpu().numpy().tobytes()).hexdigest()
