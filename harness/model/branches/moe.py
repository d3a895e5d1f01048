"""A mixture of experts in the place of the feed-forward part; its arithmetic is in harness/model/routing.py."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from harness.basics.devices import on_cpu
from harness.config import Model, Trial, shown
from harness.config.names import NEXT_BEST
from harness.model.branches.base import Branch
from harness.model.branches.feedforward import (
    SWIGLU_CLAMP,
    Feedforward,
    feedforward_size,
    idle_without_fp8,
    refused_without_gate,
)
from harness.model.dropout import jittered
from harness.model.layers import ACTIVATIONS, Activation, clamp_swiglu, is_beyond, linear
from harness.model.moe_options import Options
from harness.model.precision import FORMATS, Precision
from harness.model.routing import (
    GATES,
    ExpertSlots,
    balance_loss,
    chosen,
    combined,
    dispatched,
    expert_linear,
    hashed,
    merged,
    next_best,
    picked,
    renormalised,
    router_z_loss,
    sizes,
)
from harness.model.stale_checks import idle_stale, is_stale, refused_stale
from harness.model.tensors import Kind, ModelTensor
from harness.model.tools import Tools

CHOICE_BYTES = 2  # int16: the number of an expert that waits (harness/training/stale_routing.py)
LOSSES = ("balance", "balance_sequence", "router_z")


@dataclass(frozen=True)
class Moe(Branch):
    """Each token through a few of many small feed-forward parts, which a router chooses (arXiv 1701.06538, 2101.03961).

    Each expert is three matrices of its own, `blocks.0.moe.gate.3` and so on, so that an address names it. Losses of
    the router are differentiated, and no part of the loss that is reported.
    """

    observed: ClassVar = ("stale", "loads", "dropped", "outputs")
    fields: ClassVar = ("feedforward", "expansion", "activation", "swiglu_clamp", "smooth_swiglu", "feedforward_norm")

    @property
    def is_normed(self) -> bool:
        return self.model.feedforward_norm

    def at(self, block: int) -> Branch:
        return self if block >= self.options.dense_first else Feedforward("feedforward", self.model)

    @property
    def activation(self) -> Activation:
        return ACTIVATIONS[self.model.activation]

    @property
    def hidden(self) -> int:
        """Of one expert."""
        o: Options = self.options
        return o.hidden or max(1, feedforward_size(self.model) // (o.top + o.shared))

    @property
    def destinations(self) -> int:
        experts: int = self.options.experts
        return experts

    @property
    def _is_stale(self) -> bool:
        """Whether older weights choose."""
        return is_stale(self.options)

    @property
    def _inner(self) -> tuple[str, ...]:
        return ("gate", "up") if self.activation.gated else ("up",)

    def tensors(self) -> Iterator[ModelTensor]:
        d, hidden, o = self.model.width, self.hidden, self.options
        yield ModelTensor("router", (o.experts, d), Kind.ROUTER)
        for name in self._inner:
            for expert in range(o.experts):
                yield ModelTensor(f"{name}.{expert}", (hidden, d), Kind.HIDDEN, stacked=expert > 0)
        for expert in range(o.experts):
            yield ModelTensor(f"down.{expert}", (d, hidden), Kind.RESIDUAL, stacked=expert > 0)
        if o.shared:
            wide, is_gated = o.shared * hidden, self.activation.gated
            for name in self._inner:
                yield ModelTensor(f"shared.{name}", (wide, d), Kind.HIDDEN, stacked=name == "up" and is_gated)
            yield ModelTensor("shared.down", (d, o.shared * hidden), Kind.RESIDUAL)

    def taps(self, sequences: int) -> Mapping[str, tuple[int, ...]]:
        tokens, o = sequences * self.model.context, self.options
        shapes = {"logits": (tokens, o.experts)} | ({"stale": (2,)} if self._is_stale else {})
        shapes |= {"weights": (tokens, o.top), "loads": (o.experts,)}
        shapes |= {} if o.capacity is None else {"dropped": (1,)}
        shapes |= {"outputs": (o.experts, 2)}  # by expert the largest element, and the root mean square
        return shapes | {"output": (tokens, self.model.width)}

    def routes(self, sequences: int) -> Mapping[str, tuple[int, ...]]:
        return {"experts": (sequences * self.model.context, self.options.top)}

    def kept(self) -> int:
        c = self.model
        o: Options = self.options
        gated = 4 + 2 * (c.swiglu_clamp is not None)
        inside = gated if self.activation.gated else 2
        room = 1.0 if o.capacity is None else min(1.0, o.capacity * o.top / o.experts)
        slots = math.ceil(room * o.experts * (c.width + inside * self.hidden))
        shared = o.shared * inside * self.hidden
        return c.width + slots + shared + o.top * c.width + 4 * o.experts

    def state_bytes(self, trial: Trial, of_weights: int) -> int:
        o, train = self.options, trial.train
        choices = trial.model.depth * train.batch * trial.model.context * o.top
        a_choice = CHOICE_BYTES + (FORMATS[train.precision][0].itemsize if o.stale == "weights" else 0)
        frozen = of_weights if o.routing == "frozen" else 0
        # A ring of them, those of the step, and those that are seen ahead.
        return frozen + ((o.lag + 1 if o.lag else 0) + 2) * choices * a_choice if self._is_stale else 0

    def refused(self, trial: Trial) -> Iterator[str]:
        c, o = trial.model, self.options
        if o.top > o.experts:
            yield f"moe.top={o.top}: more than moe.experts={o.experts}; allowed: 1 to {o.experts}"
        if o.dense_first >= c.depth:
            why = f"none of model.depth={c.depth} blocks has experts"
            yield f"moe.dense_first={o.dense_first}: {why}; allowed: 0 to {c.depth - 1}"
        if o.experts % o.groups:
            yield f"moe.groups={o.groups}: does not divide moe.experts={o.experts}; allowed: a divisor of it"
        elif o.groups > 1 and o.experts // o.groups < 2:
            yield f"moe.groups={o.groups}: a group needs two experts; allowed: at most {o.experts // 2}"
        if o.groups_kept > o.groups:
            yield f"moe.groups_kept={o.groups_kept}: more than moe.groups={o.groups}; allowed: 1 to {o.groups}"
        elif o.top > (most := o.groups_kept * o.experts // o.groups):
            why = f"more than the {most} experts of moe.groups_kept={o.groups_kept}"
            yield f"moe.top={o.top}: {why}; allowed: 1 to {most}"
        yield from refused_without_gate(c)
        for field, off in (("gate_alpha", 1.0), ("up_offset", 0.0)):
            if (value := getattr(o, field)) != off and not self.activation.gated:
                yield f"moe.{field}={value}: model.activation={c.activation} has no gate; allowed: {off}"
        yield from refused_stale(o, trial)
        given = {
            "model.sigma_reparam": (shown(c.sigma_reparam), not c.sigma_reparam, "false"),
            "model.init": (c.init, c.init != "fixup", "another init"),
        }
        for key, (value, is_known, allowed) in given.items():
            if not is_known:
                yield f"{key}={value}: is not known for experts and their router; allowed: {allowed}"

    def parts(self, trial: Trial) -> Iterator[str]:
        if trial.model.swiglu_clamp is not None:
            yield SWIGLU_CLAMP
        if self.options.bias_rate:
            yield "moe.bias_rate"
        if self._is_stale:
            yield self._stale_part

    def idle(self, trial: Trial) -> Iterator[tuple[str, str]]:
        yield from idle_without_fp8(trial)
        yield from idle_stale(self.options, trial)

    @property
    def _stale_part(self) -> str:
        return "moe.lag" if self.options.lag else "moe.routing"

    def __call__(self, tools: Tools, name: str, x_RxNxD: Tensor, context: int) -> Tensor:
        o = self.options
        scores, choice, weights = self._routed(tools, name, x_RxNxD, context)
        if is_struck := f"{name}.experts" in tools.taps:  # which may send tokens twice to an expert, or to none
            sent = tools.taps.copied(f"{name}.experts", choice)
            choice, weights = self._sent_on(tools, name, scores, choice, sent, weights)
            choice, weights = merged(choice, weights, o.experts)
        slots = ExpertSlots.of(choice, o.experts, o.capacity, is_struck)
        tools.taps(f"{name}.loads", slots.loads.to(tools.dtype) / choice.shape[1])
        if o.capacity is not None and f"{name}.dropped" in tools.taps:
            tools.taps(f"{name}.dropped", slots.dropped[:, None].to(tools.dtype))
        given = self._experts(tools, name, dispatched(x_RxNxD, slots))
        if f"{name}.outputs" in tools.taps:
            tools.taps(f"{name}.outputs", sizes(given.detach(), slots.loads).to(tools.dtype))
        y = combined(given, tools.precision(weights), slots)
        if o.shared:
            y = y + self._shared(tools, name, x_RxNxD)
        return tools.tap(f"{name}.output", y)

    def _routed(self, tools: Tools, name: str, x_RxNxD: Tensor, context: int) -> tuple[Tensor, Tensor, Tensor]:
        """Scores [R, N, E], choice and weights [R, N, K]."""
        o = self.options
        if torch.is_grad_enabled() and any(trial.section("moe").jitter for trial in tools.part.trials):
            streams = tools.streams.at(f"{name}.jitter")[tools.part.rows]
            x_RxNxD = jittered(x_RxNxD, tools.strength("moe.jitter", 1, _read("jitter")), streams, tools.sequences)
        x_RxNxD = x_RxNxD if (multiplier := router_multiplier(self.model)) == 1 else x_RxNxD * multiplier
        if o.router_precision == "fp32":
            router = tools.leaf(f"{name}.router")
            bias = tools.leaf(f"{name}.router_bias") if f"{name}.router_bias" in tools.layout.by_name else None
            logits = linear(x_RxNxD.to(tools.dtype), router, Precision(tools.dtype), bias)
        else:
            logits = tools.linear(x_RxNxD, f"{name}.router")
        logits = tools.taps(f"{name}.logits", logits.to(tools.dtype))
        scores = GATES[o.gate](logits)
        choice, is_old, old_weights = self._choice(tools, name, scores)
        weights = self._weighed(tools, scores, choice)
        if tools.routes:
            tools.routes.see(_layer(name), tools.part.rows, tools.sequences, choice, weights)
        if is_old is not None and old_weights is not None:
            weights = torch.where(is_old, old_weights, weights)
        weights = tools.taps(f"{name}.weights", weights)
        if torch.is_grad_enabled():
            self._lose(tools, logits, scores, choice, context)
        return scores, choice, weights

    def _weighed(self, tools: Tools, scores: Tensor, choice: Tensor) -> Tensor:
        """The weights of the chosen experts, [R, N, K]."""
        weights = picked(scores, choice)
        if self.options.weights == "renormalised":
            weights = renormalised(weights)
        return weights * tools.strength("moe.scale", 3, _read("scale"))

    def _sent_on(
        self, tools: Tools, name: str, scores: Tensor, choice: Tensor, sent: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        """`sent`, with the best expert that was not chosen in the place of NEXT_BEST, and its weights; all [R, N, K].

        Where there is none, that is nowhere.
        """
        experts = self.options.experts
        is_next = sent == experts + NEXT_BEST
        if on_cpu(sent) and not bool(is_next.any()):
            return sent, weights
        if self.options.top == experts:
            return torch.where(is_next, experts, sent), weights
        ranked = scores.detach()
        if tools.router_bias is not None:
            ranked = ranked + tools.router_bias.of(_layer(name), tools.part.rows)
        best = next_best(ranked, choice)
        other = self._weighed(tools, scores, torch.where(is_next, best, choice))
        return torch.where(is_next, best, sent), torch.where(is_next.any(-1, keepdim=True), other, weights)

    def _choice(self, tools: Tools, name: str, scores: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Experts of these tokens, which of the tokens go by older weights, and the old weights of these, if any."""
        o, layer, ranked = self.options, _layer(name), scores.detach()
        if o.routing == "hash" and tools.tokens is not None:
            vocabulary = tools.layout.by_name["embedding"].shape[0]
            return hashed(vocabulary, o.experts, o.top, layer, ranked.device)[tools.tokens.flatten(1)], None, None
        if tools.router_bias is not None:
            ranked = ranked + tools.router_bias.of(layer, tools.part.rows)
        choice = chosen(ranked, o.top, o.groups, o.groups_kept)
        if tools.routes is None:
            return choice, None, None
        found, is_old, old_weights = tools.routes.routed(layer, tools.part.rows, tools.sequences, choice)
        if is_old is not None:
            self._notice_stale(tools, name, choice, found, is_old)
        return found, is_old, old_weights

    def _notice_stale(self, tools: Tools, name: str, choice: Tensor, found: Tensor, is_old: Tensor) -> None:
        """Tell in which trials older weights sent a token elsewhere, and of how many tokens and assignments that is."""
        is_there = (found[..., None] == choice[..., None, :]).any(-1)  # whether current weights choose it too
        shares = is_old.any(-1), ~is_there
        counts = [x.flatten(1).sum(1).to(tools.dtype) / x[0].numel() for x in shares]
        tools.notice(self._stale_part, counts[1] > 0)
        tools.taps(f"{name}.stale", torch.stack(counts, 1))

    def _lose(self, tools: Tools, logits: Tensor, scores: Tensor, choice: Tensor, context: int) -> None:
        """What the router is asked for beside the loss, where some trial wants it."""
        losses = {
            "balance": lambda: balance_loss(scores, choice),
            "balance_sequence": lambda: balance_loss(scores, choice, scores.shape[1] // context),
            "router_z": lambda: router_z_loss(logits),
        }
        for name in LOSSES:
            if any(getattr(trial.section(self.kind), name) for trial in tools.part.trials):
                tools.lose(losses[name]() * tools.strength(f"moe.{name}", 1, _read(name)))

    def _experts(self, tools: Tools, name: str, x_RxExNxD: Tensor) -> Tensor:
        gate = self._linear(tools, f"{name}.gate", x_RxExNxD) if self.activation.gated else None
        up = self._linear(tools, f"{name}.up", x_RxExNxD)
        return self._linear(tools, f"{name}.down", self._hidden(tools, gate, up), self.model.smooth_swiglu)

    def _linear(self, tools: Tools, name: str, x_RxExNxI: Tensor, by_channel: bool = False) -> Tensor:
        first, last = f"{name}.0", f"{name}.{self.options.experts - 1}"
        is_biased = f"{first}_bias" in tools.layout.by_name
        bias = tools.leaf(f"{first}_bias", f"{last}_bias") if is_biased else None
        leaf, experts = tools.leaf(first, last), self.options.experts
        return expert_linear(x_RxExNxI, leaf, experts, tools.precision, bias, by_channel)

    def _hidden(self, tools: Tools, gate: Tensor | None, up: Tensor) -> Tensor:
        activation, precision = self.activation, tools.precision
        if gate is None:
            return activation.function(up)
        bound = tools.switched("swiglu_clamp", 3)
        if bound is not None:
            shape = gate.shape
            gate, up = gate.flatten(1, -2), up.flatten(1, -2)
            if torch.is_grad_enabled():
                tools.notice(SWIGLU_CLAMP, is_beyond(gate, up, precision(bound)))
            gate, up = (x.view(shape) for x in clamp_swiglu(gate, up, precision(bound)))
        alpha, offset = self.options.gate_alpha, self.options.up_offset
        if alpha != 1:  # g sigmoid(a g) = silu(a g) / a
            gate = precision(activation.function(precision(gate * alpha))) / alpha
            return precision(gate) * precision(up + offset)
        return precision(activation.function(gate)) * (precision(up + offset) if offset else up)

    def _shared(self, tools: Tools, name: str, x_RxNxD: Tensor) -> Tensor:
        if self.activation.gated:
            gate, up = tools.linear(x_RxNxD, f"{name}.shared.gate", f"{name}.shared.up").chunk(2, -1)
        else:
            gate, up = None, tools.linear(x_RxNxD, f"{name}.shared.up")
        hidden, by_channel = self._hidden(tools, gate, up), self.model.smooth_swiglu
        return tools.linear(hidden, f"{name}.shared.down", by_channel=by_channel)


def router_multiplier(model: Model) -> float:
    """What a router reads is multiplied by: 1, or for muP base_width/width, as what the head gives; not its bias."""
    return 1.0 if model.parametrization == "standard" else model.base_width / model.width


def _layer(name: str) -> int:
    return int(name.split(".")[1])


def _read(field: str) -> Callable[[Trial], float]:
    def read(trial: Trial) -> float:
        return float(getattr(trial.section("moe"), field))

    return read
