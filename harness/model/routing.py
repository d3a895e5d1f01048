"""Which experts a token goes to, and the table of slots in which experts take their tokens; trial first everywhere.

Shapes: R trials, N tokens, D features, E experts, K of them for each token, C slots in each expert. Without a capacity
C is N: every expert has a slot for every token, and none is dropped. So shapes depend neither on the routing nor on a
pack's other rows, and the host waits for nothing. A slot without a token reads zeros, and nobody reads what an expert
leaves there: what is not finite in one expert stays with the tokens that went to it, forwards and backwards. Each
(token, choice) has a slot of its own, or none, so nothing is added in an order that could change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from harness.basics.devices import on_cpu
from harness.model import sums
from harness.model.dropout import random_words, stream
from harness.model.gradients import WithBackward, differentiable
from harness.model.layers import Leaf, sigmoid
from harness.model.precision import Precision
from harness.model.products import product

TINY = 1e-20  # beside a sum of scores, as in DeepSeek-V3's code


# --- scores ----------------------------------------------------------------------------------------------------------


@differentiable
def _softmax(z_RxNxE: Tensor) -> WithBackward[Tensor]:
    def backward(ds: Tensor, s: Tensor) -> Tensor:
        weighted = ds * s
        return weighted - s * sums.total(weighted)[..., None]

    shifted = z_RxNxE - z_RxNxE.amax(-1, keepdim=True)
    powers = _each(torch.exp, shifted)
    s = powers / sums.total(powers)[..., None]
    return s, backward, (s,)


@differentiable
def _sqrt_softplus(z_RxNxE: Tensor) -> WithBackward[Tensor]:
    """sqrt(log(1 + e^z)); its slope is sigmoid(z) / 2 sqrt(...)."""

    def backward(ds: Tensor, z: Tensor, s: Tensor) -> Tensor:
        return ds * _each(torch.sigmoid, z) / (2 * s)

    softplus = z_RxNxE.clamp(min=0) + _each(torch.log1p, _each(torch.exp, -z_RxNxE.abs()))
    s = softplus.sqrt()
    return s, backward, (z_RxNxE, s)


GATES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "softmax": _softmax,  # Shazeer et al. 2017, arXiv 1701.06538
    "sigmoid": sigmoid,  # DeepSeek-V3, arXiv 2412.19437, equation 15
    "sqrt_softplus": _sqrt_softplus,  # DeepSeek-V4, as transformers 5.23 has it
}


def _each(function: Callable[..., Tensor], x_Rxxx: Tensor) -> Tensor:
    """An elementwise function, on a CPU trial by trial: what is left over beside whole vectors may round otherwise."""
    if not on_cpu(x_Rxxx):
        return function(x_Rxxx)
    out = torch.empty(x_Rxxx.shape, dtype=x_Rxxx.dtype)
    for source, target in zip(x_Rxxx, out, strict=True):
        function(source, out=target)
    return out


# --- choice ----------------------------------------------------------------------------------------------------------


def chosen(scores_RxNxE: Tensor, top: int, groups: int = 1, groups_kept: int = 1) -> Tensor:
    """The `top` experts of the largest scores, int64 [R, N, K], the best first; of equal ones the lower number.

    With several `groups` of neighbours, those of the groups whose two largest scores have the largest sums
    (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).
    """
    scores = scores_RxNxE.detach()
    if groups > 1:
        by_group = scores.unflatten(-1, (groups, -1))
        of_group = sums.total(by_group.sort(dim=-1, descending=True, stable=True).values[..., :2])
        best = of_group.sort(dim=-1, descending=True, stable=True).indices[..., :groups_kept]
        is_kept = (best[..., None] == torch.arange(groups, device=scores.device)).any(-2)
        scores = torch.where(is_kept[..., None], by_group, -torch.inf).flatten(-2)
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :top]


def next_best(scores_RxNxE: Tensor, choice_RxNxK: Tensor) -> Tensor:
    """The best expert of each token that is not among its `choice`, int64 [R, N, 1]; of equal ones the lower number."""
    is_chosen = (choice_RxNxK[..., None] == torch.arange(scores_RxNxE.shape[-1], device=choice_RxNxK.device)).any(-2)
    return chosen(torch.where(is_chosen, -torch.inf, scores_RxNxE), 1)


@lru_cache(maxsize=64)
def hashed(vocabulary: int, experts: int, top: int, layer: int, device: torch.device) -> Tensor:
    """The experts of each token of a vocabulary, int64 [V, K], drawn by its number and the layer alone.

    As the first layers of DeepSeek-V4 route, by a table that is theirs; Roller et al. 2021 (arXiv 2106.04426).
    """
    start = torch.tensor([stream(0, layer, "experts of tokens")])
    words = random_words(start, range(vocabulary * experts)).view(vocabulary, experts)
    return words.sort(dim=-1, stable=True).indices[:, :top].contiguous().to(device)


@differentiable
def picked(scores_RxNxE: Tensor, choice_RxNxK: Tensor) -> WithBackward[Tensor]:
    """The scores of the chosen experts, [R, N, K]."""
    experts = scores_RxNxE.shape[-1]

    def backward(dw: Tensor, choice: Tensor) -> Tensor:
        is_it = choice[..., None] == torch.arange(experts, device=choice.device)
        return _added(torch.where(is_it, dw[..., None], 0.0))  # no expert is chosen twice

    return scores_RxNxE.gather(-1, choice_RxNxK), backward, (choice_RxNxK,)


def merged(choice_RxNxK: Tensor, weights_RxNxK: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Each expert of a token once, with the sum of its weights; the other places are nowhere, which is `experts`."""
    first = (choice_RxNxK[..., :, None] == choice_RxNxK[..., None, :]).int().argmax(-1)  # place of the first such
    is_first = first == torch.arange(choice_RxNxK.shape[-1], device=choice_RxNxK.device)
    return torch.where(is_first, choice_RxNxK, experts), _merged(weights_RxNxK, first)


