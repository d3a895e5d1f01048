"""Where a mixture of experts sends the tokens of one batch that stays the same, by whatever weights."""

from __future__ import annotations

import torch
from torch import Tensor

from harness.training.pack import Pack


class RouteProbe:
    """The experts that some weights choose for the batch of step 0 of each row, in passes that nothing else reads.

    It is the routes of a model of its own (`harness.model.tools.ExpertRoutes`): every layer tells it what it chose. The
    bias of a router that is balanced without a loss is that of now, whatever the weights.
    """

    def __init__(self, pack: Pack):
        self._pack = pack

    @torch.no_grad()
    def experts(self, weights_RxP: Tensor) -> Tensor:
        """[R, layers, N, K], int16; zeros in layers without experts."""
        pack, model = self._pack, self._pack.model.other()
        model.routes, model.router_bias = self, pack.model.router_bias
        trials = [pack.interventions.acting(number, pack.planned[number]) for number in pack.slots.planned]
        model.bind(trials, pack.parts, weights_RxP, weights_RxP)
        model.stand_with(pack.model)
        batch, config, sequences = pack.objective.batch(0), trials[0].model, trials[0].train.sequences
        self._context, tokens = config.context, batch.shape[1] * config.context
        shape = len(trials), config.depth, tokens, trials[0].section("moe").top
        self._chosen = weights_RxP.new_zeros(shape, dtype=torch.int16)
        for rows in pack.parts:
            for number, piece in enumerate(batch[rows].split(sequences, dim=1)):  # as many as train at once
                model.first_sequence = number * sequences
                pack.objective.forward(model, piece, rows)
        return self._chosen

    def routed(
        self, layer: int, rows: slice, sequences: range, choice_rxnxK: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Current weights choose."""
        return choice_rxnxK, None, None

    def see(self, layer: int, rows: slice, sequences: range, choice_rxnxK: Tensor, weights_rxnxK: Tensor) -> None:
        """What a layer has chosen."""
        tokens = slice(sequences.start * self._context, sequences.stop * self._context)
        self._chosen[rows, layer, tokens] = choice_rxnxK.to(torch.int16)
