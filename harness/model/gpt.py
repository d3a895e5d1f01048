"""The GPT decoder of a pack, trial first everywhere: embedding, residual stream, where norms stand in it, and head.

What a block adds to the residual stream are its branches (harness/model/branches/). A norm, gain or shift whose tensor
the configuration gives to the model is applied, and x passes as it is by one without (harness/model/tools.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from harness.basics.devices import sent
from harness.config import Model, Trial
from harness.model.branches import Branches, branches_of
from harness.model.dropout import Streams
from harness.model.hyper_connections import collapsed, collapsed_at_the_end, mixed, mixing_of, spread
from harness.model.hypersphere import moved
from harness.model.key_values import KeyValues
from harness.model.layers import add_positions, embedding, soft_cap
from harness.model.outline import route_shapes, tap_shapes
from harness.model.parameters import Layout
from harness.model.placements import Placement, branch_steps, placement_of
from harness.model.precision import Precision
from harness.model.scaling import branch_multiplier, embedding_multiplier, output_multiplier
from harness.model.sigma import SingularVectors
from harness.model.taps import ALL, RowTaps, Taps
from harness.model.tools import Biases, ExpertRoutes, Notices, Part, Tools


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
        self.config, self.layout, self.precision, self.checkpointing = config, layout, precision, checkpointing
        self._branches = branches or branches_of(Trial(config))
        names = *tap_shapes(config, 1, 1, self._branches), *route_shapes(config, 1, self._branches)
        self.taps = Taps(list(names))
        self.notice: Notices = lambda part, acted_r, rows: None  # is told what acted in a pass, and in which rows
        self._streams = Streams()
        self._vectors = vectors
        self.explicit_attention = config.explicit_attention
        self.router_bias: Biases | None = None
        self.routes: ExpertRoutes | None = None
        self._beside: list[Tensor] = []  # losses of the last pass beside that of its logits
        self.first_sequence = 0  # number within the batch of the first sequence of the next pass
        self._head = "embedding" if config.tied_head else "head"
        self._blocks = [[branch.at(block) for branch in self._branches] for block in range(config.depth)]
        places = range(len(self._branches))
        self._placements = [[placement_of(config, block, place) for place in places] for block in range(config.depth)]

    def bind(self, trials: Sequence[Trial], parts: Sequence[slice], weights_RxP: Tensor, gradients_RxP: Tensor) -> None:
        """Read these weights from now on, and write gradients there: rows of these trials, cut into `parts`.

        A call is for the rows of one of the parts.
        """
        parts_of_rows = (Part(rows, trials[rows], weights_RxP[rows], gradients_RxP[rows]) for rows in parts)
        self._parts = {part.rows.start: part for part in parts_of_rows}
        self._root = weights_RxP.new_zeros((), requires_grad=True)
        self._at = torch.zeros(len(trials), dtype=torch.int64, device=weights_RxP.device)
        self._streams.bind([trial.seeds["data"] for trial in trials], weights_RxP.device)
        self._streams.stand_at([0] * len(trials))

    def stand_at(self, steps: int | Sequence[int]) -> None:
        """The forward passes up to the next call are of this step, or those of each row."""
        if isinstance(steps, int):
            self._at.fill_(steps)
        else:
            self._at.copy_(sent(torch.tensor(steps), self._at.device))
        self._streams.stand_at([steps] * len(self._at) if isinstance(steps, int) else steps)

    @property
    def at(self) -> Tensor:
        """The step of each row, [R]."""
        return self._at

    def other(self, precision: Precision | None = None) -> GPT:
        """Another one alike, for passes of which this one knows nothing; it keeps nothing for a backward pass.

        With its own `precision` of matrix products, if one is given.
        """
        return GPT(self.config, self.layout, precision or self.precision, False, self._vectors, self._branches)

    def stand_with(self, other: GPT) -> None:
        """At the same steps as another one; of what is random in training nothing follows."""
        self._at.copy_(other.at)

    def begin(self, active_R: Tensor) -> None:
        """Be ready for the forward passes of a step, now that its weights are known.

        Nothing changes in trials that are not active.
        """
        if self._vectors:
            self._vectors.iterate(active_R)

    def tools(
        self, rows: slice = ALL, tokens_RxBxT: Tensor | None = None, key_values: KeyValues | None = None
    ) -> Tools:
        """For one pass of these rows: of these tokens, or where none are named one of a single sequence."""
        sequences = 1 if tokens_RxBxT is None else tokens_RxBxT.shape[1]
        part = self._parts[rows.start or 0]
        numbers = range(self.first_sequence, self.first_sequence + sequences)
        known = self.config, self.layout, self.precision, self._vectors, self.notice
        now = part, self._at[part.rows], self._streams, numbers, RowTaps(self.taps, part.rows)
        return Tools(*known, *now, tokens_RxBxT, self.router_bias, self.routes, key_values=key_values)

    def __call__(self, tokens_RxBxT: Tensor, rows: slice = ALL) -> Tensor:
        """Logits [R, B x T, V] of the rows of one part, the first where none is named."""
        return self.with_states(tokens_RxBxT, rows)[2]

    def with_states(self, tokens_RxBxT: Tensor, rows: slice = ALL) -> tuple[Tools, Tensor, Tensor]:
        """The same logits, behind the tools of their pass and the states that the head reads, [R, B x T, D]."""
        tools, x = self.stream(tokens_RxBxT, rows)
        self._beside = list(tools.losses)
        return tools, *self._logits(tools, x)

    def last_logits(self, tokens_RxBxT: Tensor, rows: slice = ALL, key_values: KeyValues | None = None) -> Tensor:
        """Logits of what follows each sequence, [R, B, V]; with `key_values` tokens are those that are new."""
        tools, x = self.stream(tokens_RxBxT, rows, key_values)
        if key_values is not None:
            key_values.read += tokens_RxBxT.shape[2]
        last = x.unflatten(1, tokens_RxBxT.shape[1:])[:, :, -1]
        return self._logits(tools, last.contiguous())[1]

    def _logits(self, tools: Tools, x: Tensor) -> tuple[Tensor, Tensor]:
        """What the head reads of the residual stream, and the logits that it makes of that."""
        x = tools.norm("final_norm", tools.taps.copied("head.input", x))
        logits = tools.linear(x, self._head).to(self._root.dtype)
        multiplier, cap = output_multiplier(self.config), tools.switched("output_cap", 3)
        logits = tools.scaled("logit_factor", logits if multiplier == 1 else logits * multiplier)
        return x, tools.taps("logits", logits if cap is None else soft_cap(logits, cap))

    def stream(
        self, tokens_RxBxT: Tensor, rows: slice = ALL, key_values: KeyValues | None = None
    ) -> tuple[Tools, Tensor]:
        """The residual stream after the last block, [R, B x T, D], and the tools of that pass."""
        tools, context = self.tools(rows, tokens_RxBxT, key_values), tokens_RxBxT.shape[2]
        x = self._embedding(tools, tokens_RxBxT)
        streams = self.config.residual_streams
        x = x if streams == 1 else spread(x, streams)
        for i in range(self.config.depth):
            block = self._checkpointed_block if self.checkpointing else self._block
            x = self._seen(tools, i, block(tools, i, x, context))
        return tools, x if streams == 1 else collapsed_at_the_end(tools, x)

    def _seen(self, tools: Tools, i: int, x: Tensor) -> Tensor:
        """What a block leaves, [R, N, D] or [R, N, n, D], past its tap."""
        name = f"blocks.{i}.residual"
        return tools.taps(name, x) if x.dim() == 3 else tools.taps(name, x.flatten(2)).view_as(x)

    def with_own_losses(self, loss_r: Tensor) -> Tensor:
        """The loss of the last pass, [r], with what its branches want to be differentiated too."""
        beside, self._beside = self._beside, []
        for loss in beside:
            loss_r = loss_r + loss
        return loss_r

    def _embedding(self, tools: Tools, tokens_RxBxT: Tensor) -> Tensor:
        trials, _, context = tokens_RxBxT.shape
        x = embedding(self._root, tokens_RxBxT.reshape(trials, -1), tools.leaf("embedding"), self.config.tied_head)
        if self.config.positions == "learned":
            x = add_positions(x, tools.leaf("positions"), context)
        multiplier = embedding_multiplier(self.config)
        x = x if multiplier == 1 else x * multiplier
        x = tools.norm("embedding_norm", x).to(self._root.dtype)
        return tools.taps("embedding", tools.dropped("embedding", x))

    def _checkpointed_block(self, tools: Tools, i: int, x: Tensor, context: int) -> Tensor:
        """The block, whose taps are read and struck in the forward pass alone, and not when it is computed again."""

        def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
            return nullcontext(), self.taps.muted()

        block = partial(self._block, tools, i, context=context)
        output: Tensor = checkpoint(block, x, context_fn=contexts, use_reentrant=False, preserve_rng_state=False)
        return output

    def _block(self, tools: Tools, i: int, x: Tensor, context: int) -> Tensor:
        for place, branch in enumerate(self._blocks[i]):
            name, placement = f"blocks.{i}.{branch.kind}", self._placements[i][place]
            if self.config.residual_streams > 1:
                mixing = mixing_of(tools, name, i, place, x)
                _, read = self._read(tools, name, i, collapsed(x, mixing.pre))
                given = self._given(tools, name, placement, branch(tools, name, read, context)).to(x.dtype)
                x = mixed(x, given, mixing.post, mixing.residual)
            else:
                x, read = self._read(tools, name, i, x)
                x = self._add(tools, name, placement, x, branch(tools, name, read, context))
        return x

    def _read(self, tools: Tools, name: str, i: int, x_RxNxD: Tensor) -> tuple[Tensor, Tensor]:
        """The residual stream as it goes on beside a branch, and what the branch reads of it."""
        if f"{name}.input" in tools.taps:
            x, read = x_RxNxD, tools.norm(f"{name}_norm", tools.taps.copied(f"{name}.input", x_RxNxD))
        else:
            x, read = tools.norm_beside(f"{name}_norm", x_RxNxD)
        if self.config.depth_scaled_norms and i > 0 and f"{name}_norm" in self.layout.by_name:
            read = read * (i + 1) ** -0.5  # LayerNorm Scaling, Sun et al. 2025, arXiv 2502.05795, equation 4
        return x, read

    def _add(self, tools: Tools, name: str, placement: Placement, x_RxNxD: Tensor, branch_RxNxD: Tensor) -> Tensor:
        """The residual stream with what a branch adds to it, as the equation in harness/model/placements.py has it."""
        x, branch = x_RxNxD, self._given(tools, name, placement, branch_RxNxD)
        if self.config.hypersphere:
            return moved(x, branch, tools.leaf(f"{name}.sphere_step"))
        x = (x if placement.skip == 1 else x * placement.skip) + branch
        return tools.norm(f"{name}_sum_norm", tools.taps(f"{name}.sum", x)).to(x.dtype)

    def _given(self, tools: Tools, name: str, placement: Placement, branch_RxNxD: Tensor) -> Tensor:
        """What is added of what a branch gives."""
        branch = tools.norm(f"{name}_output_norm", branch_RxNxD)
        branch = tools.scaled(f"{name}.multiplier", tools.scaled(f"{name}.layer_scale", branch))
        multiplier = branch_multiplier(self.config)
        if multiplier != 1:
            branch = branch.to(self._root.dtype) * multiplier
        if placement.grows:
            steps = tools.strength("branch_steps", 3, branch_steps)
            branch = branch * (tools.at.to(steps).view_as(steps) / steps).clamp(max=1.0)
        return tools.dropped(name, branch)