@differentiable
def _merged(weights_RxNxK: Tensor, first_RxNxK: Tensor) -> WithBackward[Tensor]:
    places = torch.arange(first_RxNxK.shape[-1], device=first_RxNxK.device)

    def backward(dw: Tensor, first: Tensor) -> Tensor:
        return dw.gather(-1, first)

    is_there = first_RxNxK[..., None] == places  # [R, N, K, K]: which place takes a weight
    return _added(torch.where(is_there, weights_RxNxK[..., None], 0.0)), backward, (first_RxNxK,)


# --- slots -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ExpertSlots:
    """The slot of each (token, choice), expert x C + its place there: `places` [R, N K], and E C where it is dropped.

    `sources` [R, E C]: which (token, choice) is in a slot, token x K + choice, and N K where nothing is. Both name the
    row behind the others, which is zero, for nothing. `loads` [R, E]: how many tokens chose an expert.
    """

    places: Tensor
    sources: Tensor
    loads: Tensor
    experts: int
    top: int
    room: int  # C
    drops: bool  # whether some (token, choice) may have no slot

    @property
    def dropped(self) -> Tensor:
        """The share of all choices that have no slot, float64 [R]."""
        return sums.mean((self.places == self.experts * self.room).double())

    @classmethod
    def of(
        cls, choice_RxNxK: Tensor, experts: int, capacity: float | None = None, some_are_lost: bool = False
    ) -> ExpertSlots:
        """Tokens stand in an expert's slots in their own order; those beyond its `capacity` are dropped there.

        There is room for capacity x K N / E of them, rounded up (Fedus et al. 2021, arXiv 2101.03961, equation 3).
        With `some_are_lost` a choice may be `experts`, which is nowhere; no token has an expert twice.
        """
        tokens, top = choice_RxNxK.shape[1:]
        room = tokens if capacity is None else min(tokens, math.ceil(capacity * top * tokens / experts))
        flat = choice_RxNxK.flatten(1)
        numbers = torch.arange(experts, device=flat.device)
        loads, begins = ((flat[..., None] == numbers).sum(1), (flat[..., None] < numbers).sum(1))
        order = flat.sort(dim=1, stable=True).indices
        rank = order.sort(dim=1).indices  # of each in that order
        place = rank - begins.gather(1, flat.clamp(max=experts - 1) if some_are_lost else flat)
        places = torch.where((place < room) & (flat < experts), flat * room + place, experts * room)
        inside = torch.arange(room, device=flat.device)
        ordered = (begins[..., None] + inside).clamp(max=flat.shape[1] - 1).flatten(1)
        is_free = (inside >= loads[..., None]).flatten(1)
        sources = torch.where(is_free, flat.shape[1], order.gather(1, ordered))
        return cls(places, sources, loads, experts, top, room, some_are_lost or room < tokens)


