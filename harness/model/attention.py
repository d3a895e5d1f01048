"""Causal self-attention, trial first.

Shapes: R trials, B sequences of T tokens, H heads of D features.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from harness.basics.devices import on_cpu
from harness.kernels import attention as programs
from harness.kernels import heads as kernels
from harness.kernels.use import are_used
from harness.model import sums
from harness.model.gradients import WithBackward, differentiable
from harness.model.layers import Leaf, for_each_trial, soft_cap
from harness.model.precision import Precision
from harness.model.products import CACHE_LINE, differentiable_product, product, start_alike
from harness.model.taps import RowTaps, Taps


@differentiable
def split_heads(qkv_RxNx3D: Tensor, context: int, heads: int) -> WithBackward[tuple[Tensor, ...]]:
    """Query, key and value, [R, B, H, T, D/H] each, of N = B x T tokens."""
    if are_used(qkv_RxNx3D.device):
        return kernels.split(qkv_RxNx3D, context, heads), lambda *gradients: kernels.join(gradients), ()
    shape = qkv_RxNx3D.shape
    parts = qkv_RxNx3D.view(len(qkv_RxNx3D), -1, context, 3, heads, shape[-1] // (3 * heads)).permute(3, 0, 1, 4, 2, 5)

    def backward(*gradients: Tensor) -> Tensor:
        trials, batch, heads, context, head_dim = gradients[0].shape
        dqkv = gradients[0].new_empty(trials, batch, context, 3, heads, head_dim)
        for target, gradient in zip(dqkv.permute(3, 0, 1, 4, 2, 5), gradients, strict=True):
            target.copy_(gradient)
        return dqkv.view(shape)

    return tuple(part.clone(memory_format=torch.contiguous_format) for part in parts), backward, ()


@lru_cache(maxsize=8)
def _rotation(
    context: int, head_dim: int, base: float, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """There and back, [T, D/2] complex each: neighbouring features turn by position / base^(2i/D).

    See Su et al. 2021 (arXiv 2104.09864, equation 15).
    """
    frequency = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angle = torch.outer(torch.arange(context, dtype=torch.float64), frequency)
    kind = torch.complex128 if dtype == torch.float64 else torch.complex64
    rotation = torch.polar(torch.ones_like(angle), angle).to(device, kind)
    return rotation, rotation.conj().resolve_conj()


@differentiable
def _turn(pairs: Tensor, there: Tensor, back: Tensor) -> WithBackward[Tensor]:
    return _turned(pairs, there), lambda dy: _turned(dy, back), ()


def _turned(pairs: Tensor, rotation: Tensor) -> Tensor:
    if not on_cpu(pairs) or torch.get_num_threads() == 1:
        return pairs * rotation
    # A CPU rounds complex products at the end of a thread's share differently, so each trial is shared out on its own.
    turned = torch.empty(pairs.shape, dtype=pairs.dtype)
    for source, target in zip(pairs, turned, strict=True):
        torch.mul(source, rotation, out=target)
    return turned


def rotate(x_RxBxHxTxD: Tensor, base: float, dtype: torch.dtype) -> Tensor:
    """Rotary positions: feature pairs (2i, 2i + 1) of each head turn with the position, computed in `dtype`."""
    pairs = torch.view_as_complex(x_RxBxHxTxD.to(dtype).unflatten(-1, (-1, 2)))
    turned = _turn(pairs, *_rotation(*x_RxBxHxTxD.shape[-2:], base, dtype, x_RxBxHxTxD.device))
    return torch.view_as_real(turned).flatten(-2).to(x_RxBxHxTxD.dtype)


def rotate_from(x_RxBxHxTxD: Tensor, first: int, longest: int, base: float, dtype: torch.dtype) -> Tensor:
    """The same of tokens that stand from position `first` on, of at most `longest`; without a gradient."""
    context, head_dim = x_RxBxHxTxD.shape[-2:]
    rotation, _ = _rotation(longest, head_dim, base, dtype, x_RxBxHxTxD.device)
    pairs = torch.view_as_complex(x_RxBxHxTxD.to(dtype).unflatten(-1, (-1, 2)))
    turned = _turned(pairs, rotation[first : first + context])
    return torch.view_as_real(turned).flatten(-2).to(x_RxBxHxTxD.dtype)


def rotate_both(q: Tensor, k: Tensor, base: float, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The same of queries and keys."""
    if are_used(q.device):
        context, head_dim = q.shape[-2:]
        return _turn_both(q, k, _angles(context, head_dim, base, dtype, q.device))
    return rotate(q, base, dtype), rotate(k, base, dtype)


