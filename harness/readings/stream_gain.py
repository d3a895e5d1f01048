"""What the mixing of residual streams makes of their size, over all branches together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import Tensor

from harness.model import sums
from harness.readings.base import ReadingSignal, TapReading, mean_of_ranks


class StreamGain(TapReading):
    """Largest absolute row sum, and column sum, of the product of all matrices that mix streams, mean over tokens.

    The "Amax gain magnitude" of the composite mapping, forwards and backwards (Xie et al. 2025, arXiv 2512.24880,
    section 3.1): 1 for doubly stochastic matrices and for a plain residual stream, and at most the product of those of
    each branch. Theirs is of one sequence, this of all of the batch. NaN where the mixing is not finite.
    """

    cadence = 10
    help = "gain of the product of all that mixes residual streams, forwards and backwards"
    signals = {
        "stream_gain_forward": ReadingSignal((), "1", "largest absolute row sum of the product of stream mixings"),
        "stream_gain_backward": ReadingSignal((), "1", "largest absolute column sum of the product of stream mixings"),
    }

    @classmethod
    def taps(cls, depth: int) -> Sequence[str]:
        return [f"blocks.{layer}.mixing.{place}" for layer in range(depth) for place in (0, 1)]

    def measure(self, x: Tensor) -> Tensor:
        return x.clone()  # [r, N, n x n]: only together they say something

    def joined(self, values: Sequence[Tensor]) -> Mapping[str, Tensor]:
        gain = _square(values[0])
        for later in values[1:]:
            gain = _product(_square(later), gain)
        sizes = gain.abs()
        rows, columns = (sums.total(sizes, dim).amax(-1) for dim in (-1, -2))  # [ranks, calls, R, N]
        return {
            "stream_gain_forward": mean_of_ranks(sums.mean(rows.contiguous()).double()),
            "stream_gain_backward": mean_of_ranks(sums.mean(columns.contiguous()).double()),
        }


def _square(x: Tensor) -> Tensor:
    """[..., n x n] -> [..., n, n]."""
    streams = math.isqrt(x.shape[-1])
    return x.view(*x.shape[:-1], streams, streams)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Of matrices [..., n, n], added up one by one: so no bit depends on how many there are."""
    product = left[..., :, 0, None] * right[..., 0, None, :]
    for i in range(1, left.shape[-1]):
        product.add_(left[..., :, i, None] * right[..., i, None, :])
    return product
