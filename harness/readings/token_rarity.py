"""What kind of text a batch is."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from harness.data.screening import Scores, ordered
from harness.model import sums
from harness.readings.base import BatchReading, ReadingContext, ReadingSignal


class TokenRarity(BatchReading):
    """Surprise of the batch's tokens, -log p, and how much each sequence repeats itself.

    p is a token's share in the training text, one added to each count, as screening has it; a token's surprise does not
    depend on those before it. Repetition is the share of a sequence's pairs of tokens that stand earlier in it, too.
    """

    cadence = 10
    help = "surprise and repetition of the batch's tokens"
    signals = {
        "token_surprise_median": ReadingSignal((), "nat", "median unigram surprise of the batch's tokens"),
        "token_surprise_max": ReadingSignal((), "nat", "largest unigram surprise of the batch's tokens"),
        "repeated_bigrams": ReadingSignal(
            (), "1", "share of the batch's token pairs that are there earlier in their sequence"
        ),
    }

    def __init__(self, known: ReadingContext):
        super().__init__(known)
        self._scores = Scores(known.counts, known.trial.model.context, known.device)

    def read(self, batch_RxBxT1: Tensor) -> Mapping[str, Tensor]:
        rising = ordered(self._scores.surprise(batch_RxBxT1.flatten(1)))
        median, largest = rising[:, (rising.shape[1] - 1) // 2], rising[:, -1]  # of an even number the lower one
        repeated = sums.mean(self._scores.repetition(batch_RxBxT1))
        return {"token_surprise_median": median, "token_surprise_max": largest, "repeated_bigrams": repeated}
