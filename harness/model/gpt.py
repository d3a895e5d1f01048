"""The GPT decoder of a pack, trial first everywhere.

Every variant is written where it stands in the forward pass. A norm, gain or shift whose tensor the configuration gives
to the model (harness/model/tensors.py) is applied; one without a tensor is not there, and x passes as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from harness.config import Model, Trial
from harness.model import attention
from harness.model.activations import ACTIVATIONS, clamp_swiglu, is_beyond
from harness.model.caps import soft_cap
from harness.model.dropout import dropped, stream
from harness.model.layers import Leaf, add_positions, embedding, linear, scaled, shifted
from harness.model.norms import NORMS
from harness.model.parameters import Layout
from harness.model.placements import Placement, branch_steps, placement_of
from harness.model.precision import Precision
from harness.model.scaling import attention_multiplier, branch_multiplier, embedding_multiplier, output_multiplier
from harness.model.sigma import SingularVectors, reparametrised
from harness.model.taps import Taps, tap_shapes

SWIGLU_CLAMP = "model.swiglu_clamp"  # the part of a recipe that is counted under this key


@dataclass(frozen=True)
class _Part:
    """Rows that pass through the model together, and what has been looked up for them: weights, gradients [r, P]."""

    rows: slice
    trials: Sequence[Trial]
    weights: Tensor
    gradients: Tensor
    leaves: dict[tuple[str, str | None], Leaf] = field(default_factory=dict)
    strengths: dict[tuple[str, int], Tensor] = field(default_factory=dict)


class GPT:
    """Computes logits from flat weights, and leaves gradients in a flat array of the same layout.

    `precision` is that of matrix products; the residual stream and the loss keep that of the weights. With
    `checkpointing` a block keeps its input alone, and computes the rest again when its backward pass begins.
    `vectors` are there where hidden matrices are reparametrised.
    """

    def __init__(
        self,
        config: Model,
        layout: Layout,
        precision: Precision,
        checkpointing: bool = False,
        vectors: SingularVectors | None = None,
    ):
        self.config, self.layout, self.precision, self.checkpointing = config, layout, precision, checkpointing
        self.taps = Taps(list(tap_shapes(config, 1, 1)))
        self.notice: Callable[[str, Tensor], None] = lambda part, acted_r: None  # is told what acted in a forward pass
        self.explicit_attention = config.explicit_attention
        self.steps: int | Sequence[int] = 0  # at which all rows stand, or each
        self.first_sequence = 0  # number within the batch of the first sequence of the next pass
        self._vectors = vectors
        self._head = "embedding" if config.tied_head else "head"
        self._placements = [placement_of(config, block) for block in range(config.depth)]

    def bind(self, trials: Sequence[Trial], parts: Sequence[slice], weights_RxP: Tensor, gradients_RxP: Tensor) -> None:
        """Read these weights from now on, and write gradients there: rows of these trials, cut into `parts`.

        A call works on the part that was selected last, the first to begin with.
        """
        self._parts = [_Part(rows, trials[rows], weights_RxP[rows], gradients_RxP[rows]) for rows in parts]
        self._root = weights_RxP.new_zeros((), requires_grad=True)
        self.select(0)

    def select(self, part: int) -> None:
        """Go on with this part."""
        self._part = self._parts[part]

    def begin(self, steps: int | Sequence[int], active_R: Tensor) -> None:
        """Be ready for all forward passes up to the next call, now that the weights of this step are known.

        `steps`: that of all rows, or of each. Nothing changes in trials that are not active.
        """
        self.steps = steps
        if self._vectors:
            self._vectors.iterate(active_R)

    # --- what belongs to the trials of the part ----------------------------------------------------------------------

    def _strength(self, name: str, dims: int) -> Tensor:
        """A per-trial field of the configuration, [r, 1, ...] of so many dims."""
        key, part = (name, dims), self._part
        if key not in part.strengths:
            read = branch_steps if name == "branch_steps" else lambda trial: getattr(trial.model, name)
            values = [read(trial) for trial in part.trials]
            column = torch.tensor(values, dtype=torch.float64).to(part.weights)
            part.strengths[key] = column.view(-1, *[1] * (dims - 1))
        return part.strengths[key]

    def _own_steps(self) -> Sequence[int]:
        """The step of each row of the part, [r]."""
        rows = self._part.rows
        return [self.steps] * (rows.stop - rows.start) if isinstance(self.steps, int) else self.steps[rows]

    def _switched(self, name: str, dims: int) -> Tensor | None:
        """The same of a field that may be null, and is then null in every trial."""
        return None if getattr(self.config, name) is None else self._strength(name, dims)

    def _leaf(self, first: str, last: str | None = None) -> Leaf:
        """The tensor, or the stack of neighbouring matrices, under its name."""
        key, part = (first, last), self._part
        if key not in part.leaves:
            views = (self.layout.view(flat, first, last) for flat in (part.weights, part.gradients))
            part.leaves[key] = Leaf(*views)
        return part.leaves[key]

    # --- small parts -------------------------------------------------------------------------------------------------

    def _linear(self, x_RxNxI: Tensor, first: str, last: str | None = None) -> Tensor:
        x, leaf = self._shifted(f"{first}_shift", x_RxNxI), self._leaf(first, last)
        is_biased = f"{first}_bias" in self.layout.by_name
        bias = self._leaf(f"{first}_bias", f"{last}_bias" if last else None) if is_biased else None
        if self._vectors and first != self._head:
            gamma = self._leaf(f"{first}_scale", f"{last}_scale" if last else None)
            x, leaf = reparametrised(x, leaf, gamma, *self._vectors.stack(first, last, self._part.rows))
        return linear(x, leaf, self.precision, bias)

    def _norm(self, name: str, x: Tensor) -> Tensor:
        if name not in self.layout.by_name:
            return x
        norm, leaf, held = NORMS[self.config.norm], self._leaf(name), self.precision.norm
        gain = Leaf(held(leaf.weight).to(leaf.weight.dtype), leaf.gradient)
        normed = norm(held(x), gain, self.config.norm_epsilon)
        return held(self._shifted(f"{name}_bias", normed, held))

    def _scaled(self, name: str, x: Tensor) -> Tensor:
        return scaled(x, self._leaf(name)) if name in self.layout.by_name else x

    def _shifted(self, name: str, x: Tensor, held: Callable[[Tensor], Tensor] = lambda x: x) -> Tensor:
        if name not in self.layout.by_name:
            return x
        leaf = self._leaf(name)
        return shifted(x, Leaf(held(leaf.weight).to(leaf.weight.dtype), leaf.gradient))

    def _dropped(self, name: str, x_RxNxxx: Tensor) -> Tensor:
        """x, of whose N sequences or tokens parts are dropped in training."""
        shares = self._switched("dropout", 1)
        if shares is None or not torch.is_grad_enabled():
            return x_RxNxxx
        seeds = zip((trial.seeds["data"] for trial in self._part.trials), self._own_steps(), strict=True)
        sequences = range(self.first_sequence, self.first_sequence + self._sequences)
        return dropped(x_RxNxxx, shares, [stream(seed, step, name) for seed, step in seeds], sequences)

    def _tap(self, name: str, x: Tensor) -> Tensor:
        """A tap on what matrix products read or leave: whatever is written there is held in their precision too."""
        return self.precision(self.taps(name, x)) if name in self.taps else x

    # --- the forward pass --------------------------------------------------------------------------------------------

    def __call__(self, tokens_RxBxT: Tensor) -> Tensor:
        """Logits [R, B x T, V]."""
        self._sequences, context = tokens_RxBxT.shape[1:]
        x = self._embedding(tokens_RxBxT)
        for i in range(self.config.depth):
            x = self._checkpointed_block(i, x, context) if self.checkpointing else self._block(i, x, context)
            x = self.taps(f"blocks.{i}.residual", x)
        x = self._norm("final_norm", self.taps.copied("head.input", x))
        logits = self._linear(x, self._head).to(self._root.dtype)
        multiplier, cap = output_multiplier(self.config), self._switched("output_cap", 3)
        logits = logits if multiplier == 1 else logits * multiplier
        return self.taps("logits", logits if cap is None else soft_cap(logits, cap))

    def _embedding(self, tokens_RxBxT: Tensor) -> Tensor:
        trials, _, context = tokens_RxBxT.shape
        tied = self.config.tied_head
        x = embedding(tokens_RxBxT.reshape(trials, -1), self._leaf("embedding"), self._root, tied)
        if self.config.positions == "learned":
            x = add_positions(x, self._leaf("positions"), context)
        multiplier = embedding_multiplier(self.config)
        x = x if multiplier == 1 else x * multiplier
        x = self._norm("embedding_norm", x).to(self._root.dtype)
        return self.taps("embedding", self._dropped("embedding", x))

    def _checkpointed_block(self, i: int, x_RxNxD: Tensor, context: int) -> Tensor:
        """The block, whose taps are read and struck in the forward pass alone, and not when it is computed again."""

        def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
            return nullcontext(), self.taps.muted()

        return checkpoint(
            self._block, i, x_RxNxD, context, use_reentrant=False, preserve_rng_state=False, context_fn=contexts
        )

    def _block(self, i: int, x_RxNxD: Tensor, context: int) -> Tensor:
        placement, x = self._placements[i], x_RxNxD
        name = f"blocks.{i}.attention"
        x = self._add(name, placement, x, self._attention(name, self._read(name, x), context))
        name = f"blocks.{i}.feedforward"
        return self._add(name, placement, x, self._feedforward(name, self._read(name, x)))

    def _read(self, name: str, x_RxNxD: Tensor) -> Tensor:
        """What a branch reads of the residual stream."""
        return self._norm(f"{name}_norm", self.taps.copied(f"{name}.input", x_RxNxD))

    def _add(self, name: str, placement: Placement, x_RxNxD: Tensor, branch_RxNxD: Tensor) -> Tensor:
        """The residual stream with what a branch adds to it, as the equation in harness/model/placements.py has it."""
        x, branch = x_RxNxD, self._norm(f"{name}_output_norm", branch_RxNxD)
        branch = self._scaled(f"{name}.multiplier", self._scaled(f"{name}.layer_scale", branch))
        multiplier = branch_multiplier(self.config)
        if multiplier != 1:
            branch = branch.to(x.dtype) * multiplier
        if placement.grows:
            steps = self._strength("branch_steps", 3)
            branch = branch * (torch.tensor(self._own_steps()).to(steps).view_as(steps) / steps).clamp(max=1.0)
        branch = self._dropped(name, branch)
        x = (x if placement.skip == 1 else x * placement.skip) + branch
        return self._norm(f"{name}_sum_norm", self.taps(f"{name}.sum", x)).to(x.dtype)

    def _attention(self, name: str, x_RxNxD: Tensor, context: int) -> Tensor:
        c, precision = self.config, self.precision
        qkv = self._linear(x_RxNxD, f"{name}.query", f"{name}.value")
        if c.qkv_norm:
            parts = qkv.unflatten(-1, (3, c.width))
            qkv = precision(self._norm(f"{name}.qkv_norm", parts)).flatten(-2)
        if c.qk_norm and c.qk_norm_over == "heads":
            query, key, value = qkv.chunk(3, -1)
            query, key = self._norm(f"{name}.query_norm", query), self._norm(f"{name}.key_norm", key)
            qkv = torch.cat([precision(query), precision(key), value], -1)
        q, k, v = attention.split_heads(qkv, context, c.width // c.head_dim)
        if c.qk_norm and c.qk_norm_over == "head":
            q = precision(self._norm(f"{name}.query_norm", q))
            k = precision(self._norm(f"{name}.key_norm", k))
        q, k, v = self._tap(f"{name}.query", q), self._tap(f"{name}.key", k), self._tap(f"{name}.value", v)
        if c.positions == "rotary":
            q, k = (attention.rotate(part, c.rotary_base, self._root.dtype) for part in (q, k))
        scale, explicit = attention_multiplier(c), self.explicit_attention
        limits = self._limits(f"{name}.shares")
        mixed = attention.attend(q, k, v, scale, explicit, precision, self.taps, name, limits)
        projection = self._linear(mixed.reshape(x_RxNxD.shape), f"{name}.projection")
        return self._norm(f"{name}.projection_norm", self._tap(f"{name}.projection", projection))

    def _limits(self, name: str) -> attention.Limits:
        """What the configuration does to attention's logits, and to its shares, whose dropout has this name."""
        temperature, cap = self._switched("attention_temperature", 5), self._switched("attention_cap", 5)
        zeta = self._switched("soft_clip_high", 5)
        clip = None if zeta is None else (zeta, self._strength("soft_clip_low", 5))
        drop = None if self.config.dropout is None else partial(self._dropped, name)
        return attention.Limits(temperature, cap, clip, drop)

    def _feedforward(self, name: str, x_RxNxD: Tensor) -> Tensor:
        activation, precision = ACTIVATIONS[self.config.activation], self.precision
        if activation.gated:
            gate, up = self._linear(x_RxNxD, f"{name}.gate", f"{name}.up").chunk(2, -1)
            gate = self._shifted(f"{name}.activation_shift", self._norm(f"{name}.gate_norm", gate))
            up = self._norm(f"{name}.up_norm", self._tap(f"{name}.up", up))
            bound = self._switched("swiglu_clamp", 3)
            if bound is not None:
                if torch.is_grad_enabled():  # validation is not part of the step
                    self.notice(SWIGLU_CLAMP, is_beyond(gate, up, precision(bound)))
                gate, up = clamp_swiglu(gate, up, precision(bound))
            hidden = precision(activation.function(gate)) * up
        else:
            up = self._norm(f"{name}.up_norm", self._tap(f"{name}.up", self._linear(x_RxNxD, f"{name}.up")))
            hidden = activation.function(self._shifted(f"{name}.activation_shift", up))
        down = self._tap(f"{name}.down", self._linear(hidden, f"{name}.down"))
        return self._norm(f"{name}.down_norm", down)