def sizes(y_RxExCxD: Tensor, loads_RxE: Tensor) -> Tensor:
    """By expert the largest element, by size, and the root mean square over its tokens, float64 [R, E, 2]."""
    squares = sums.total(y_RxExCxD.double().square().flatten(2))
    used = loads_RxE.clamp(min=1, max=y_RxExCxD.shape[2]) * y_RxExCxD.shape[3]
    return torch.stack([y_RxExCxD.abs().amax((2, 3)).double(), (squares / used).sqrt()], -1)


def _rows(x_RxMxD: Tensor, which_RxS: Tensor) -> Tensor:
    """Those rows of each trial's matrix, [R, S, D]."""
    trials, rows, width = x_RxMxD.shape
    offset = which_RxS + torch.arange(0, trials * rows, rows, device=which_RxS.device)[:, None]
    return x_RxMxD.reshape(trials * rows, width)[offset.flatten()].view(*which_RxS.shape, width)


def _emptied(x_RxExCxD: Tensor, drops: bool) -> Tensor:
    """The slots one after the other, with a row of zeros behind them where some are asked for that are not there."""
    flat = x_RxExCxD.flatten(1, 2)
    return _with_zeros(flat) if drops else flat


def _with_zeros(x_RxMxD: Tensor) -> Tensor:
    """A row of zeros behind the others."""
    return torch.cat([x_RxMxD, torch.zeros_like(x_RxMxD[:, :1])], 1)


@differentiable
def dispatched(x_RxNxD: Tensor, slots: ExpertSlots) -> WithBackward[Tensor]:
    """What each expert reads in its slots, [R, E, C, D]."""
    tokens = x_RxNxD.shape[1]

    def backward(dx: Tensor, places: Tensor) -> Tensor:
        return _added(_rows(_emptied(dx, slots.drops), places).unflatten(1, (tokens, -1)))

    read = _rows(_with_zeros(x_RxNxD), slots.sources.floor_divide(slots.top))
    return read.unflatten(1, (slots.experts, slots.room)), backward, (slots.places,)


@differentiable
def combined(y_RxExCxD: Tensor, weights_RxNxK: Tensor, slots: ExpertSlots) -> WithBackward[Tensor]:
    """sum_k w_k expert_k(x), [R, N, D], in the order of the choices; nothing of an expert that dropped the token."""
    tokens = weights_RxNxK.shape[1]

    def backward(dy: Tensor, given: Tensor, weights: Tensor, sources: Tensor) -> tuple[Tensor, Tensor]:
        each = (dy[:, :, None] * weights[..., None]).flatten(1, 2)
        arrived = _rows(_with_zeros(each), sources).unflatten(1, (slots.experts, slots.room))
        return arrived, sums.total(dy[:, :, None] * given)

    given = _rows(_emptied(y_RxExCxD, slots.drops), slots.places).unflatten(1, (tokens, -1))
    return _added(given * weights_RxNxK[..., None]), backward, (given, weights_RxNxK, slots.sources)


def _added(x_RxNxKxD: Tensor) -> Tensor:
    """The sum over K, one after the other."""
    total = x_RxNxKxD[:, :, 0].clone()
    for k in range(1, x_RxNxKxD.shape[2]):
        total += x_RxNxKxD[:, :, k]
    return total


