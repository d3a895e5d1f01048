"""How a router spreads tokens over experts, and how sure it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from harness.model import sums
from harness.model.routing import GATES, TINY, chosen
from harness.readings.base import ReadingSignal, TapReading, each_log, mean_of_ranks


class ExpertLoads(TapReading):
    """Of each layer's router: where tokens go, how even its scores are, how large logits are, how near a tie is.

    `expert_share` is the largest share of a layer's tokens that one expert takes, 1 where all go to it; with K experts
    a token, K / E where they are used evenly. `router_entropy` is that of the scores over their sum, mean over tokens;
    log E is even. `router_margin` is the smallest difference between the last score that was chosen and the first that
    was not: a change of so much sends a token elsewhere. NaN where all experts are chosen.
    """

    cadence = 1
    help = "how a router spreads tokens over experts"
    signals = {
        "expert_share": ReadingSignal(("layer",), "1", "largest share of a layer's tokens that one expert takes"),
        "router_entropy": ReadingSignal(("layer",), "nat", "entropy of router scores, mean over tokens"),
        "router_logit_max": ReadingSignal(("layer",), "1", "largest router logit, by size"),
        "router_margin": ReadingSignal(("layer",), "1", "smallest margin between scores chosen and not"),
    }

    @classmethod
    def taps(cls, depth: int) -> Sequence[str]:
        return [f"blocks.{layer}.moe.logits" for layer in range(depth)]

    def measure(self, x: Tensor) -> Tensor:
        options = self.known.trial.section("moe")
        logits = x.to(torch.promote_types(x.dtype, torch.float32))  # [r, N, E]
        scores = GATES[options.gate](logits).detach()
        choice = chosen(scores, options.top, options.groups, options.groups_kept)
        experts = torch.arange(options.experts, device=x.device)
        loads = sums.mean((choice[..., None] == experts).any(2).double().transpose(1, 2).contiguous())  # [r, E]
        shares = scores / (sums.total(scores)[..., None] + TINY)
        surprise = sums.total(-shares * each_log(shares.clamp(min=TINY).contiguous()))
        ordered = scores.sort(dim=-1, descending=True).values
        is_open = options.top < options.experts
        margin = (
            (ordered[..., options.top - 1] - ordered[..., options.top]).amin(1) if is_open else loads[:, 0] * torch.nan
        )
        rest = [sums.mean(surprise.double()), logits.abs().amax((1, 2)).double(), margin.double()]
        return torch.cat([loads, torch.stack(rest, 1)], 1)

    def joined(self, values: Sequence[Tensor]) -> Mapping[str, Tensor]:
        means = torch.stack([mean_of_ranks(of_layer) for of_layer in values], 1)  # [R, layers, E + 3]
        largest = torch.stack([of_layer[..., -2].flatten(0, 1).amax(0) for of_layer in values], 1)
        margin = torch.stack([of_layer[..., -1].flatten(0, 1).amin(0) for of_layer in values], 1)
        return {
            "expert_share": means[..., :-3].amax(-1),
            "router_entropy": means[..., -3],
            "router_logit_max": largest,
            "router_margin": margin,
        }
