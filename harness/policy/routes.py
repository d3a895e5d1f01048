"""Experts of a rollout's tokens: where the sampler sent them, where the trainer would have, and replay of the first.

Rollout routing replay (R3, arXiv 2510.11370): training passes send each token of a rollout to the experts to which the
sampler sent it, with the weights that the trainer's router gives these now; and so does the trainer's pass that scores
it, so that the first ratio of a rollout is 1. What a sampler does is read off its pass over whole sequences, as its
log-probabilities are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from harness.config import Trial
from harness.model import sums
from harness.model.gpt import GPT
from harness.model.state import Rows, State
from harness.policy.rows import picked


class _ChoiceListener:
    """The routes of passes that score (`harness.model.tools.ExpertRoutes`): each token's own choice is seen.

    Tokens go by it, or, where there is another listener in `instead`, by what that has seen of them.
    """

    def __init__(self) -> None:
        self.seen: Tensor | None = None  # [R, layers, B T, K], while somebody listens
        self.instead: _ChoiceListener | None = None

    def routed(
        self, layer: int, rows: slice, sequences: range, choice_rxnxK: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        if self.seen is not None:
            context = choice_rxnxK.shape[1] // len(sequences)
            here = rows, layer, slice(sequences.start * context, sequences.stop * context)
            self.seen[here] = choice_rxnxK.short()
            if self.instead is not None and self.instead.seen is not None:
                return self.instead.seen[here].long(), None, None
        return choice_rxnxK, None, None

    def see(self, layer: int, rows: slice, sequences: range, choice_rxnxK: Tensor, weights_rxnxK: Tensor) -> None:
        """It was seen before."""


class RolloutRoutes:
    """Of a pack whose policy has experts; where it replays, these are the routes of the model that trains."""

    def __init__(self, trial: Trial, model: GPT, trainer: GPT, sampler: GPT, weights: Rows, state: State):
        """`weights` [R, P] are those of the model; `trainer` and `sampler` score what is sampled."""
        config, options, rows = trial.model, trial.section("policy"), len(weights.used)
        self._shape = config.depth, trial.train.batch * config.context, trial.section("moe").top
        self._context, self._parts = config.context, 2 if options.mix_in is not None else 1
        self._scorers, self._listeners = (trainer, sampler), (_ChoiceListener(), _ChoiceListener())
        for scorer, listener in zip(self._scorers, self._listeners, strict=True):
            scorer.routes = listener
        self._index: Tensor | None = None
        flips = weights.used.new_zeros((rows, config.depth), dtype=torch.float64)
        self._flips = state.add("rollout_routing_flips", flips)
        self._kept: Rows | None = None
        if options.routing_replay:
            # Different ones from the start: of a row that never samples no token has an expert twice.
            first = torch.arange(self._shape[2], dtype=torch.int16, device=weights.used.device)
            self._kept = state.add("rollout_experts", first.expand(rows, *self._shape).clone())
            model.routes = self

    @property
    def flips(self) -> Tensor:
        """The share of tokens whose experts differ between sampler and trainer, of each layer, float64 [R, layers]."""
        return self._flips.used

    def listen(self, first: int, is_apart: bool) -> None:
        """What is scored next, by a sampler that is apart before the trainer, are the sequences from this one on."""
        of_trainer, of_sampler = self._listeners
        of_trainer.instead = of_sampler if is_apart and self._kept is not None else None
        for scorer, listener in zip(self._scorers, self._listeners, strict=True):
            scorer.first_sequence = first
            if listener.seen is None:
                listener.seen = self._flips.used.new_zeros((len(self._flips.used), *self._shape), dtype=torch.int16)

    def keep(self, is_apart: bool, where_R: Tensor) -> None:
        """All sequences are scored: keep what was seen of these rows. A sampler that is not apart is the trainer."""
        of_trainer, of_sampler = (listener.seen for listener in self._listeners)
        assert of_trainer is not None and of_sampler is not None
        of_sampler = of_sampler if is_apart else of_trainer
        is_there = (of_sampler[..., None] == of_trainer[..., None, :]).any(-1)
        flips = sums.mean((~is_there.all(-1)).double())
        self._flips.used.copy_(torch.where(where_R[:, None], flips, self._flips.used))
        if self._kept is not None:
            new = torch.where(where_R[:, None, None, None], of_sampler, self._kept.used)
            self._kept.used.copy_(new)
        for scorer, listener in zip(self._scorers, self._listeners, strict=True):
            scorer.first_sequence, listener.seen = 0, None

    def train_on(self, index_Rxb: Tensor | None) -> None:
        """These completions of the rollout train in this step; None: all."""
        self._index = index_Rxb

    # --- as routes of the model that trains ---------------------------------------------------------------------------

    def routed(
        self, layer: int, rows: slice, sequences: range, choice_rxnxK: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Those of the rollout, in training; text that is mixed in stands behind completions, and goes as it does."""
        if self._kept is None or not torch.is_grad_enabled():  # validation
            return choice_rxnxK, None, None
        of_rollout = self._kept.used[rows, layer].unflatten(1, (-1, self._context))
        of_rollout = picked(None if self._index is None else self._index[rows], of_rollout)
        count = len(sequences) // self._parts
        old = of_rollout[:, sequences.start : sequences.start + count].flatten(1, 2).long()
        return torch.cat((old, choice_rxnxK[:, old.shape[1] :]), 1), None, None

    def see(self, layer: int, rows: slice, sequences: range, choice_rxnxK: Tensor, weights_rxnxK: Tensor) -> None:
        """Nothing is kept of it."""
