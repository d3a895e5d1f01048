"""Poisoned batches: the kinds of data that precede loss spikes, and what a broken data loader hands out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from harness.config import PER_TRIAL, number
from harness.faults.facts import Facts
from harness.faults.fault import InjectableFault
from harness.training.sites import Event, Site, SiteCall
from injectors.draws import stream
from injectors.fault import Strike, digest, random_tokens, too_late, whole_event


@dataclass(frozen=True)
class BatchFault(InjectableFault):
    """Base: a `share` of the sequences of each struck batch is replaced, the first ones."""

    start: int = number(PER_TRIAL, 100, "step of the first poisoned batch", low=0)
    duration: int | None = number(
        PER_TRIAL, 3, "steps from the first poisoned batch to the last; null: to the end", low=1
    )
    share: float = number(PER_TRIAL, 1.0, "share of the batch's sequences that is replaced", above=0, high=1)

    def asks(self) -> tuple[str, ...]:
        return ("context",)

    def arm(self, facts: Facts) -> Poison:
        return self.armed(Poison, Site.BATCH, facts, fault=self, facts=facts)

    def poison(self, facts: Facts, step: int, shape: tuple[int, int], seen: Tensor | None) -> np.ndarray | Tensor:
        """What takes the place of `shape` = (sequences, T + 1) tokens; `seen` is the last batch that was looked at."""
        raise NotImplementedError


@dataclass(frozen=True)
class RareTokens(BatchFault):
    """Tokens drawn uniformly from the rarest that the training text has (cf. PaLM, arXiv 2204.02311, section 5)."""

    kind: str = "rare_tokens"
    tokens: int = number(PER_TRIAL, 16, "how many of the rarest tokens to draw from", low=1, high=65536)

    def asks(self) -> tuple[str, ...]:
        return ("context", "token_counts")

    def poison(self, facts: Facts, step: int, shape: tuple[int, int], seen: Tensor | None) -> np.ndarray:
        occurring = np.flatnonzero(facts.token_counts)
        rarest = occurring[np.argsort(facts.token_counts[occurring], kind="stable")][: self.tokens]
        drawn = random_tokens(shape[0] * shape[1], len(rarest), *facts.key("rare", step))
        return np.asarray(rarest[drawn].reshape(shape))


@dataclass(frozen=True)
class RandomTokens(BatchFault):
    """Tokens drawn uniformly from the whole vocabulary: bytes of a file that is no text, an encoding gone wrong.

    Zhang et al. 2026, arXiv 2602.02400.
    """

    kind: str = "random_tokens"

    def asks(self) -> tuple[str, ...]:
        return ("context", "token_counts")

    def poison(self, facts: Facts, step: int, shape: tuple[int, int], seen: Tensor | None) -> np.ndarray:
        return random_tokens(shape[0] * shape[1], len(facts.token_counts), *facts.key("random", step)).reshape(shape)


@dataclass(frozen=True)
class Repetition(BatchFault):
    """Sequences that degenerate into one short pattern of the text, repeated (Walsh et al. 2025, arXiv 2501.00656).

    The first `length` tokens of each sequence repeat the `pattern` tokens that stand at its start.
    """

    kind: str = "repetition"
    pattern: int = number(PER_TRIAL, 1, "tokens of the pattern", low=1)
    length: int | None = number(PER_TRIAL, None, "tokens over which it repeats; null: the whole sequence", low=1)

    def refused(self, facts: Facts) -> Iterator[str]:
        for name, size in (("pattern", self.pattern), ("length", self.length)):
            if size is not None and size > facts.context:
                why = f"longer than {facts.said('model.context', facts.context)}"
                yield f"fault.{name}={size}: {why}; allowed: 1 to {facts.context}"

    def poison(self, facts: Facts, step: int, shape: tuple[int, int], seen: Tensor | None) -> Tensor:
        assert seen is not None
        batch = seen[: shape[0]].clone()
        length = shape[1] if self.length is None else self.length
        batch[:, :length] = batch[:, torch.arange(length, device=batch.device) % self.pattern]
        return batch


@dataclass(frozen=True)
class LongDocument(BatchFault):
    """One over-long stretch of text fills the struck batches: each sequence goes on where the one before it ended.

    Cf. Li et al. 2021, arXiv 2108.06084.
    """

    kind: str = "long_document"

    def asks(self) -> tuple[str, ...]:
        return ("context", "tokens")

    def poison(self, facts: Facts, step: int, shape: tuple[int, int], seen: Tensor | None) -> np.ndarray:
        sequences, length = shape
        text, strikes, block = facts.tokens, self.strike_steps(facts), sequences * (length - 1)
        wanted = len(strikes) * block + 1
        start = next(stream(*facts.key("document"))) % max(1, len(text) - wanted + 1) + strikes.index(step) * block
        # Each sequence begins with the token that the one before it ended with, as targets are inputs moved by one.
        places = start + np.arange(sequences)[:, None] * (length - 1) + np.arange(length)
        return np.asarray(text[places % len(text)], dtype=np.int64)


@dataclass(frozen=True)
class DuplicatedBatch(BatchFault):
    """The data loader hands out the batch of an earlier step again and again.

    Cf. Hernandez et al. 2022, arXiv 2205.10487.
    """

    kind: str = "duplicated_batch"
    late: int = number(PER_TRIAL, 1, "steps before the first strike at which the batch was first read", low=1)

    def asks(self) -> tuple[str, ...]:
        return ("batch",)

    def refused(self, facts: Facts) -> Iterator[str]:
        yield from too_late(self.late, self.start)

    def arm(self, facts: Facts) -> Poison:
        return replace(super().arm(facts), looks=((Site.BATCH, self.start - self.late),))

    def poison(self, facts: Facts, step: int, shape: tuple[int, int], seen: Tensor | None) -> Tensor:
        assert seen is not None
        return seen[: shape[0]]


@dataclass(kw_only=True)
class Poison(Strike):
    """Replaces the first sequences of the batch."""

    fault: BatchFault
    facts: Facts
    _seen: Tensor | None = None
    remembers = ("_seen",)

    def look(self, site_call: SiteCall) -> None:
        self._seen = site_call.tensors["batch"].clone()

    def strike(self, site_call: SiteCall) -> list[Event]:
        batch, before = site_call.tensors["batch"], digest(site_call.tensors["batch"])
        sequences = max(1, round(self.fault.share * batch.shape[0]))
        seen = batch if self._seen is None else self._seen
        tokens = self.fault.poison(self.facts, site_call.step, (sequences, batch.shape[1]), seen)
        batch[:sequences] = torch.as_tensor(tokens, dtype=batch.dtype, device=batch.device)
        return whole_event(site_call, "batch", before, [batch])
