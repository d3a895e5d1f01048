"""Every variant of the model once more, in plain PyTorch, one trial at a time: the independent peer of
`harness.model.gpt`.

It shares no code with `harness`: a function of named weights, in which each published equation is written out on its
own. Names of weights and fields of the configuration are those of the harness.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

Weights = dict[str, Tensor]
Vectors = dict[str, Tensor]  # by matrix: the vector that sigma-reparametrisation keeps, [in]


class PlainModel:
    """Computes logits from named weights. `model` is a `harness.config.trial.Model`, read for its values alone."""

    def __init__(self, model: Any, weights: Weights, vectors: Vectors | None = None, seed: int = 0):
        self.model, self.weights, self.vectors, self.step, self.seed = model, weights, vectors or {}, 0, seed
        self.pairs: dict[str, tuple[Tensor, Tensor]] = {}

    def begin(self, step: int) -> None:
        """One power iteration for each matrix that has a vector."""
        self.step = step
        with torch.no_grad():
            for name, vector in self.vectors.items():
                w = self.weights[name]
                left = F.normalize(w @ vector, dim=0)
                right = F.normalize(w.T @ left, dim=0)
                self.vectors[name], self.pairs[name] = right, (left, right)

    # --- parts -------------------------------------------------------------------------------------------------------

    def norm(self, x: Tensor, gain: Tensor, bias: Tensor | None = None) -> Tensor:
        if self.model.norm == "dyt":
            raise AssertionError("an alpha is needed: by name")
        if self.model.norm == "layer":
            y = F.layer_norm(x, [x.shape[-1]], None, None, self.model.norm_epsilon) * gain
            return y if bias is None else y + bias
        return F.rms_norm(x, [x.shape[-1]], None, self.model.norm_epsilon) * gain

    def named(self, x: Tensor, name: str) -> Tensor:
        """A norm with the gain, and the bias if there is one, of that name."""
        if self.model.norm == "dyt":
            w = self.weights
            return w[name] * torch.tanh(w[f"{name}_alpha"] * x) + w[f"{name}_bias"]
        return self.norm(x, self.weights[name], self.weights.get(f"{name}_bias"))

    def dropped(self, x: Tensor, place: str) -> Tensor:
        """x [B, ...] without a share of its elements, by SplitMix64 as its authors wrote it, a number for two of them.

        Each sequence has numbers of its own.
        """
        share = self.model.dropout
        if share is None:
            return x
        digest = hashlib.sha256(f"dropout {self.seed} {self.step} {place}".encode()).digest()
        words = -(-x[0].numel() // 2)
        with np.errstate(over="ignore"):
            count = np.arange(1, len(x) * words + 1, dtype=np.uint64)
            z = np.uint64(int.from_bytes(digest[:8], "little")) + count * np.uint64(0x9E3779B97F4A7C15)
            z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            z = z ^ (z >> np.uint64(31))
        drawn = z.view(np.int32).reshape(len(x), -1)[:, : x[0].numel()]
        kept = torch.from_numpy(drawn >= round(share * 2**32) - 2**31).view(x.shape)
        return torch.where(kept, x / (1 - share), 0.0)

    def matrix(self, name: str) -> Tensor:
        w = self.weights[name]
        if name not in self.pairs:
            return w
        left, right = self.pairs[name]
        return self.weights[f"{name}_scale"] * w / torch.einsum("o,oi,i->", left, w, right)

    def linear(self, x: Tensor, *names: str) -> list[Tensor]:
        """What several matrices give that read the same."""
        if self.model.init == "fixup":
            x = x + self.weights[f"{names[0]}_shift"]
        return [x @ self.matrix(name).T + self.weights.get(f"{name}_bias", 0.0) for name in names]

    # --- the model ---------------------------------------------------------------------------------------------------

    def __call__(self, tokens: Tensor) -> Tensor:
        """Logits [B, T, V] of tokens [B, T]."""
        m, w = self.model, self.weights
        x = w["embedding"][tokens]
        if m.positions == "learned":
            x = x + w["positions"]
        if m.embedding_scale == "sqrt_width":
            x = x * math.sqrt(m.width)
        if m.embedding_norm:
            x = self.named(x, "embedding_norm")
        x = self.dropped(x, "embedding")
        parts = (("attention", self.attention), ("feedforward", self.feedforward))
        if m.residual_streams > 1:
            x = self.with_streams(x, parts)
        else:
            for block in range(m.depth):
                for part, function in parts:
                    x = self.with_branch(x, block, part, function)
        final = ("pre", "sandwich", "branch", "hybrid", "hybrid_star")
        if m.placement in final or (m.placement == "mix" and m.mix < 1):
            x = self.named(x, "final_norm")
        logits = x @ w["embedding"].T if m.tied_head else self.linear(x, "head")[0]
        return logits * w["logit_factor"] if m.hypersphere else logits

    @torch.no_grad()
    def normalise(self) -> None:
        """After a step of nGPT: vectors along the width have norm 1."""
        for name, x in self.weights.items() if self.model.hypersphere else ():
            if x.dim() == 2 and not name.endswith("_factor"):
                x.copy_(F.normalize(x, dim=0 if name.endswith((".projection", ".down")) else 1))

    def with_branch(self, x: Tensor, block: int, part: str, function: Callable[[Tensor, str], Tensor]) -> Tensor:
        m, w, name = self.model, self.weights, f"blocks.{block}.{part}"

        def f(read: Tensor) -> Tensor:
            y = function(read, name)
            if m.layer_scale is not None:
                y = y * w[f"{name}.layer_scale"]
            return self.dropped(y * w[f"{name}.multiplier"] if m.init == "fixup" else y, name)

        def in_front(read: Tensor) -> Tensor:
            if not getattr(m, f"{part}_norm"):
                return read
            return self.named(read, f"{name}_norm") / (math.sqrt(block + 1) if m.depth_scaled_norms else 1)

        def behind(y: Tensor) -> Tensor:
            return self.named(y, f"{name}_sum_norm")

        if m.hypersphere:  # arXiv 2410.01131, equations 10 and 11
            at, towards = F.normalize(x, dim=-1), F.normalize(f(x), dim=-1)
            return F.normalize(at + w[f"{name}.sphere_step"].abs() * (towards - at), dim=-1)
        placement, blocks = m.placement, m.depth
        if placement == "mix":
            placement = "post" if block < max(1, int(m.mix * blocks)) else "pre"
        if placement == "hybrid_star" and block == 0:
            placement = "pre"
        if placement in ("hybrid", "hybrid_star"):
            if part == "attention":
                return x + f(x)
            y = self.named(x, f"blocks.{block}.attention_sum_norm")  # of both
            return y + f(y)
        if placement == "pre":
            return x + f(in_front(x))
        if placement == "post":
            return behind(x + f(x))
        if placement == "deepnorm":
            return behind((2 * blocks) ** (1 / 4) * x + f(x))
        if placement == "deepnorm_glm":
            return behind(math.sqrt(2 * blocks) * x + f(x))
        if placement == "branchnorm":
            return behind(x + min(1.0, self.step / m.branch_steps) * f(x))
        if placement == "sandwich":
            y = self.named(function(in_front(x), name), f"{name}_output_norm")
            return x + (y * w[f"{name}.layer_scale"] if m.layer_scale is not None else y)
        if placement == "branch":
            return x + self.named(function(x, name), f"{name}_output_norm")
        assert placement == "none"
        return x + f(x)

    def with_streams(self, x: Tensor, parts: Iterable[tuple[str, Callable[[Tensor, str], Tensor]]]) -> Tensor:
        """arXiv 2512.24880: equation 5 (free), equations 7 to 9 (manifold), pre-norm branches."""
        m, w, n, k = self.model, self.weights, self.model.residual_streams, 0
        streams = x[:, :, None].repeat(1, 1, n, 1)
        for block in range(m.depth):
            for part, function in parts:
                name = f"blocks.{block}.{part}"
                mixer, offset = w[f"{name}_mixer"], w[f"{name}_mixer_offset"]
                a_pre, a_post, a_res = w[f"{name}_mixer_gate"]
                b_pre, b_post, b_res = offset.split([n, n, n * n])
                if m.stream_mixing == "free":
                    unit = F.rms_norm(streams, [m.width], None, m.norm_epsilon)  # [B, T, n, D]
                    pre = a_pre * torch.tanh(unit @ mixer[0]) + b_pre + torch.eye(n, dtype=x.dtype)[k % n]
                    post = a_post * torch.tanh(unit @ mixer[1]) + b_post + 1
                    residual = a_res * torch.tanh(mixer[2:] @ unit.mT) + b_res.view(n, n) + torch.eye(n, dtype=x.dtype)
                else:
                    unit = F.rms_norm(streams.flatten(2), [n * m.width], None, m.norm_epsilon)
                    said = (unit @ mixer.T).split([n, n, n * n], -1)
                    pre = torch.sigmoid(a_pre * said[0] + b_pre) + 1e-6
                    post = 2 * torch.sigmoid(a_post * said[1] + b_post)
                    residual = torch.softmax((a_res * said[2] + b_res).unflatten(-1, (n, n)), -2) + 1e-6
                    for turn in range(20):
                        if turn:
                            residual = residual / (residual.sum(-2, keepdim=True) + 1e-6)
                        residual = residual / (residual.sum(-1, keepdim=True) + 1e-6)
                read = torch.einsum("btn,btnd->btd", pre, streams)
                given = function(self.named(read, f"{name}_norm"), name)
                streams = residual @ streams + post[..., None] * given[:, :, None]
                k += 1
        if m.stream_mixing == "free":
            return streams.sum(2)
        unit = F.rms_norm(streams.flatten(2), [n * m.width], None, m.norm_epsilon)
        pre = torch.sigmoid(w["head_mixer_gate"] * (unit @ w["head_mixer"].T) + w["head_mixer_offset"]) + 1e-6
        return torch.einsum("btn,btnd->btd", pre, streams)

    def attention(self, x: Tensor, name: str) -> Tensor:
        m, w = self.model, self.weights
        batch, context, width = x.shape
        q, k, v = self.linear(x, f"{name}.query", f"{name}.key", f"{name}.value")
        if m.qkv_norm:
            biases = w.get(f"{name}.qkv_norm_bias", [None] * 3)
            own = zip((q, k, v), w[f"{name}.qkv_norm"], biases, strict=True)
            q, k, v = (self.norm(y, gain, bias) for y, gain, bias in own)
        if m.qk_norm and m.qk_norm_over == "heads":
            q, k = self.named(q, f"{name}.query_norm"), self.named(k, f"{name}.key_norm")
        q, k, v = (y.view(batch, context, -1, m.head_dim).transpose(1, 2) for y in (q, k, v))
        if m.qk_norm and m.qk_norm_over == "head":
            q, k = self.of_heads(q, f"{name}.query_norm"), self.of_heads(k, f"{name}.key_norm")
        if m.value_norm:
            v = self.named(v, f"{name}.value_norm")
        if m.positions == "rotary":
            q, k = rotated(q, m.rotary_base), rotated(k, m.rotary_base)
        scale = 1 / math.sqrt(m.head_dim)
        if m.hypersphere:  # equations 15 and 16
            factor, scale = w[f"{name}.qk_factor"][:, None], math.sqrt(m.head_dim)
            q, k = F.normalize(q, dim=-1) * factor, F.normalize(k, dim=-1) * factor
        scores = (q @ k.mT * scale).masked_fill(future(context), -math.inf)
        if m.attention_sink:
            sinks = w[f"{name}.sink"][None, :, None, None].expand(batch, -1, context, 1)
            scores = torch.cat([scores, sinks], -1)
        shares = torch.softmax(scores, -1)[..., :context]
        shares = self.dropped(shares, f"{name}.shares")
        mixed = (shares @ v).transpose(1, 2).reshape(batch, context, width)
        if m.attention_gate != "none":
            gate = torch.sigmoid(self.linear(x, f"{name}.gate")[0])
            mixed = mixed * gate.repeat_interleave(width // gate.shape[-1], -1)
        (y,) = self.linear(mixed, f"{name}.projection")
        return self.named(y, f"{name}.projection_norm") if m.projection_norm else y

    def of_heads(self, x: Tensor, name: str) -> Tensor:
        """[B, H, T, D], each head with a gain of its own if there are so many."""
        gain = self.weights[name]
        if gain.dim() == 1:
            return self.named(x, name)
        biases = self.weights.get(f"{name}_bias", [None] * len(gain))
        heads = zip(x.unbind(1), gain, biases, strict=True)
        return torch.stack([self.norm(head, own, bias) for head, own, bias in heads], 1)

    def feedforward(self, x: Tensor, name: str) -> Tensor:
        m, w = self.model, self.weights

        def shifted(y: Tensor) -> Tensor:
            return y + w[f"{name}.activation_shift"] if m.init == "fixup" else y

        if m.activation == "swiglu":
            gate, up = self.linear(x, f"{name}.gate", f"{name}.up")
            if m.up_norm:
                gate, up = self.named(gate, f"{name}.gate_norm"), self.named(up, f"{name}.up_norm")
            if m.hypersphere:  # equations 20 and 21, with sqrt(width) at both, as their code has it
                gate = gate * w[f"{name}.gate_factor"] * math.sqrt(m.width)
                up = up * w[f"{name}.up_factor"] * math.sqrt(m.width)
            gate = shifted(gate)
            if m.swiglu_clamp is not None:
                gate, up = gate.clamp(max=m.swiglu_clamp), up.clamp(-m.swiglu_clamp, m.swiglu_clamp)
            hidden = F.silu(gate) * up
        else:
            (up,) = self.linear(x, f"{name}.up")
            if m.up_norm:
                up = self.named(up, f"{name}.up_norm")
            if m.hypersphere:
                up = up * w[f"{name}.up_factor"] * math.sqrt(m.width)
            curves = {"gelu": F.gelu, "relu": F.relu, "gelu_tanh": gelu_tanh}
            hidden = curves[m.activation](shifted(up))
        (y,) = self.linear(hidden, f"{name}.down")
        return self.named(y, f"{name}.down_norm") if m.down_norm else y


def gelu_tanh(x: Tensor) -> Tensor:
    """As the code of GPT-2 has it."""
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def rotated(x: Tensor, base: float) -> Tensor:
    """[B, H, T, D]: the pair (2i, 2i + 1) turns by position x base^(-2i / D)."""
    context, head_dim = x.shape[2:]
    rates = torch.tensor([base ** (-2 * i / head_dim) for i in range(head_dim // 2)], dtype=x.dtype)
    angles = torch.arange(context, dtype=x.dtype)[:, None] * rates
    cos, sin, even, odd = angles.cos(), angles.sin(), x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


def future(context: int) -> Tensor:
    return torch.ones(context, context, dtype=torch.bool).triu(1)


def leading_vectors(weights: Weights, names: Iterable[str]) -> Vectors:
    """The right singular vector of the largest singular value of each matrix."""
    return {name: torch.linalg.svd(weights[name])[2][0] for name in names}


def loss_of(plain: PlainModel, batch: Tensor) -> Tensor:
    """Mean cross-entropy of a batch [B, T + 1]."""
    return F.cross_entropy(plain(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
