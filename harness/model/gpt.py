"""The GPT decoder of a pack, trial first everywhere: embedding, residual stream, where norms stand in it, and head.

What a block adds to the residual stream are its branches (harness/model/branches/). A norm, gain or shift whose tensor
the configuration gives to the model is applied, and x passes as it is by one without (harness/model/tools.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from harness.config import Model, Trial
from harness.model.branches import Branches, branches_of
from harness.model.caps import soft_cap
from harness.model.layers import add_positions, embedding
from harness.model.outline import tap_shapes
from harness.model.parameters import Layout
from harness.model.placements import Placement, branch_steps, placement_of
from harness.model.precision import Precision
from harness.model.scaling import branch_multiplier, embedding_multiplier, output_multiplier
from harness.model.sigma import SingularVectors
from harness.model.taps import Taps
from harness.model.tools import Part, Tools


class GPT:
    """Computes logits from flat weights, and leaves gradients in a flat array of the same layout.

    `precision` is that of matrix products; the residual stream and the loss keep that of the weights. With
    `checkpointing` a block keeps its input alone, and computes the rest again when its backward pass begins.
    `vectors` are there where hidden matrices are reparametrised. No `branches`: the usual ones.
    """

    def __init__(
        self,
        config: Model,
        layout: Layout,
        precision: Precision,
        checkpointing: bool = False,
        vectors: SingularVectors | None = None,
        branches: Branches = (),
    ):
        self.config, self.checkpointing = config, checkpointing
        self._branches = branches or branches_of(Trial(config))
        self.taps = Taps(list(tap_shapes(config, 1, 1, self._branches)))
        self.tools = Tools(config, layout, precision, self.taps, vectors)
        self.explicit_attention = config.explicit_attention
        self.first_sequence = 0  # number within the batch of the first sequence of the next pass
        self._head = "embedding" if config.tied_head else "head"
        self._placements = [placement_of(config, block) for block in range(config.depth)]

    def bind(self, trials: Sequence[Trial], parts: Sequence[slice], weights_RxP: Tensor, gradients_RxP: Tensor) -> None:
        """Read these weights from now on, and write gradients there: rows of these trials, cut into `parts`.

        A call works on the part that was selected last, the first to begin with.
        """
        self._parts = [Part(rows, trials[rows], weights_RxP[rows], gradients_RxP[rows]) for rows in parts]
        self._root = weights_RxP.new_zeros((), requires_grad=True)
        self.select(0)

    def select(self, part: int) -> None:
        """Go on with this part."""
        self.tools.part = self._parts[part]

    def begin(self, step: int, active_R: Tensor) -> None:
        """Be ready for all forward passes up to the next call, now that the weights of this step are known.

        Nothing changes in trials that are not active.
        """
        self.tools.step = step
        if self.tools.vectors:
            self.tools.vectors.iterate(active_R)

    def __call__(self, tokens_RxBxT: Tensor) -> Tensor:
        """Logits [R, B x T, V]."""
        sequences, context = tokens_RxBxT.shape[1:]
        self.tools.sequences = range(self.first_sequence, self.first_sequence + sequences)
        x = self._embedding(tokens_RxBxT)
        for i in range(self.config.depth):
            x = self._checkpointed_block(i, x, context) if self.checkpointing else self._block(i, x, context)
            x = self.taps(f"blocks.{i}.residual", x)
        x = self.tools.norm("final_norm", self.taps.copied("head.input", x))
        logits = self.tools.linear(x, self._head).to(self._root.dtype)
        multiplier, cap = output_multiplier(self.config), self.tools.switched("output_cap", 3)
        logits = logits if multiplier == 1 else logits * multiplier
        return self.taps("logits", logits if cap is None else soft_cap(logits, cap))

    def _embedding(self, tokens_RxBxT: Tensor) -> Tensor:
        trials, _, context = tokens_RxBxT.shape
        tied, tools = self.config.tied_head, self.tools
        x = embedding(tokens_RxBxT.reshape(trials, -1), tools.leaf("embedding"), self._root, tied)
        if self.config.positions == "learned":
            x = add_positions(x, tools.leaf("positions"), context)
        multiplier = embedding_multiplier(self.config)
        x = x if multiplier == 1 else x * multiplier
        x = tools.norm("embedding_norm", x).to(self._root.dtype)
        return self.taps("embedding", tools.dropped("embedding", x))

    def _checkpointed_block(self, i: int, x_RxNxD: Tensor, context: int) -> Tensor:
        """The block, whose taps are read and struck in the forward pass alone, and not when it is computed again."""

        def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
            return nullcontext(), self.taps.muted()

        return checkpoint(
            self._block, i, x_RxNxD, context, use_reentrant=False, preserve_rng_state=False, context_fn=contexts
        )

    def _block(self, i: int, x_RxNxD: Tensor, context: int) -> Tensor:
        x = x_RxNxD
        for branch in self._branches:
            name = f"blocks.{i}.{branch.kind}"
            x = self._add(name, self._placements[i], x, branch(self.tools, name, self._read(name, x), context))
        return x

    def _read(self, name: str, x_RxNxD: Tensor) -> Tensor:
        """What a branch reads of the residual stream."""
        return self.tools.norm(f"{name}_norm", self.taps.copied(f"{name}.input", x_RxNxD))

    def _add(self, name: str, placement: Placement, x_RxNxD: Tensor, branch_RxNxD: Tensor) -> Tensor:
        """The residual stream with what a branch adds to it, as the equation in harness/model/placements.py has it."""
        tools, x = self.tools, x_RxNxD
        branch = tools.norm(f"{name}_output_norm", branch_RxNxD)
        branch = tools.scaled(f"{name}.multiplier", tools.scaled(f"{name}.layer_scale", branch))
        multiplier = branch_multiplier(self.config)
        if multiplier != 1:
            branch = branch.to(x.dtype) * multiplier
        if placement.grows:
            steps = tools.strength("branch_steps", 3, branch_steps)
            branch = branch * (torch.full_like(steps, tools.step) / steps).clamp(max=1.0)
        branch = tools.dropped(name, branch)
        x = (x if placement.skip == 1 else x * placement.skip) + branch
        return tools.norm(f"{name}_sum_norm", self.taps(f"{name}.sum", x)).to(x.dtype)
