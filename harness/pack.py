"""A pack: R trials of one structure, trained together; axis 0 of every tensor is the trial."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from harness.batches import Batches
from harness.config import Trial
from harness.corpus import Corpus
from harness.loss import cross_entropy
from harness.model import GPT
from harness.optimizers.adamw import AdamW
from harness.parameters import Layout, new_weights
from harness.precision import FORMATS
from harness.scaling import tensor_table
from harness.schedules import learning_rates


class Pack:
    """The whole state of R trials.

    `planned` numbers the trials as they were given; `rows[i]` is the planned number of row i, because rows of
    trials that froze are dropped on the way.
    """

    def __init__(self, trials: Sequence[Trial], corpus: Corpus, device: torch.device):
        structures = {trial.structure for trial in trials}
        if len(structures) != 1:
            raise ValueError(f"a pack needs trials of one structure, got {len(structures)}")
        first = trials[0]
        self.planned, self.rows = tuple(trials), list(range(len(trials)))
        self.steps, self.device = first.train.steps, device
        self.dtype, compute = FORMATS[first.train.precision]
        self.layout = Layout(tuple(tensor_table(first.model, corpus.vocabulary)))
        self.weights = new_weights(self.layout, [t.seeds["init"] for t in trials], self.dtype, device)
        self.gradients = torch.zeros_like(self.weights)
        self.model = GPT(first.model, self.layout, compute)
        self.model.bind(self.weights, self.gradients)
        self.optimizer = AdamW(trials, self.layout, self.weights, self.gradients)
        data_seeds = [t.seeds["data"] for t in trials]
        self.batches = Batches(corpus, data_seeds, first.train.batch, first.model.context, device)
        self.learning_rates = learning_rates(trials, self.dtype).to(device)
        self.clip = self._column([float("inf") if t.optim.clip is None else t.optim.clip for t in trials])
        self.clips = any(t.optim.clip is not None for t in trials)
        self.active = torch.ones(len(trials), dtype=torch.bool, device=device)

    def _column(self, values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=self.device)

    def __len__(self) -> int:
        return len(self.rows)

    def row_of(self, planned: int) -> int | None:
        """Where the trial stands now, or None if it has left the pack or is frozen."""
        if planned not in self.rows:
            return None
        row = self.rows.index(planned)
        return row if bool(self.active[row]) else None

    def tensors(self, flat: Tensor, row: int) -> Mapping[str, Tensor]:
        """Views of one trial's tensors in a flat array, by name."""
        return {name: self.layout.view(flat, name)[row] for name in self.layout.by_name}

    def loss(self, batch_RxBxT1: Tensor) -> Tensor:
        """Mean loss of each trial, [R]; its backward pass fills `gradients`."""
        logits = self.model(batch_RxBxT1[:, :, :-1])
        return cross_entropy(logits, batch_RxBxT1[:, :, 1:].reshape(len(self), -1))

    def validation_loss(self, count: int) -> Tensor:
        """Mean loss over `count` held-out batches, the same for every trial and every time, [R]."""
        with torch.no_grad(), self.model.taps.muted():
            losses = [self.loss(self.batches.validation(i).expand(len(self), -1, -1)).double() for i in range(count)]
        return torch.stack(losses).mean(0)

    def keep(self, rows: Sequence[int]) -> None:
        """Go on with these rows only."""
        index = list(rows)
        self.rows = [self.rows[r] for r in index]
        self.weights = self.weights[index].contiguous()
        self.gradients = self.gradients[index].contiguous()
        self.model.bind(self.weights, self.gradients)
        self.optimizer.keep(index, self.weights, self.gradients)
        self.batches.keep(index)
        self.learning_rates = self.learning_rates[:, index].contiguous()
        self.clip, self.active = self.clip[index], self.active[index]