def split_and_rotate(
    qkv_RxNx3D: Tensor, context: int, heads: int, base: float, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """Query, key and value as `split_heads` has them, the first two turned: the bits of one after the other."""
    if are_used(qkv_RxNx3D.device):
        head_dim = qkv_RxNx3D.shape[-1] // (3 * heads)
        return _split_turned(qkv_RxNx3D, context, heads, _angles(context, head_dim, base, dtype, qkv_RxNx3D.device))
    q, k, v = split_heads(qkv_RxNx3D, context, heads)
    return *rotate_both(q, k, base, dtype), v


def _angles(context: int, head_dim: int, base: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[T, D/2, 2]: cosines and sines."""
    return torch.view_as_real(_rotation(context, head_dim, base, dtype, device)[0])


@differentiable
def _turn_both(q: Tensor, k: Tensor, angles: Tensor) -> WithBackward[tuple[Tensor, ...]]:
    return tuple(kernels.turn([q, k], angles)), lambda *dy: tuple(kernels.turn(dy, angles, back=True)), ()


@differentiable
def _split_turned(qkv: Tensor, context: int, heads: int, angles: Tensor) -> WithBackward[tuple[Tensor, ...]]:
    return kernels.split(qkv, context, heads, angles), lambda *gradients: kernels.join(gradients, angles), ()


@lru_cache(maxsize=8)
def _causal_mask(context: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((context, context), -math.inf, dtype=dtype, device=device).triu_(1)


@dataclass(frozen=True)
class Limits:
    """What is done to attention logits and shares, a strength for each trial, [R, 1, 1, 1, 1]; None: nothing.

    Logits are multiplied by `temperature` (soft temperature), then become c tanh(x / c) of the `cap` c (Gemma 2, arXiv
    2408.00118; both in Rybakov et al. 2024, arXiv 2410.16682). Shares p become clip((zeta - gamma) p + gamma, 0, 1),
    with `clip` = (zeta, gamma) (Bondarenko et al. 2023, arXiv 2306.12929, equation 4): since gamma <= 0, masked
    positions stay at 0. Last, `drop` takes some of them away. A `sink` [R, H] is a learned logit of each head that
    takes a share and gives nothing for it (gpt-oss, 2025, arXiv 2508.10925).
    """

    temperature: Tensor | None = None
    cap: Tensor | None = None
    clip: tuple[Tensor, Tensor] | None = None
    drop: Callable[[Tensor], Tensor] | None = None
    sink: Leaf | None = None

    @property
    def are_off(self) -> bool:
        """Whether what the softmax reads and leaves is as it is."""
        return self.cap is None and self.clip is None and self.drop is None and self.sink is None


UNLIMITED = Limits()


@differentiable
def _scores(q: Tensor, k: Tensor, scale: float, precision: Precision, mask: Tensor | None) -> WithBackward[Tensor]:
    def backward(dscores: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        dscores, tf32 = precision(dscores), precision.tf32
        return product(dscores, k, scale, tf32=tf32), product(dscores.mT, q, scale, tf32=tf32)

    scores = precision(product(q, k.mT, scale, tf32=precision.tf32))
    return scores if mask is None else scores.add_(mask), backward, (q, k)


@differentiable
def _rounded_softmax(scores: Tensor, precision: Precision) -> WithBackward[Tensor]:
    """The softmax of someone who never leaves the format of matrix products: each step of it is rounded.

    Micikevicius et al. 2018 (arXiv 1710.03740, section 3.3) ask for its arithmetic in float32 instead.
    """

    def backward(dshares: Tensor, shares: Tensor) -> Tensor:
        mean = precision(sums.total(precision(dshares * shares))[..., None])
        return precision(shares * precision(dshares - mean))

    below = precision(scores - scores.amax(-1, keepdim=True))
    powers = precision(for_each_trial(torch.exp, below))
    shares = precision(powers / precision(sums.total(powers)[..., None]))
    return shares, backward, (shares,)


@differentiable
def _softmax_with_sink(scores_RxBxHxTxT: Tensor, sink: Leaf) -> WithBackward[Tensor]:
    """Shares of a softmax in which one more logit takes part, that of the head; in float32 at least."""

    def backward(dshares: Tensor, shares: Tensor, of_sink: Tensor) -> Tensor:
        mean = sums.total(dshares * shares)[..., None]
        of_heads = (mean * of_sink).transpose(1, 2).flatten(2)
        sums.total_into(sink.gradient, of_heads.neg_().to(sink.gradient.dtype), 2)
        return shares * (dshares - mean)

    scores = scores_RxBxHxTxT.to(torch.promote_types(scores_RxBxHxTxT.dtype, torch.float32))
    logit = sink.weight.to(scores.dtype)[:, None, :, None, None]
    largest = torch.maximum(scores.amax(-1, keepdim=True), logit)
    powers = for_each_trial(torch.exp, scores - largest)
    own = for_each_trial(torch.exp, logit - largest)
    whole = sums.total(powers)[..., None] + own
    shares = powers / whole
    return shares, backward, (shares, own / whole)


def _fused(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """torch's own causal attention of [R, B, H, T, D]."""
    shape = q.shape
    q, k, v = (_in_whole_lines(_filling(x)) for x in (q, k, v))
    mixed = F.scaled_dot_product_attention(
        q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), is_causal=True, scale=scale
    )
    mixed = mixed.view(q.shape)
    return mixed if q.shape == shape else mixed[:, : shape[1]]


def _filling(x_RxBxHxTxD: Tensor) -> Tensor:
    """Pad with sequences of zeros until a GPU has as many heads as processors.

    With fewer heads, torch's kernel cuts the sums of its backward pass by how many there are. A trial that is alone in
    its pack has it so at every step.
    """
    rows, batch, heads = x_RxBxHxTxD.shape[:3]
    if x_RxBxHxTxD.device.type != "cuda" or rows == 1:
        return x_RxBxHxTxD
    processors = torch.cuda.get_device_properties(x_RxBxHxTxD.device).multi_processor_count
    return F.pad(x_RxBxHxTxD, (0, 0, 0, 0, 0, 0, 0, max(0, -(-processors // (rows * heads)) - batch)))


def _in_whole_lines(x_RxBxHxTxD: Tensor) -> Tensor:
    """With as many more sequences of zeros that every trial's part starts alike, see harness/model/products.py."""
    if not on_cpu(x_RxBxHxTxD) or start_alike(x_RxBxHxTxD):
        return x_RxBxHxTxD
    sequence = math.prod(x_RxBxHxTxD.shape[2:]) * x_RxBxHxTxD.element_size()
    extra = -x_RxBxHxTxD.shape[1] % (CACHE_LINE // math.gcd(CACHE_LINE, sequence))
    return F.pad(x_RxBxHxTxD, (0, 0, 0, 0, 0, 0, 0, extra))


# --- by Triton's programs -----------------------------------------------------------------------------------------


@differentiable
def _attended(
    q: Tensor, k: Tensor, v: Tensor, scale: float, tf32: bool, tell: Callable[[Tensor], object]
) -> WithBackward[Tensor]:
    """What q, k and v are mixed to; `tell` is told each query's largest score, [R, B, H, T]."""

    def backward(dmixed: Tensor, q: Tensor, k: Tensor, v: Tensor, *found: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return programs.attended_backward(dmixed.contiguous(), programs.Mixed(*found), q, k, v, scale, tf32)

    found = programs.attended(q, k, v, scale, tf32)
    tell(found.largest)
    return found.mixed, backward, (q, k, v, *found)


@differentiable
def _stored_scores(q: Tensor, k: Tensor, scale: float, tf32: bool) -> WithBackward[Tensor]:
    def backward(dscores: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return programs.scores_backward(dscores.contiguous(), q, k, scale, tf32)

    return programs.scores(q, k, scale, tf32), backward, (q, k)


@differentiable
def _mixed_by(scores: Tensor, v: Tensor, scale: float, tf32: bool) -> WithBackward[Tensor]:
    def backward(dmixed: Tensor, scores: Tensor, v: Tensor, *found: Tensor) -> tuple[Tensor, Tensor]:
        return programs.mixed_by_backward(dmixed.contiguous(), programs.Mixed(*found), scores, v, scale, tf32)

    found = programs.mixed_by(scores, v, scale, tf32)
    return found.mixed, backward, (scores, v, *found)


def _by_programs(
    q: Tensor, k: Tensor, v: Tensor, scale: float, precision: Precision, tap: Taps | RowTaps, name: str
) -> Tensor:
    """[R, B, T, H, D]; scores are stored where a reader of the tap wants more than the largest of each query."""
    q, k, v = (x.contiguous() for x in (q, k, v))
    if tap.wants_all(name):
        scores = precision(tap(name, _stored_scores(q, k, scale, precision.tf32))).contiguous()
        return _mixed_by(scores, v, scale, precision.tf32)
    return _attended(q, k, v, scale, precision.tf32, lambda largest: tap(name, largest[..., None]))


# --- in either way ------------------------------------------------------------------------------------------------


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    explicit: bool,
    precision: Precision,
    tap: Taps | RowTaps,
    name: str,
    limits: Limits = UNLIMITED,
) -> Tensor:
    """softmax(scale q k^T + causal mask) v within `limits`, its products in `precision`.

    q, k, v: [R, B, H, T, D]. Returns [R, B, T, H, D]. The tap `<name>.scores` sees what the softmax reads,
    [R, B, H, T, T], masked entries at -inf; with the fused kernel it sees a copy that it cannot change, one sequence of
    the batch after the other, because all of them would not fit. That kernel has no room for `cap`, `clip`, `drop`
    and `sink`, and takes its softmax in float32.
    """
    scores_name, context = f"{name}.scores", q.shape[-2]
    if limits.temperature is not None:
        q = q * limits.temperature.to(q.dtype)
    q, k, v = precision(q), precision(k), precision(v)
    if not explicit:
        if scores_name in tap:
            mask = _causal_mask(context, q.dtype, q.device)
            with torch.no_grad():
                for one_q, one_k in zip(q.split(1, dim=1), k.split(1, dim=1), strict=True):
                    scores = precision(product(one_q, one_k.mT, scale, tf32=precision.tf32))
                    tap(scores_name, scores.add_(mask))
        return precision(_fused(q, k, v, scale)).transpose(2, 3)
    holds = precision.rounds is None and not precision.softmax  # programs round to the type of what they read alone
    if limits.are_off and holds and q.shape[-1] <= programs.WIDEST and are_used(q.device):
        return _by_programs(q, k, v, scale, precision, tap, scores_name)
    mask = _causal_mask(context, q.dtype, q.device)
    if limits.cap is None:
        scores = _scores(q, k, scale, precision, mask)
    else:  # before the mask: the cap of -inf is a number
        scores = precision(soft_cap(_scores(q, k, scale, precision, None), limits.cap)) + mask
    if scores_name in tap:
        scores = precision(tap(scores_name, scores))
    if limits.sink is not None:
        shares = _softmax_with_sink(scores, limits.sink)
    elif precision.softmax:
        shares = _rounded_softmax(scores, precision)
    else:  # as torch.autocast has it
        shares = torch.softmax(scores, -1, dtype=torch.promote_types(scores.dtype, torch.float32))
    if limits.clip is not None:
        zeta, gamma = limits.clip
        shares = torch.clamp(shares * (zeta - gamma) + gamma, 0.0, 1.0)
    if limits.drop is not None:
        shares = limits.drop(shares)
    return precision(differentiable_product(precision(shares), v, precision.tf32)).transpose(2, 3)
