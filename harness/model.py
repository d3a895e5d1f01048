"""The GPT decoder of a pack: pre-LN blocks, trial first everywhere."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from harness import attention
from harness.config import Model, Trial
from harness.layers import add_positions, embedding, layer_norm, linear, silu
from harness.parameters import Layout, Leaf
from harness.precision import Precision
from harness.scaling import attention_multiplier, output_multiplier
from harness.taps import Taps, tap_shapes

_Leaves = dict[tuple[str, str | None], Leaf]


class GPT:
    """Computes logits from flat weights, and leaves gradients in a flat array of the same layout.

    `precision` is that of matrix products; norms, the residual stream and the loss keep that of the weights.
    """

    def __init__(self, config: Model, layout: Layout, precision: Precision):
        self.config, self.layout, self.precision = config, layout, precision
        self.taps = Taps(list(tap_shapes(config, 1, 1)))
        self.explicit_attention = config.explicit_attention

    def bind(self, parts: Sequence[tuple[Tensor, Tensor, Sequence[Trial]]]) -> None:
        """Read these weights [r, P] from now on, and write gradients there [r, P], for these r trials.

        There are one or more parts of a pack's rows. A call works on the part that was selected last, the first to
        begin with.
        """
        self._parts: list[tuple[Tensor, Tensor, list[Trial], _Leaves, dict[tuple[str, int], Tensor]]] = [
            (weights, gradients, list(trials), _Leaves(), {}) for weights, gradients, trials in parts
        ]
        weights = parts[0][0]
        self._root = torch.zeros((), dtype=weights.dtype, device=weights.device, requires_grad=True)
        self.select(0)

    def select(self, part: int) -> None:
        """Go on with this part."""
        self._weights, self._gradients, self._trials, self._leaves, self._strengths = self._parts[part]

    def _strength(self, name: str, dims: int) -> Tensor:
        """A per-trial field of the configuration, [r, 1, ...] of so many dims."""
        key = (name, dims)
        if key not in self._strengths:
            values = [getattr(trial.model, name) for trial in self._trials]
            column = torch.tensor(values, dtype=torch.float64).to(self._weights)
            self._strengths[key] = column.view(-1, *[1] * (dims - 1))
        return self._strengths[key]

    def _leaf(self, first: str, last: str | None = None) -> Leaf:
        """The tensor, or the stack of neighbouring matrices, under its name."""
        key = (first, last)
        if key not in self._leaves:
            views = (self.layout.view(flat, first, last) for flat in (self._weights, self._gradients))
            self._leaves[key] = Leaf(*views)
        return self._leaves[key]

    def _linear(self, x_RxNxI: Tensor, first: str, last: str | None = None) -> Tensor:
        return linear(x_RxNxI, self._leaf(first, last), self.precision)

    def _tap(self, name: str, x: Tensor) -> Tensor:
        """A tap on what matrix products read or leave: whatever is written there is held in their precision too."""
        return self.precision(self.taps(name, x)) if name in self.taps else x

    def __call__(self, tokens_RxBxT: Tensor) -> Tensor:
        """Logits [R, B x T, V]."""
        trials, _, context = tokens_RxBxT.shape
        x = embedding(tokens_RxBxT.reshape(trials, -1), self._leaf("embedding"), self._root)
        if self.config.positions == "learned":
            x = add_positions(x, self._leaf("positions"))
        x = self.taps("embedding", x)
        for i in range(self.config.depth):
            x = x + self._attention(f"blocks.{i}", x, context)
            x = x + self._feedforward(f"blocks.{i}", x)
            x = self.taps(f"blocks.{i}.residual", x)
        x = self.taps.copied("head.input", x)
        x = layer_norm(x, self._leaf("final_norm"), self.config.norm_epsilon)
        logits = self._linear(x, "head").to(x.dtype)
        multiplier = output_multiplier(self.config)
        return self.taps("logits", logits if multiplier == 1 else logits * multiplier)

    def _attention(self, block: str, x_RxNxD: Tensor, context: int) -> Tensor:
        c, precision, name = self.config, self.precision, f"{block}.attention"
        trials, tokens, width = x_RxNxD.shape
        x = self.taps.copied(f"{name}.input", x_RxNxD)
        normed = layer_norm(x, self._leaf(f"{block}.attention_norm"), c.norm_epsilon)
        qkv = self._linear(normed, f"{name}.query", f"{name}.value")
        q, k, v = attention.split_heads(qkv, context, width // c.head_dim)
        if c.qk_norm:
            q = precision(layer_norm(q, self._leaf(f"{name}.query_norm"), c.norm_epsilon))
            k = precision(layer_norm(k, self._leaf(f"{name}.key_norm"), c.norm_epsilon))
        q, k, v = self._tap(f"{name}.query", q), self._tap(f"{name}.key", k), self._tap(f"{name}.value", v)
        if c.positions == "rotary":
            q, k = (attention.rotate(part, x_RxNxD.dtype) for part in (q, k))
        scale, explicit = attention_multiplier(c), self.explicit_attention
        mixed = attention.attend(q, k, v, scale, explicit, precision, self.taps, name)
        return self._tap(f"{name}.projection", self._linear(mixed.reshape(trials, tokens, width), f"{name}.projection"))

    def _feedforward(self, block: str, x_RxNxD: Tensor) -> Tensor:
        name = f"{block}.feedforward"
        x = self.taps.copied(f"{name}.input", x_RxNxD)
        normed = layer_norm(x, self._leaf(f"{block}.feedforward_norm"), self.config.norm_epsilon)
        if self.config.activation == "swiglu":
            gate, up = self._linear(normed, f"{name}.gate", f"{name}.up").chunk(2, -1)
            hidden = self.precision(silu(gate)) * self._tap(f"{name}.up", up)
        else:
            hidden = F.gelu(self._tap(f"{name}.up", self._linear(normed, f"{name}.up")))
        return self._tap(f"{name}.down", self._linear(hidden, f"{name}.down"))