@differentiable
def expert_linear(
    x_RxExCxI: Tensor,
    leaf: Leaf,
    experts: int,
    precision: Precision,
    bias: Leaf | None = None,
    by_channel: bool = False,
) -> WithBackward[Tensor]:
    """x through each expert's own matrix, [R, E, C, out]; `leaf` has them stacked, [R, E out, I], biases [R, E out].

    `by_channel`: see `layers.linear`.
    """

    def backward(dy: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        if bias is not None:
            bias.gradient.copy_(sums.total(dy, 2).flatten(1))
        dy = precision.gradient(dy)
        leaf.gradient.copy_(precision(product(dy.mT, x, tf32=precision.tf32)).flatten(1, 2))
        return precision(product(dy, weight, tf32=precision.tf32))

    x, weight = precision.operand(x_RxExCxI, by_channel), precision.operand(leaf.weight).unflatten(1, (experts, -1))
    y = product(x, weight.mT, tf32=precision.tf32)
    if bias is not None:
        y = y.add_(precision(bias.weight).unflatten(1, (experts, -1))[:, :, None])
    return precision(y), backward, (x, weight)


@differentiable
def renormalised(weights_RxNxK: Tensor) -> WithBackward[Tensor]:
    """The weights of a token over their sum."""

    def backward(dy: Tensor, y: Tensor, total: Tensor) -> Tensor:
        return (dy - sums.total(dy * y)[..., None]) / total

    total = sums.total(weights_RxNxK)[..., None] + TINY
    y = weights_RxNxK / total
    return y, backward, (y, total)


# --- losses of the router --------------------------------------------------------------------------------------------


@differentiable
def balance_loss(scores_RxNxE: Tensor, choice_RxNxK: Tensor, sequences: int = 1) -> WithBackward[Tensor]:
    """E sum_i f_i P_i, [R]: 1 where all experts have as many tokens, E / K where K take all; through P alone.

    f_i is the share of assignments that expert i has, P_i the mean of its share of the scores (Fedus et al. 2021, arXiv
    2101.03961, equations 4 to 6; there K is 1). With several `sequences` the mean over these of the same within each
    (DeepSeek-V3, arXiv 2412.19437, equations 17 to 20).
    """
    tokens, experts = scores_RxNxE.shape[1:]
    factor = experts / choice_RxNxK.shape[-1]

    def backward(dl: Tensor, shares: Tensor, total: Tensor, taken: Tensor) -> Tensor:
        dshares = taken.repeat_interleave(tokens // sequences, 1) * (dl * (factor / tokens))[:, None, None]
        return (dshares - sums.total(dshares * shares)[..., None]) / total

    total = sums.total(scores_RxNxE)[..., None] + TINY
    shares = scores_RxNxE / total
    is_taken = (choice_RxNxK[..., None] == torch.arange(experts, device=shares.device)).any(2).to(shares.dtype)
    share, taken = (_mean_of_tokens(x, sequences) for x in (shares, is_taken))
    return sums.mean(sums.total(share * taken)) * factor, backward, (shares, total, taken)


def _mean_of_tokens(x_RxNxE: Tensor, sequences: int) -> Tensor:
    """Within each sequence, [R, sequences, E]."""
    return sums.mean(x_RxNxE.unflatten(1, (sequences, -1)).transpose(2, 3).contiguous())


@differentiable
def router_z_loss(z_RxNxE: Tensor) -> WithBackward[Tensor]:
    """The mean of the squared log-sum-exp of router logits, [R] (Zoph et al. 2022, arXiv 2202.08906, equation 5)."""
    tokens = z_RxNxE.shape[1]

    def backward(dl: Tensor, log_z: Tensor, shares: Tensor) -> Tensor:
        return (log_z * (dl * (2 / tokens))[:, None])[..., None] * shares

    largest = z_RxNxE.amax(-1, keepdim=True)
    powers = _each(torch.exp, z_RxNxE - largest)
    total = sums.total(powers)
    log_z = _each(torch.log, total) + largest[..., 0]
    return sums.mean(log_z.square()), backward, (log_z, powers / total[..., None])
