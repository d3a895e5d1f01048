"""Batches for a whole pack: the windows that trial r reads at a step follow from its seed and the step alone.

Where a window starts is a hash, not a draw from a generator, so there is no state: nothing to store, to restore after
a rollback, or to keep in step with other trials.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from harness.config.limits import SEGMENTS
from harness.data.corpus import Corpus
from harness.data.tokenizer import Tokens

GOLDEN = 0x9E3779B97F4A7C15
"""2^64 over the golden ratio: the increment of splitmix64."""
OTHERS_KEPT = 2  # stretches of steps that were asked for last, as by what looks ahead
STEPS_AT_ONCE = 64
"""Starts are hashed for this many steps in one go: one hash is 25 small kernels, too many for each step."""


def signed(number: int) -> int:
    """The 64-bit two's complement integer that equals `number` modulo 2^64."""
    return (number + 2**63) % 2**64 - 2**63


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift: `>>` on its own copies the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix(x: Tensor) -> Tensor:
    """The finaliser of splitmix64 (Steele et al. 2014, doi 10.1145/2660193.2660195) on int64, which wraps as uint64."""
    x = (x ^ _shift(x, 30)) * signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift(x, 27)) * signed(0x94D049BB133111EB)
    return x ^ _shift(x, 31)


class Batches:
    """Batches of B windows of T + 1 tokens (T inputs and their targets) for a pack of R trials.

    `seeds` holds one seed a trial, 0 to 2^64 - 1; `batch` is B, `context` is T; tokens lie on `device`, where batches
    arise. Raises ValueError for a part of the corpus that is shorter than one window.

    Row b of trial r at step s starts at half of mix(mix(mix(seed_r + 1) + s GOLDEN) + (b + 1) GOLDEN), modulo the
    number of starts. It depends neither on the other trials nor on B, on the device or on earlier calls.
    """

    def __init__(self, corpus: Corpus, seeds: Sequence[int], batch: int, context: int, device: torch.device) -> None:
        for part, tokens in (("training", corpus.train), ("validation", corpus.validation)):
            if len(tokens) <= context:
                expected = f"at least {context + 1} for context={context}"
                raise ValueError(f"{len(tokens)} {part} tokens; expected: {expected}")
        self._train = _windows(corpus.train, corpus.vocabulary, context, device)
        self._validation = _windows(corpus.validation, corpus.vocabulary, context, device)
        self._all_keys = mix(torch.tensor([signed(seed) for seed in seeds], dtype=torch.int64, device=device) + 1)
        self._keys = self._all_keys
        self._rows = torch.arange(1, batch + 1, device=device) * signed(GOLDEN)
        self._starts: dict[int, Tensor] = {}

    def __call__(self, steps: int | Sequence[int]) -> Tensor:
        """Tokens of the batch of a step, or of each trial's own: int64 [R, B, T+1]. Never waits for the device."""
        if isinstance(steps, int):
            self._prepare({steps // STEPS_AT_ONCE})
            return _gather(self._train, self._starts[steps // STEPS_AT_ONCE][steps % STEPS_AT_ONCE])
        places = [divmod(step, STEPS_AT_ONCE) for step in steps]
        self._prepare({stretch for stretch, _ in places})
        starts = [self._starts[stretch][step, row] for row, (stretch, step) in enumerate(places)]
        return _gather(self._train, torch.stack(starts))

    def held_out(self, tokens: int) -> Tensor:
        """Where windows of the validation part start that have at least so many targets: int64 [S, k].

        They lie at equal distances over all of it, and no two have a target in common: k in each of S segments of equal
        length. S is 64, or the number of windows if that is less. A part that holds fewer gives as many as it holds.
        """
        context = self._validation.shape[1] - 1
        most = (len(self._validation) - 1) // context + 1
        wanted = min(-(-tokens // context), most)
        segments = min(SEGMENTS, wanted)
        each = min(-(-wanted // segments), most // segments)
        windows = torch.arange(segments * each, device=self._validation.device)
        starts = windows * (len(self._validation) - 1) // max(1, len(windows) - 1)
        by_segment: Tensor = starts.unflatten(0, (segments, each))
        return by_segment

    def validation(self, starts: Tensor) -> Tensor:
        """The windows of the validation part that start there: int64 [*starts.shape, T+1]."""
        return _gather(self._validation, starts)

    def select(self, trials: Sequence[int]) -> None:
        """Batches from now on are those of these trials, by their place among `seeds`, in that order."""
        self._keys = self._all_keys[list(trials)]
        self._starts.clear()

    def _prepare(self, stretches: set[int]) -> None:
        """Have the starts of these stretches of steps, int64 [STEPS_AT_ONCE, R, B] each, and keep a few others."""
        if stretches <= self._starts.keys():
            return
        others = [number for number in self._starts if number not in stretches][-OTHERS_KEPT:]
        self._starts = {number: self._starts[number] for number in (*others, *sorted(stretches & self._starts.keys()))}
        for number in stretches - self._starts.keys():
            first = number * STEPS_AT_ONCE
            steps = torch.arange(first, first + STEPS_AT_ONCE, device=self._keys.device) * signed(GOLDEN)
            of_steps = mix(self._keys + steps[:, None])
            hashes = mix(of_steps[..., None] + self._rows)
            # 63 bits modulo some millions: the bias towards early starts is below 1e-9.
            self._starts[number] = _shift(hashes, 1) % len(self._train)


# Tokens, how they were cut, and the windows.
_KNOWN: list[tuple[weakref.ref[Any], tuple[Any, ...], weakref.ref[Any]]] = []


def _windows(tokens: Tokens, vocabulary: int, context: int, device: torch.device) -> Tensor:
    """All windows, [tokens - T, T+1], as a view of the tokens: row i starts at token i. Those in use are shared."""
    how = (vocabulary, context, device)
    _KNOWN[:] = [entry for entry in _KNOWN if entry[0]() is not None and entry[2]() is not None]
    windows = next((made() for of, cut, made in _KNOWN if of() is tokens and cut == how), None)
    if windows is None:
        windows = _cut(tokens, vocabulary, context, device)
        _KNOWN.append((weakref.ref(tokens), how, weakref.ref(windows)))
    return windows


def _cut(tokens: Tokens, vocabulary: int, context: int, device: torch.device) -> Tensor:
    # torch cannot gather uint16; int16 has the same bits, and _gather takes the sign off again.
    narrow = tokens.astype(np.uint8) if vocabulary <= 256 else tokens.astype(np.uint16).view(np.int16)
    return torch.from_numpy(narrow).to(device).unfold(0, context + 1, 1)


def _gather(windows: Tensor, starts: Tensor) -> Tensor:
    tokens = windows[starts].long()
    return tokens if windows.dtype == torch.uint8 else tokens & 0xFFFF
