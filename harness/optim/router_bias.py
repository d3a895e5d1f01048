"""A bias on a router's scores, by which experts are chosen and not weighted, moved towards even loads after a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from harness.config import Model, Trial
from harness.model import sums
from harness.model.state import State
from harness.model.taps import Taps
from harness.optim.over_ranks import OverRanks


class RouterBias:
    """b_i += `moe.bias_rate` sign(mean load - load_i), by the tokens of a step over all ranks and micro-batches.

    Balance without a loss (Wang et al. 2024, arXiv 2408.15664, algorithm 1; DeepSeek-V3, arXiv 2412.19437, section
    2.1.2). A row that does not step keeps its biases; they are state of a row, as its weights are.
    """

    part = "moe.bias_rate"
    names = "blocks.{}.moe.correction_bias"  # as faults know them, by layer (DeepSeek: e_score_correction_bias)

    def __init__(self, model: Model, experts: int, state: State, like: Tensor, taps: Taps):
        """`like` has a row for each slot of the pack."""
        self._shape = model.depth, experts
        self._bias = state.add("router_bias", like.new_zeros(len(like), *self._shape))
        for name in taps.names:  # heard where a pass counts: not in validation, nor when it is computed again
            if name.endswith(".moe.loads"):
                taps.attach_to_rows(name, self._hear, on_host=False)

    @staticmethod
    def is_on(trial: Trial) -> bool:
        """Whether the trial's configuration asks for it."""
        return bool(trial.section("block").channel_mixer == "moe" and trial.section("moe").bias_rate > 0)

    def bind(self, trials: Sequence[Trial]) -> None:
        """Work on the rows in use from now on, which are these trials."""
        self._first, bias = trials[0].section("moe").dense_first, self._bias.used
        rates = [trial.section("moe").bias_rate for trial in trials]
        self._rate = torch.tensor(rates, dtype=torch.float64).to(bias)[:, None, None]
        self._loads = bias.new_zeros(len(trials), *self._shape)

    @classmethod
    def shapes(cls, trial: Trial) -> dict[str, tuple[int, ...]]:
        """The biases of a trial, by name: those of blocks with experts, none without."""
        if not cls.is_on(trial):
            return {}
        options, depth = trial.section("moe"), trial.model.depth
        return {cls.names.format(layer): (options.experts,) for layer in range(options.dense_first, depth)}

    def buffers(self, row: int) -> dict[str, Tensor]:
        """Views of those of a row, [E] each, by name."""
        biases = enumerate(self._bias.used[row])
        return {self.names.format(layer): bias for layer, bias in biases if layer >= self._first}

    def of(self, layer: int, rows: slice) -> Tensor:
        """That of a layer's experts in these rows, [r, 1, E]."""
        return self._bias.used[rows, layer, None]

    def _hear(self, name: str, loads_RxE: Tensor, rows: slice) -> None:
        self._loads[rows, int(name.split(".")[1])] += loads_RxE.detach()

    def act(self, stepping_R: Tensor, ranks: OverRanks) -> Tensor:
        """Move the biases of the rows that step; in which rows any has moved, [R]."""
        loads = ranks.total(self._loads)
        away = sums.mean(loads)[..., None] - loads
        moved = self._rate * away.sign() * stepping_R[:, None, None]
        self._bias.used.add_(torch.where(moved.isfinite(), moved, 0.0))
        self._loads.fill_(0)
        return (moved != 0).flatten(1).any(1)
