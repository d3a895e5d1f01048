"""QK-Clip: query and key weights shrink when the attention logits that they gave were too large."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from harness.basics.devices import on_cpu
from harness.config import Model, Trial
from harness.model.parameters import Layout
from harness.model.state import Rows
from harness.model.taps import Taps
from harness.optim.over_ranks import OverRanks


class QKClip:
    """`model.qk_clip`, right after the optimizer's step (Kimi K2 technical report 2025, arXiv 2507.20534, section 2.1).

    S_max is the largest logit of a head over this step's batch and its ranks, as the softmax reads it: the largest, as
    in the report, not the largest in size. Where it exceeds tau, the head's query and key weights are multiplied by
    sqrt(tau / S_max) each, and moments stay as they are. Nothing is remembered beyond the step. The norms that
    telemetry shows are those of the optimizer's step, before this.
    """

    def __init__(self, model: Model, layout: Layout, weights: Rows, taps: Taps):
        """Reads through `taps` from now on."""
        self._layers, self._heads = model.depth, model.width // model.head_dim
        self._layout, self._weights = layout, weights
        for layer in range(self._layers):
            name, reader = f"blocks.{layer}.attention.scores", partial(self._read, layer)
            taps.attach_to_rows(name, reader, on_host=False, largest=True)

    part = "model.qk_clip"

    @staticmethod
    def is_on(trial: Trial) -> bool:
        """Whether the trial's configuration asks for it."""
        return trial.model.qk_clip is not None

    def bind(self, trials: Sequence[Trial]) -> None:
        """Work on the rows in use from now on, which are these trials."""
        weights = self._weights.used
        limits = [trial.model.qk_clip for trial in trials]
        self._limit = torch.tensor(limits, dtype=torch.float64, device=weights.device)[:, None, None]
        self._largest = weights.new_full((len(trials), self._layers, self._heads), -math.inf)

    def _read(self, layer: int, _: str, scores_RxBxHxTxT: Tensor, rows: slice) -> None:
        here = scores_RxBxHxTxT.detach().flatten(-2).amax(-1).amax(1)
        largest = self._largest[rows, layer]
        largest.copy_(torch.maximum(largest, here))

    def act(self, stepping_R: Tensor, ranks: OverRanks) -> Tensor:
        """Scale the weights of the trials that step, from the logits read since the last call; in which rows, [R]."""
        largest = ranks.largest(self._largest).double()
        is_over = torch.isfinite(largest) & (largest > self._limit) & stepping_R[:, None, None]
        factor = torch.where(is_over, self._limit / largest, 1.0).sqrt().to(self._weights.used.dtype)
        layers = list(range(self._layers))
        if on_cpu(is_over):
            layers = is_over.any(2).any(0).nonzero().flatten().tolist()
        for layer in layers:
            name = f"blocks.{layer}.attention"
            stacked = self._layout.view(self._weights.used, f"{name}.query", f"{name}.key")
            heads = stacked.unflatten(1, (2, self._heads, -1))  # [R, query and key, heads, head_dim, width]
            over, by = (x[:, layer, None, :, None, None] for x in (is_over, factor))
            heads.copy_(torch.where(over, heads * by, heads))
        self._largest.fill_(-math.inf)
        return is_over.flatten(1).any(1)
