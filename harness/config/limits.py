"""How large a field may be, and how much is kept of what a trial leaves."""

from __future__ import annotations

LONGEST_EXPLICIT = 256  # tokens; beyond it the score matrix costs more than the taps on it are worth
LARGEST_SEED = 2**63 - 1  # what an int64 coordinate of the results can hold
SMALLEST_SCALE = 2.0**-24  # of the loss, where it is dynamic; gradients that overflow even so are not the scale's fault
LARGEST_SCALE = 2.0**126  # of the loss; float32 still holds its reciprocal as a normal number

# Sizes far beyond all that has been trained (in brackets), yet small enough that a plan is made at once. Whether a
# machine holds a trial is asked later, of all its sizes together.
WIDEST = 2**20  # features (PaLM: 18,432, and 73,728 in its feed-forward part)
DEEPEST = 4096  # blocks (DeepNet: 1,000)
LONGEST_CONTEXT = 2**24  # tokens (Llama 4 Scout: 10 million)
LARGEST_BATCH = 2**20  # sequences (BERT with LAMB: 65,536)
MOST_STEPS = 10**7  # (BERT and T5: a million)
MOST_GROWING = 10**6  # steps over which sequences or batches grow
MOST_TOKENS = 10**11  # of synthetic text
STEEPEST = 100.0  # exponent of Zipf's law; already at half of that no text has a second token

# A batch is odd by its tokens alone (ours) if it is so many deviations (1.4826 MAD) above the median of those before,
# and so much: of the mean surprise, nat/token, or of the share of token pairs that stood in their sequence before.
ODD_BATCH = 7.0
RARER = 0.3
MORE_REPEATED = 0.1
# Or it is, token for token, one of so many before it; where a larger share of batches is, that is how the run reads.
RECENT_BATCHES = 64
MOST_AGAIN = 0.1

KEPT_EVENTS = 64  # of a trial; a fault that lasts for the whole run would fill the store otherwise
SEGMENTS = 64  # of the held-out text, at most: each has a loss of its own, from which the error of their mean is known
MOST_LABELS = 4096  # to which a reward is fitted: a matrix of that size is solved for each trial
