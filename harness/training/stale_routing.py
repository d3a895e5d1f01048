"""Experts by older weights: the tokens of a batch go where the weights of some steps before would have sent them.

Anticipatory routing (DeepSeek-V4's report, section 4.2.3): at step t features are those of the weights of step t, and
the experts of each token those that the weights of step t - lag choose, in a pass of theirs over the same batch. The
batch of step t + lag is looked at in step t, and its experts wait in a ring that is state of the row. What is not
published there is the lag, what switches it on, and for how long: here these are keys.

A control is routing that stands still (`moe.routing=frozen`): experts are those of the weights of one step, kept.
StableMoE (Dai et al. 2022, arXiv 2204.08396) is a relative, which distils that router into one of embeddings.

Choices alone are old, unless `moe.stale` says otherwise: a token's weights are the scores that its experts have now.
Where none were kept of a sequence, as in the first steps, after batches were skipped, or of text that a fault has
changed since, it goes by the current weights. So does all validation. No fault strikes in the pass that looks ahead,
and nobody reads its taps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from harness.config import Trial
from harness.data.batches import GOLDEN, mix, signed
from harness.model.formats import raw_words
from harness.model.gpt import GPT
from harness.model.state import Rows, State
from harness.objectives.base import Steps

Forward = Callable[[GPT, Tensor, slice], None]  # one forward pass of a batch [r, b, ...] through these rows
NEVER = -1  # in the place of what a sequence is told by: there is none


class StaleRouting:
    """Of a pack whose trials route by older weights: what its model is told in every training pass."""

    def __init__(self, trial: Trial, model: GPT, weights: Rows, state: State):
        """`weights` [R, P] are the current ones."""
        config, options = trial.model, trial.section("moe")
        rows, self._sequences, self._context = len(weights.used), trial.train.sequences, config.context
        self.lag: int = options.lag
        self._is_frozen, self._keeps_weights = options.routing == "frozen", options.stale == "weights"
        self._current, self._model = weights, model
        self._shape = config.depth, trial.train.batch * config.context, options.top
        self._scout = model.other()
        self._scout.routes, model.routes = _Listener(self), _Teller(self)
        if self._is_frozen:
            self._read = state.add("frozen_weights", weights.used.clone())
            return
        self._read, room = weights, (rows, self.lag + 1)
        self._ring = state.add("experts_ahead", weights.used.new_zeros((*room, *self._shape), dtype=torch.int16))
        of = torch.full((*room, trial.train.batch), NEVER, dtype=torch.int64, device=weights.used.device)
        self._of = state.add("experts_ahead_of", of)
        if self._keeps_weights:
            self._scores = state.add("expert_weights_ahead", weights.used.new_zeros((*room, *self._shape)))

    @classmethod
    def of(cls, trial: Trial, model: GPT, weights: Rows, state: State) -> StaleRouting | None:
        """Where the trial's configuration asks for it."""
        if trial.section("block").channel_mixer != "moe":
            return None
        options = trial.section("moe")
        return cls(trial, model, weights, state) if options.lag or options.routing == "frozen" else None

    def bind(self, trials: Sequence[Trial], parts: Sequence[slice]) -> None:
        """Work on the rows in use from now on, which are these trials, and pass in these parts."""
        current, read = self._current.used, self._read.used
        self._parts, self._index = parts, torch.arange(len(trials), device=current.device)
        self._scout.bind(trials, parts, read, read)
        self._scout.router_bias = self._model.router_bias
        froms = [trial.section("moe").frozen_from for trial in trials]
        self._from = torch.tensor(froms, device=current.device)
        always = [trial.section("moe").stale_when == "always" for trial in trials]
        self._is_always = torch.tensor(always, device=current.device)
        self._now = current.new_zeros((len(trials), *self._shape), dtype=torch.int16)
        self._weights_now = current.new_zeros((len(trials), *self._shape)) if self._keeps_weights else None
        self._seen, self._weights_seen = torch.zeros_like(self._now), self._weights_now
        if self._weights_now is not None:
            self._weights_seen = torch.zeros_like(self._weights_now)
        sequences = self._shape[1] // self._context
        self._is_known = current.new_zeros((len(trials), sequences), dtype=torch.bool)

    def fed(
        self, batch: Callable[[Steps], Tensor], steps: Steps, asked_R: Tensor | None
    ) -> tuple[Tensor | None, Tensor]:
        """What `begin` is given at these steps: the batch that is looked at, and in which rows older choices count.

        `asked` are those for which a playbook has asked.
        """
        used = self._is_always if asked_R is None else self._is_always | asked_R
        if not self.lag:
            return None, used
        return batch(steps + self.lag if isinstance(steps, int) else [step + self.lag for step in steps]), used

    def begin(
        self, forward: Forward, batch_RxBxx: Tensor, ahead_RxBxx: Tensor | None, is_used_R: Tensor, here_R: Tensor
    ) -> None:
        """Be ready for the passes of a step over `batch`, and look at `ahead`, the batch of `lag` steps later.

        Rows that are not `here` keep what they have. In those of which it `is_used` old choices count. Without `ahead`
        the step is one that was taken before.
        """
        at = self._model.at
        self._scout.stand_with(self._model)
        if self._is_frozen:
            is_new = ((at == self._from) & here_R)[:, None]
            self._read.used.copy_(torch.where(is_new, self._current.used, self._read.used))
            self._look(forward, batch_RxBxx)
            self._now.copy_(self._seen)
            self._is_known.copy_((is_used_R & (at >= self._from))[:, None].expand_as(self._is_known))
            return
        place = at % (self.lag + 1)
        self._now.copy_(self._ring.used[self._index, place])
        if self._weights_now is not None:
            self._weights_now.copy_(self._scores.used[self._index, place])
        is_same = self._of.used[self._index, place] == told_by(batch_RxBxx)
        self._is_known.copy_(is_same & is_used_R[:, None])
        if ahead_RxBxx is not None:
            self._look(forward, ahead_RxBxx)
            self._keep((at + self.lag) % (self.lag + 1), told_by(ahead_RxBxx), here_R)

    def _look(self, forward: Forward, batch_RxBxx: Tensor) -> None:
        """See where the tokens of a batch go, in passes of as many sequences as train at once."""
        with torch.no_grad():
            for rows in self._parts:
                for number, piece in enumerate(batch_RxBxx[rows].split(self._sequences, dim=1)):
                    self._scout.first_sequence = number * self._sequences
                    forward(self._scout, piece, rows)

    def _keep(self, place_R: Tensor, of_RxB: Tensor, here_R: Tensor) -> None:
        """Into the ring, of the rows that are `here`: a choice, because writing by an index may sort on a GPU."""
        slots = torch.arange(self.lag + 1, device=place_R.device)
        is_slot = (place_R[:, None] == slots) & here_R[:, None]
        pairs = [(self._ring.used, self._seen), (self._of.used, of_RxB)]
        if self._weights_seen is not None:
            pairs.append((self._scores.used, self._weights_seen))
        for ring, values in pairs:
            where = is_slot.view(*is_slot.shape, *[1] * (values.dim() - 1))
            torch.where(where, values[:, None], ring, out=ring)

    def see(self, layer: int, rows: slice, sequences: range, choice_rxnxK: Tensor, weights_rxnxK: Tensor) -> None:
        """In the pass that looks ahead: experts of these tokens, and their weights."""
        tokens = self._tokens(sequences)
        self._seen[rows, layer, tokens] = choice_rxnxK.to(torch.int16)
        if self._weights_seen is not None:
            self._weights_seen[rows, layer, tokens] = weights_rxnxK

    def routed(
        self, layer: int, rows: slice, sequences: range, choice_rxnxK: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Which experts count for these tokens, [r, n, K], of which old ones do, [r, n, 1], and weights for those.

        `choice` are those of the current weights. Weights are None where current ones count.
        """
        tokens = self._tokens(sequences)
        known = self._is_known[rows, sequences.start : sequences.stop].repeat_interleave(self._context, 1)[..., None]
        old = self._now[rows, layer, tokens].long()
        weights = None if self._weights_now is None else self._weights_now[rows, layer, tokens]
        return torch.where(known, old, choice_rxnxK), known, weights

    def _tokens(self, sequences: range) -> slice:
        return slice(sequences.start * self._context, sequences.stop * self._context)


class _Listener:
    """The routes of the pass that looks ahead (`harness.model.tools.ExpertRoutes`)."""

    def __init__(self, of: StaleRouting):
        self.see = of.see

    def routed(
        self, layer: int, rows: slice, sequences: range, choice_rxnxK: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        return choice_rxnxK, None, None


class _Teller:
    """Those of the passes of the pack's own model: old ones where it trains."""

    def __init__(self, of: StaleRouting):
        self._of = of

    def see(self, layer: int, rows: slice, sequences: range, choice_rxnxK: Tensor, weights_rxnxK: Tensor) -> None:
        """Nothing is kept of it."""

    def routed(
        self, layer: int, rows: slice, sequences: range, choice_rxnxK: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        if not torch.is_grad_enabled():  # validation
            return choice_rxnxK, None, None
        return self._of.routed(layer, rows, sequences, choice_rxnxK)


def told_by(batch_RxBxx: Tensor) -> Tensor:
    """A number for each sequence that others do not have, int64 [R, B]."""
    words = raw_words(batch_RxBxx).flatten(2).long()
    places = torch.arange(1, words.shape[-1] + 1, device=words.device) * signed(GOLDEN)
    return mix(words + places).sum(-1)
