"""A learned reward: fitted to noisy labels by a known one, the gold reward, and trained on in its place.

The design of Gao et al. 2022 (arXiv 2210.10760, section 2), with a reward of the table instead of a large model for
gold, and ridge regression on counts of pairs instead of a small one. A ridge, and no logistic regression: the labels
are numbers, so it has a solution in closed form, which needs no rate, no start and no number of steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from harness.basics.devices import sent
from harness.config import Trial
from harness.config.limits import MOST_LABELS
from harness.model import sums
from harness.model.state import State
from harness.policy.advantages import spread
from harness.policy.sampling import streams_of, uniforms

LABELS, LABEL_NOISE = "policy.labels", "policy.label_noise"  # places of random numbers
RIDGE = 1.0  # added to the diagonal of the matrix of common pairs
LARGEST = 1024  # tokens of a vocabulary, each pair of which has a weight
AT_ONCE = 2**24  # counts that are kept at once in the fit


class Proxy:
    """r(x) = b + sum over pairs of w[pair], float64: of a completion x, whose first pair begins with the prompt's end.

    `policy.proxy` completions of the start policy are labelled with gold + `policy.proxy_noise` times gold's standard
    deviation over them times uniform noise of unit variance. w minimises the sum of squared errors plus |w|^2; b is not
    penalised. Weights are state of the row, and everything that is drawn is a function of the row's seed, so rows of
    one seed have the same completions and noise, and the labels of a smaller number are the first of a larger one.
    """

    def __init__(self, rows: int, vocabulary: int, device: torch.device, state: State):
        self._vocabulary, self._device = vocabulary, device
        weights = torch.zeros((rows, vocabulary**2 + 1), dtype=torch.float64, device=device)  # b is the last
        self._weights = state.add("proxy_weights", weights)

    def bind(self, trials: Sequence[Trial]) -> None:
        """Work on the rows in use from now on, which are these trials."""
        options = [trial.section("policy") for trial in trials]
        self._labels, self._noise = [one.proxy for one in options], [one.proxy_noise for one in options]
        self._seeds = [trial.seeds["data"] for trial in trials]

    def batches(self, batch: int) -> int:
        """How many of so many completions have to be labelled."""
        most: int = max(self._labels)
        return -(-most // batch)

    def streams(self, number: int) -> Tensor:
        """Where the random numbers begin by which this one of them is sampled, int64 [R]."""
        return sent(streams_of(self._seeds, [number] * len(self._seeds), [LABELS]), self._device)[0]

    def fit(self, pairs_RxnxT: Tensor, gold_Rxn: Tensor, rows: Sequence[int], where_R: Tensor) -> None:
        """Learn the gold reward of these completions anew, in those of the `rows` where that is due.

        One row after the other: so no bit depends on how many labels others have.
        """
        streams = sent(streams_of(self._seeds, [0] * len(self._seeds), [LABEL_NOISE]), self._device)[0]
        noise = (2 * uniforms(streams, (MOST_LABELS,)) - 1) * 3**0.5
        for row in rows:
            count = self._labels[row]
            gold = gold_Rxn[row, :count]
            labels = gold + self._noise[row] * spread(gold[None]) * noise[row, :count]
            found = ridge(pairs_RxnxT[row, :count], labels, self._vocabulary**2)
            self._weights.used[row] = torch.where(where_R[row], found, self._weights.used[row])

    def __call__(self, pairs_RxBxT: Tensor) -> Tensor:
        """What it gives each completion, from its `pairs`, float64 [R, B]."""
        weights, features = self._weights.used, self._vocabulary**2
        found = weights.gather(1, pairs_RxBxT.flatten(1)).view(pairs_RxBxT.shape)
        return sums.total(torch.where(pairs_RxBxT < features, found, 0.0)) + weights[:, -1:]

    def pairs(self, prompts_RxBxP: Tensor, completions_RxBxT: Tensor, mask_RxBxT: Tensor) -> Tensor:
        """The number of each token and the one before it, int64 [R, B, T]; V^2 where the mask is false."""
        before = torch.cat((prompts_RxBxP[..., -1:], completions_RxBxT[..., :-1]), -1)
        return torch.where(mask_RxBxT, before * self._vocabulary + completions_RxBxT, self._vocabulary**2)


def fit_bytes(trial: Trial) -> tuple[int, int]:
    """About how much the fit takes at once, and for each row of the pack; nothing without a learned reward."""
    labels = trial.section("policy").proxy
    if trial.objective.name != "policy" or labels is None:
        return 0, 0
    batches = -(-labels // trial.train.batch) * trial.train.batch
    sequences = batches * (trial.model.context + 1) * 8  # bytes of them, which are there as tokens, pairs and masks
    counts = min(AT_ONCE, labels * (trial.data.vocabulary**2 + 1))
    return 8 * (3 * labels**2 + 2 * counts), 3 * sequences + 8 * MOST_LABELS


def ridge(pairs_mxT: Tensor, labels_m: Tensor, features: int) -> Tensor:
    """Weights of so many pairs and, behind them, the intercept, float64 [features + 1]; a pair `features` is none.

    With X the counts [m, features], K = X X^T of centred rows and y the centred labels: w = X^T (K + I)^-1 y.
    """
    shared = common(pairs_mxT, features)
    means = shared.mean(0)
    centred = shared - means - means[:, None] + means.mean()
    centred.diagonal().add_(RIDGE)
    middle = labels_m.mean()
    factor = torch.linalg.cholesky_ex(centred).L  # which asks the device for no error
    dual = torch.cholesky_solve((labels_m - middle)[:, None], factor)
    weights = torch.zeros(features + 1, dtype=torch.float64, device=labels_m.device)
    weights.index_put_((pairs_mxT.flatten(),), dual.expand(pairs_mxT.shape).flatten(), accumulate=True)
    weights[-1] = 0
    weights[-1] = middle - weights[pairs_mxT].sum(1).mean()
    return weights


def common(pairs_mxT: Tensor, features: int) -> Tensor:
    """X X^T: over all pairs, the sum of the products of two completions' counts, [m, m]; whole numbers, so exact."""
    labels, device = len(pairs_mxT), pairs_mxT.device
    found = torch.zeros((labels, labels), dtype=torch.float64, device=device)
    size = max(1, AT_ONCE // (features + 1))
    for first in range(0, labels, size):
        part = pairs_mxT[first : first + size]
        counts = torch.zeros((features + 1, len(part)), dtype=torch.float64, device=device)
        places = torch.arange(len(part), device=device)[:, None].expand(part.shape)
        counts.index_put_((part, places), counts.new_ones(()), accumulate=True)
        counts[-1] = 0
        for place in pairs_mxT.unbind(1):
            found[:, first : first + size] += counts[place]
    return found
