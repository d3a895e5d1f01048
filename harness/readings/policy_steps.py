"""How far a policy has moved since it sampled what it trains on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from harness.policy.step_measures import STEP_MEASURES, STEP_TAP
from harness.readings.base import PolicyReading, ReadingSignal, mean_of_ranks


class PolicyStepReading(PolicyReading):
    """Of every step on a rollout. The effective sample size is (mean ratio)^2 / mean ratio^2."""

    tap = STEP_TAP
    help = "loss, ratios and clipping of a policy's step"
    signals = {
        "surrogate_loss": ReadingSignal((), "1", "what is differentiated of a policy"),
        "clip_share": ReadingSignal((), "1", "share of ratios that are clipped"),
        "ratio_max": ReadingSignal((), "1", "largest ratio of probabilities now and at the rollout"),
        "effective_samples": ReadingSignal((), "1", "effective sample size over the number of samples"),
        "step_kl": ReadingSignal((), "nat", "KL of a token from the policy of the rollout to that of now (k3)"),
    }

    def joined(self, values: Sequence[Tensor]) -> Mapping[str, Tensor]:
        means = dict(zip(STEP_MEASURES, mean_of_ranks(values[0]).unbind(1), strict=True))
        largest = values[0].amax((0, 1))[:, STEP_MEASURES.index("ratio_max")]
        effective = means["ratio_sum"] ** 2 / means["ratio_squares"]
        found = {"surrogate_loss": means["surrogate_loss"], "clip_share": means["clip_share"], "ratio_max": largest}
        return {**found, "effective_samples": effective, "step_kl": means["step_kl"]}
