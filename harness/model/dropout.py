"""Dropout whose masks are a function of seed, step, place and sequence, so that twins, forks and replays drop alike.

Random bits are those of SplitMix64 (Steele, Lea & Flood 2014, doi 10.1145/2660193.2660195), whose n-th number is a
function of n: the same on every device, and for a sequence whatever rank, micro-batch or row of a pack it is in.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from harness.basics.devices import sent

# As int64 has their 64 bits.
GAMMA, FIRST, SECOND = (bits - 2**64 for bits in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def stream(seed: int, step: int, place: str) -> int:
    """The state from which the numbers of a trial start, at a step and a place in the model."""
    digest = hashlib.sha256(f"dropout {seed} {step} {place}".encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


class Streams:
    """The states of all rows at the steps where they stand, a place at a time.

    Places are found as they are asked for; those that are known are looked up for all rows on the host, and sent at
    once.
    """

    def __init__(self) -> None:
        self._places: dict[str, int] = {}

    def bind(self, seeds: Sequence[int], device: torch.device) -> None:
        """For rows with these seeds from now on."""
        self._seeds, self._device = seeds, device
        self._now = torch.zeros((len(self._places), len(seeds)), dtype=torch.int64, device=device)

    def stand_at(self, steps: Sequence[int]) -> None:
        """The rows stand at these steps."""
        self._steps = steps
        if self._places:
            self._now.copy_(sent(torch.tensor([self._of(place) for place in self._places]), self._device))

    def at(self, place: str) -> Tensor:
        """Of each row, [R], int64."""
        if place not in self._places:
            self._places[place] = len(self._places)
            self._now = torch.cat([self._now, sent(torch.tensor([self._of(place)]), self._device)])
        return self._now[self._places[place]]

    def _of(self, place: str) -> list[int]:
        return [stream(seed, step, place) for seed, step in zip(self._seeds, self._steps, strict=True)]


def random_words(streams_R: Tensor, numbers: range) -> Tensor:
    """The numbers 0, 1, ... of SplitMix64 from each state on, [R, n], as int64."""
    at = torch.arange(numbers.start + 1, numbers.stop + 1, device=streams_R.device)
    z = streams_R[:, None] + at * GAMMA
    for shift, factor in ((30, FIRST), (27, SECOND)):
        z.bitwise_xor_(_shifted_right(z, shift)).mul_(factor)
    return z.bitwise_xor_(_shifted_right(z, 31))


def _shifted_right(z: Tensor, bits: int) -> Tensor:
    """With zeros from the left."""
    return (z >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _words_of(streams_R: Tensor, size: int, sequences: range) -> Tensor:
    """Random words for `size` elements of each of these sequences, int32 [R, sequences, size].

    They are of a sequence's number in the batch, whatever rank or micro-batch it is in.
    """
    numbers = -(-size // 2)  # of 64 bits each, for two elements
    drawn = random_words(streams_R, range(sequences.start * numbers, sequences.stop * numbers)).view(torch.int32)
    return drawn.view(len(streams_R), len(sequences), -1)[:, :, :size]


def dropped(x_RxNxxx: Tensor, shares_R: Tensor, streams_R: Tensor, sequences: range) -> Tensor:
    """x, of which each trial's share of elements is 0 and the others are divided by 1 - share (Srivastava et al. 2014).

    x holds the `sequences`, one after the other. A share is exact to 2^-32.
    """
    drawn = _words_of(streams_R, x_RxNxxx[0].numel() // len(sequences), sequences)
    shares = shares_R.double()
    limits = (shares * 2**32).round() - 2**31
    kept = drawn >= limits.to(torch.int64)[:, None, None]
    factor = (1 / (1 - shares)).to(shares_R.dtype).view(-1, *[1] * (x_RxNxxx.dim() - 1))
    factors = kept.reshape(x_RxNxxx.shape) * factor
    return (x_RxNxxx.to(shares_R.dtype) * factors).to(x_RxNxxx.dtype)


def jittered(x_RxNxxx: Tensor, widths_R: Tensor, streams_R: Tensor, sequences: range) -> Tensor:
    """x, of which each element is multiplied by a number from 1 - width to 1 + width, uniformly drawn, [R, N, ...].

    x holds the `sequences`, one after the other. Where the width is 0, x has the same bits.
    """
    drawn = _words_of(streams_R, x_RxNxxx[0].numel() // len(sequences), sequences)
    factors = 1 + widths_R[:, None, None] * (drawn.to(widths_R.dtype) * 2**-31)
    return (x_RxNxxx.to(widths_R.dtype) * factors.reshape(x_RxNxxx.shape)).to(x_RxNxxx.dtype)
