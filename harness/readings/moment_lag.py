"""How far Adam's second moment lags behind the gradients."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from harness.config import Trial
from harness.optim.optimizers.base import Optimizer
from harness.readings.base import ReadingContext, ReadingSignal, StepReading, no_second_moment, rms, second_share


class MomentLag(StepReading):
    """RMS of g / max(sqrt(v_hat), eps) over a tensor: the gradient of the step, as clipped, over what it was expected.

    Near 1 where the second moment is up to date, above it where it lags. Wortsman et al. 2023 (arXiv 2304.13013) call
    2.3 and more a spike, and find spikes of the loss 1 to 8 steps after those of the first layer. v_hat is the
    corrected second moment with this gradient in it, and `eps` that of the tensor.
    """

    cadence = 0
    help = "how far Adam's second moment lags behind the gradients"
    signals = {
        "moment_lag": ReadingSignal((), "1", "RMS of gradient over root of the second moment, largest of all tensors"),
        "embedding_moment_lag": ReadingSignal((), "1", "RMS of gradient over root of the second moment, embedding"),
    }

    @classmethod
    def missing(cls, trial: Trial) -> str:
        return no_second_moment(trial)

    def __init__(self, known: ReadingContext):
        super().__init__(known)
        self._embedding = [scaled.name for scaled in known.layout.tensors].index("embedding")

    def read(self, before_RxP: Tensor | None, optimizer: Optimizer) -> Mapping[str, Tensor]:
        gradients, moment = optimizer.gradients, optimizer.slot("moment_2")
        correction = second_share(optimizer)
        each = []
        for span in self.known.layout.spans:
            here = slice(span.start, span.stop)
            expected = (moment[:, here].double() / correction).sqrt_()
            least = optimizer.hyperparameter("eps") * span.epsilon
            each.append(rms(gradients[:, here].double() / torch.maximum(expected, least)))
        of_tensors = torch.stack(each, 1)
        return {"moment_lag": of_tensors.amax(1), "embedding_moment_lag": of_tensors[:, self._embedding]}
