"""How sure a router is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from harness.model import sums
from harness.model.routing import GATES, TINY
from harness.readings.base import ReadingSignal, TapReading, each_log, mean_of_ranks, router_taps


class RouterScores(TapReading):
    """Of each layer's router: how even its scores are, how large its logits, and how near it is to another choice.

    `router_entropy` is that of the scores over their sum, mean over tokens; log E is even. `router_margin` is the
    smallest difference between the last of the `moe.top` largest scores and the next: a change of so much sends a token
    elsewhere. It is of scores alone, without groups and biases, and NaN where all experts are chosen.
    """

    of_some_layers = True
    cadence = 1
    help = "how sure a router is"
    signals = {
        "router_entropy": ReadingSignal(("layer",), "nat", "entropy of router scores, mean over tokens"),
        "router_logit_max": ReadingSignal(("layer",), "1", "largest router logit, by size"),
        "router_margin": ReadingSignal(("layer",), "1", "smallest margin between router scores chosen and not"),
    }

    @classmethod
    def taps(cls, depth: int) -> Sequence[str]:
        return router_taps(depth)

    def measure(self, x: Tensor) -> Tensor:
        options = self.known.trial.section("moe")
        logits = x.to(torch.promote_types(x.dtype, torch.float32))  # [r, N, E]
        scores = GATES[options.gate](logits).detach()
        shares = scores / (sums.total(scores)[..., None] + TINY)
        surprise = sums.total(-shares * each_log(shares.clamp(min=TINY).contiguous()))
        entropy, largest = sums.mean(surprise.double()), logits.abs().amax((1, 2)).double()
        ordered = scores.sort(dim=-1, descending=True).values
        if options.top == options.experts:
            return torch.stack([entropy, largest, entropy * torch.nan], 1)
        margin = (ordered[..., options.top - 1] - ordered[..., options.top]).amin(1).double()
        return torch.stack([entropy, largest, margin], 1)

    def joined(self, values: Sequence[Tensor]) -> Mapping[str, Tensor]:
        return {
            "router_entropy": torch.stack([mean_of_ranks(of_layer)[:, 0] for of_layer in values], 1),
            "router_logit_max": torch.stack([of_layer[..., 1].flatten(0, 1).amax(0) for of_layer in values], 1),
            "router_margin": torch.stack([of_layer[..., 2].flatten(0, 1).amin(0) for of_layer in values], 1),
        }
