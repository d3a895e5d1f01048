"""How much attention goes to the first token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from harness.config import Trial
from harness.model import sums
from harness.readings.base import ReadingSignal, TapReading, mean_of_ranks, score_taps

IS_SINK = 0.3  # of a head's attention


class AttentionSinks(TapReading):
    """Share of the softmax that the first token gets, mean over later queries: of all heads, and heads above 0.3.

    The second is the sink metric of Gu et al. 2024 (arXiv 2410.10781, equation 3) for the first token. Of the sequences
    that `attention_entropy` reads. Shares are those among tokens, also where a head has a logit of its own beside them.
    """

    cadence = 0
    help = "attention to the first token in each layer"
    signals = {
        "first_token_share": ReadingSignal(("layer",), "1", "share of attention to the first token"),
        "sink_heads": ReadingSignal(("layer",), "1", "share of heads that pay the first token more than 0.3"),
    }

    @classmethod
    def taps(cls, depth: int) -> Sequence[str]:
        return score_taps(depth)

    @classmethod
    def missing(cls, trial: Trial) -> str:
        return super().missing(trial) or ("a context of one token" if trial.model.context == 1 else "")

    def measure(self, x: Tensor) -> Tensor:
        scores = x[:, 0].to(torch.promote_types(x.dtype, torch.float32))  # [r, H, T, T]
        first = torch.softmax(scores, -1)[..., 1:, 0].contiguous()  # the first query sees nothing else
        of_heads = sums.mean(first.double())
        return torch.stack([sums.mean(of_heads), sums.mean((of_heads > IS_SINK).double())], 1)

    def joined(self, values: Sequence[Tensor]) -> Mapping[str, Tensor]:
        share, heads = torch.stack([mean_of_ranks(of_layer) for of_layer in values], 1).unbind(-1)
        return {"first_token_share": share, "sink_heads": heads}
