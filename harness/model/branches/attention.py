"""Causal self-attention; its arithmetic is in harness/model/attention.py."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from harness.config import Model, Trial, shown
from harness.model import sums
from harness.model.attention import Limits, attend, rotate_both, rotate_from, split_and_rotate, split_heads
from harness.model.branches.base import Branch
from harness.model.gradients import WithBackward, differentiable
from harness.model.hypersphere import unit
from harness.model.layers import kept_by_norms, sigmoid
from harness.model.tensors import Kind, ModelTensor
from harness.model.tools import Tools

NO_LOGITS = ("attention_cap", "soft_clip_high", "dropout", "attention_sink")  # of what a fused kernel has no room for
UNDONE = "divides out the scale of the weights that it shrinks"
UNDOES_QK_CLIP = {
    "qk_norm": (False, UNDONE),
    "qkv_norm": (False, UNDONE),
    "sigma_reparam": (False, UNDONE),
    "attention_cap": (None, "bounds the logits that it looks at"),
}


@dataclass(frozen=True)
class Attention(Branch):
    """Heads of queries, keys and values, whose products are told apart by a softmax (Vaswani et al. 2017)."""

    fields: ClassVar = (
        *("attention_norm", "qkv_norm", "projection_norm", "attention", "qk_norm", "qk_norm_shared", "qk_norm_over"),
        *("value_norm", "attention_temperature", "attention_cap", "soft_clip_high", "qk_clip"),
        *("attention_gate", "attention_sink"),
    )

    @property
    def is_normed(self) -> bool:
        return self.model.attention_norm

    def tensors(self) -> Iterator[ModelTensor]:
        c, d = self.model, self.model.width
        yield ModelTensor("query", (d, d), Kind.HIDDEN)
        yield ModelTensor("key", (d, d), Kind.HIDDEN, stacked=True)
        yield ModelTensor("value", (d, d), Kind.HIDDEN, stacked=True)
        if c.attention_gate != "none":
            yield ModelTensor("gate", (d if c.attention_gate == "element" else d // c.head_dim, d), Kind.HIDDEN)
        yield ModelTensor("projection", (d, d), Kind.RESIDUAL)
        if c.qkv_norm:
            yield ModelTensor("qkv_norm", (3, d), Kind.GAIN)
        if c.qk_norm:
            of_head = (c.head_dim,) if c.qk_norm_shared else (d // c.head_dim, c.head_dim)
            for name in ("query_norm", "key_norm"):
                yield ModelTensor(name, of_head if c.qk_norm_over == "head" else (d,), Kind.GAIN)
        if c.value_norm:
            yield ModelTensor("value_norm", (c.head_dim,), Kind.GAIN)
        if c.projection_norm:
            yield ModelTensor("projection_norm", (d,), Kind.GAIN)
        if c.hypersphere:
            yield ModelTensor("qk_factor", (d // c.head_dim, c.head_dim), Kind.SPHERE_QK)
        if c.attention_sink:
            yield ModelTensor("sink", (d // c.head_dim,), Kind.SINK)
        if c.init == "fixup":
            for name in ("query_shift", "projection_shift"):
                yield ModelTensor(name, (1,), Kind.SHIFT)

    def taps(self, sequences: int) -> Mapping[str, tuple[int, ...]]:
        c = self.model
        heads, stream = (sequences, c.width // c.head_dim, c.context), (sequences * c.context, c.width)
        shapes = dict.fromkeys(("query", "key", "value"), (*heads, c.head_dim))
        gates = {"none": 0, "head": c.width // c.head_dim, "element": c.width}[c.attention_gate]
        gate = {"gate": (sequences * c.context, gates)} if gates else {}
        return {**shapes, "scores": (*heads, c.context), **gate, "projection": stream}

    def kept(self) -> int:
        c = self.model
        copies = 2 + (c.attention_cap is not None) + 2 * (c.soft_clip_high is not None) + 2 * (c.dropout is not None)
        fed = c.width * (3 * c.qkv_norm + 2 * c.qk_norm + c.value_norm + c.projection_norm)
        gated = {"none": 0, "head": c.width + 2 * (c.width // c.head_dim), "element": 3 * c.width}[c.attention_gate]
        gated += 2 * c.width * c.hypersphere
        return (5 * c.width + gated) + copies * c.width // c.head_dim * c.context + kept_by_norms(c, fed)

    def operations(self) -> int:
        """Of scores and what is mixed by them."""
        return 2 * self.model.context * self.model.width

    def refused(self, trial: Trial) -> Iterator[str]:
        c = self.model
        if c.width % c.head_dim:
            why = f"not divisible by model.head_dim={c.head_dim}"
            yield f"model.width={c.width}: {why}; allowed: a multiple of it"
        if c.positions == "rotary" and c.head_dim % 2:
            yield f"model.head_dim={c.head_dim}: odd; allowed with model.positions=rotary: an even number"
        if not c.explicit_attention:
            explicit = "model.attention=explicit"
            for name in NO_LOGITS:
                if (value := getattr(c, name)) != (off := getattr(Model(), name)):
                    why = "model.attention=fused keeps no logits"
                    yield f"model.{name}={shown(value)}: {why}; allowed: {shown(off)}, or {explicit}"
            if (softmax := trial.train.softmax) != "fp32":
                why = f"attention is fused (model.attention={c.attention}, model.context={c.context})"
                yield f"train.softmax={softmax}: {why}, with a softmax of its own; allowed: fp32, or {explicit}"
        if c.attention_sink and trial.train.softmax != "fp32":
            why = f"train.softmax={trial.train.softmax} is not known for it"
            yield f"model.attention_sink=true: {why}; allowed: false, or train.softmax=fp32"
        if c.attention_gate != "none" and c.init == "fixup":
            why = "model.init=fixup is made for attention without one"
            yield f"model.attention_gate={c.attention_gate}: {why}; allowed: none, or another init"
        for name, (off, why) in UNDOES_QK_CLIP.items():
            if c.qk_clip is not None and (value := getattr(c, name)) != off:
                allowed = f"null, or model.{name}={shown(off)}"
                yield f"model.qk_clip={c.qk_clip}: model.{name}={shown(value)} {why}; allowed: {allowed}"
        if not c.qk_norm_shared and not c.qk_norm:
            yield "model.qk_norm_shared=false: there is no model.qk_norm; allowed: true, or model.qk_norm=true"
        elif c.qk_norm_over == "heads" and not c.qk_norm_shared:
            why = "model.qk_norm_over=heads has a gain for each feature already"
            yield f"model.qk_norm_shared=false: {why}; allowed: true"

    def __call__(self, tools: Tools, name: str, x_RxNxD: Tensor, context: int) -> Tensor:
        c, precision = self.model, tools.precision
        qkv = tools.linear(x_RxNxD, f"{name}.query", f"{name}.value")
        if c.qkv_norm:
            parts = qkv.unflatten(-1, (3, c.width))
            qkv = precision(tools.norm(f"{name}.qkv_norm", parts)).flatten(-2)
        if c.qk_norm and c.qk_norm_over == "heads":
            query, key, value = qkv.chunk(3, -1)
            query, key = tools.norm(f"{name}.query_norm", query), tools.norm(f"{name}.key_norm", key)
            qkv = torch.cat([precision(query), precision(key), value], -1)
        q, k, v = self._heads(tools, name, qkv, context)
        if tools.key_values is not None:
            k, v = tools.key_values.extended(name, k, v)
        zeta = tools.switched("soft_clip_high", 5)
        limits = Limits(
            tools.switched("attention_temperature", 5),
            tools.switched("attention_cap", 5),
            None if zeta is None else (zeta, tools.strength("soft_clip_low", 5)),
            None if c.dropout is None else partial(tools.dropped, f"{name}.shares"),
            tools.leaf(f"{name}.sink") if c.attention_sink else None,
        )
        scale, explicit = attention_multiplier(c), c.explicit_attention
        mixed = attend(q, k, v, scale, explicit, precision, tools.taps, name, limits)
        mixed = self._gated(tools, name, mixed.reshape(x_RxNxD.shape), x_RxNxD)
        projection = tools.linear(mixed, f"{name}.projection")
        return tools.norm(f"{name}.projection_norm", tools.tap(f"{name}.projection", projection))

    def _gated(self, tools: Tools, name: str, mixed_RxNxD: Tensor, x_RxNxD: Tensor) -> Tensor:
        """What attention mixed times sigmoid(gate x): Qiu et al. 2025, arXiv 2505.06708, section 2.2, position G1."""
        if self.model.attention_gate == "none":
            return mixed_RxNxD
        share = sigmoid(tools.tap(f"{name}.gate", tools.linear(x_RxNxD, f"{name}.gate")))
        if self.model.attention_gate == "element":
            return tools.precision(mixed_RxNxD * tools.precision(share))
        return tools.precision(_heads_times(mixed_RxNxD, tools.precision(share)))

    def _heads(self, tools: Tools, name: str, qkv: Tensor, context: int) -> tuple[Tensor, ...]:
        """Queries, keys and values: split, and turned at once where nothing looks at queries and keys before that."""
        c, heads = self.model, self.model.width // self.model.head_dim
        turns, is_normed = c.positions == "rotary", c.qk_norm and c.qk_norm_over == "head"
        cached = tools.key_values
        is_watched = f"{name}.query" in tools.taps or f"{name}.key" in tools.taps
        if cached is None and turns and not is_normed and not is_watched and not c.hypersphere:
            q, k, v = split_and_rotate(qkv, context, heads, c.rotary_base, tools.dtype)
            return q, k, tools.tap(f"{name}.value", self._normed_value(tools, name, v))
        q, k, v = split_heads(qkv, context, heads)
        if is_normed:
            q = tools.precision(tools.norm(f"{name}.query_norm", q))
            k = tools.precision(tools.norm(f"{name}.key_norm", k))
        v = self._normed_value(tools, name, v)
        q, k, v = (tools.tap(f"{name}.{part}", x) for part, x in (("query", q), ("key", k), ("value", v)))
        if turns and cached is not None:
            q, k = (rotate_from(x, cached.read, c.context, c.rotary_base, tools.dtype) for x in (q, k))
        elif turns:
            q, k = rotate_both(q, k, c.rotary_base, tools.dtype)
        return *(self._on_sphere(tools, name, q, k) if c.hypersphere else (q, k)), v

    def _on_sphere(self, tools: Tools, name: str, q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        """Both of norm 1, times one learned factor for each feature."""
        both = unit(torch.cat([q, k], 1).to(tools.dtype))
        return tools.precision(tools.scaled(f"{name}.qk_factor", both)).chunk(2, 1)

    def _normed_value(self, tools: Tools, name: str, v: Tensor) -> Tensor:
        return tools.precision(tools.norm(f"{name}.value_norm", v)) if self.model.value_norm else v


@differentiable
def _heads_times(x_RxNxD: Tensor, share_RxNxH: Tensor) -> WithBackward[Tensor]:
    """The features of each head times its share."""
    size = x_RxNxD.shape[-1] // share_RxNxH.shape[-1]

    def backward(dy: Tensor, x: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
        dy, x = (values.unflatten(-1, (-1, size)) for values in (dy, x))
        return (dy * share[..., None]).flatten(-2), sums.total(dy * x)

    whole = x_RxNxD.unflatten(-1, (-1, size)) * share_RxNxH[..., None]
    return whole.flatten(-2), backward, (x_RxNxD, share_RxNxH)


def attention_multiplier(model: Model) -> float:
    """What query-key products are multiplied by: 1/sqrt(head_dim), or for muP sqrt(base_head_dim)/head_dim.

    On the hypersphere, where both have norm 1, it is sqrt(head_dim).
    """
    if model.hypersphere:
        return math.sqrt(model.head_dim)
    base = model.base_head_dim or model.head_dim
    if model.parametrization == "standard" or base == model.head_dim:
        return 1 / math.sqrt(model.head_dim)
    return math.sqrt(base) / model.head_dim
