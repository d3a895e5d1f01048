"""Residual streams side by side: what a branch reads of them, and how they go on beside what it gives.

Shapes: R trials, N tokens, n streams, D features. With f for a branch, each token's streams x [n, D] become

    residual x + post f(pre x)        pre, post [n], residual [n, n]

all three functions of x (`model.stream_mixing`):

- free: hyper-connections (Zhu et al. 2024, arXiv 2409.19606, in the notation of arXiv 2512.24880, equation 5). They are
  gate tanh(mixer RMSNorm(x)) + offset, for each stream by itself. They start as a pre-norm model: pre reads stream
  number (branch mod n), post is 1 and residual the identity. At the end streams are added up.
- manifold: manifold-constrained hyper-connections (Xie et al. 2025, arXiv 2512.24880, equations 7 to 9). All streams
  are looked at together: z = gate mixer RMSNorm(x) + offset, pre = sigmoid(z), post = 2 sigmoid(z), and residual is
  exp(z), scaled in 20 rounds until its columns and rows add up to 1. At the end streams are collapsed as DeepSeek-V4
  does it in transformers 5.23, by a mixer of their own; that epsilons stand where they do is from there, too.

Free mixers start at zero, as in the authors' code. How the others start is not published: here they start as other
matrices, and their offsets at zero, as those of transformers. So all streams are alike at first, and mixed evenly.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.config import Model, Trial
from harness.model import sums
from harness.model.gradients import WithBackward, differentiable
from harness.model.layers import Leaf, for_each_trial, linear, sigmoid, tanh
from harness.model.precision import Precision
from harness.model.tensors import Kind, ModelTensor
from harness.model.tools import Tools

ROUNDS = 20  # of Sinkhorn and Knopp, arXiv 2512.24880, table 5
TINY = 1e-6  # beside pre and beside sums, as in DeepSeek-V4's code
BRANCHES_OF_A_BLOCK = 2
MIXER, HEAD_MIXER = "mixer", "head_mixer"  # their tensors; of a branch behind its name


@dataclass(frozen=True)
class Mixing:
    """How the streams of each token meet a branch: [R, N, n], [R, N, n] and [R, N, n, n]."""

    pre: Tensor
    post: Tensor
    residual: Tensor


# --- tensors ---------------------------------------------------------------------------------------------------------


def mixers(model: Model, name: str) -> Iterator[ModelTensor]:
    """The tensors by which streams are mixed at the branch of that name; none where there is one stream."""
    n = model.residual_streams
    if n > 1:
        is_free = model.stream_mixing == "free"
        shape = (2 + n, model.width) if is_free else ((2 + n) * n, n * model.width)
        yield from _mixer(f"{name}_{MIXER}", shape, (2 + n) * n, 3)


def head_mixers(model: Model) -> Iterator[ModelTensor]:
    """The tensors by which streams are collapsed at the end, where they are not added up."""
    n = model.residual_streams
    if n > 1 and model.stream_mixing == "manifold":
        yield from _mixer(HEAD_MIXER, (n, n * model.width), n, 1)


def _mixer(name: str, shape: tuple[int, int], given: int, gates: int) -> Iterator[ModelTensor]:
    yield ModelTensor(name, shape, Kind.MIXER)
    yield ModelTensor(f"{name}_gate", (gates,), Kind.MIX_GATE)
    yield ModelTensor(f"{name}_offset", (given,), Kind.MIX_OFFSET)


def kept_of_streams(model: Model) -> int:
    """Values that one token leaves at one branch for the backward pass."""
    n = model.residual_streams
    if n == 1:
        return 0
    rounds = 0 if model.stream_mixing == "free" else (2 * ROUNDS - 1) * (n * n + n) + n * n
    return (2 * n + 1) * model.width + rounds + 2 * (2 + n) * n + 4 * n


def kept_at_the_end(model: Model) -> int:
    """Values that one token leaves where streams are collapsed."""
    return model.residual_streams * model.width if next(head_mixers(model), None) else 0


def refused(trial: Trial) -> Iterator[str]:
    """What streams cannot be beside: norms on their sum, sizes that are not known for them."""
    model = trial.model
    if model.residual_streams == 1:
        return
    key = f"model.residual_streams={model.residual_streams}"
    placements = ("pre", "sandwich", "branch", "none")
    if model.placement not in placements:
        why = f"model.placement={model.placement} works on one stream"
        yield f"{key}: {why}; allowed: 1, or model.placement={', '.join(placements)}"
    if model.parametrization != "standard":
        why = f"model.parametrization={model.parametrization} is not known for what mixes streams"
        yield f"{key}: {why}; allowed: 1, or model.parametrization=standard"
    if model.init == "fixup":
        yield f"{key}: model.init=fixup is made for one stream; allowed: 1, or another init"


def idle(trial: Trial) -> Iterator[tuple[str, str]]:
    """(key, why) of what says how streams are mixed where there is one."""
    if trial.model.residual_streams == 1:
        for name in ("stream_mixing", "stream_gate"):
            if (value := getattr(trial.model, name)) != getattr(Model(), name):
                yield f"model.{name}", f"model.{name}={value}: nothing is mixed, with model.residual_streams=1"


# --- the passes ------------------------------------------------------------------------------------------------------


@differentiable
def spread(x_RxNxD: Tensor, streams: int) -> WithBackward[Tensor]:
    """Each stream starts as the embedding: [R, N, n, D]."""
    return x_RxNxD[:, :, None].expand(-1, -1, streams, -1).contiguous(), lambda dy: sums.total(dy, 2), ()


def mixing_of(tools: Tools, name: str, block: int, place: int, x_RxNxnxD: Tensor) -> Mixing:
    """How the streams meet the branch of that name, which is the one of that place in its block."""
    n, number = x_RxNxnxD.shape[2], BRANCHES_OF_A_BLOCK * block + place
    if tools.config.stream_mixing == "free":
        normed = _unit(x_RxNxnxD, tools.config.norm_epsilon)
        given = linear(normed.flatten(1, 2), tools.leaf(f"{name}_{MIXER}"), Precision(tools.dtype))
        of_stream = given.unflatten(1, (-1, n)).mT  # [R, N, 2 + n, n]: what each stream says
        pre, post, residual = _said(tools, f"{name}_{MIXER}", tanh(of_stream.flatten(2)), [n, n, n * n])
        chosen = torch.zeros(n, dtype=x_RxNxnxD.dtype, device=x_RxNxnxD.device)
        chosen[number % n] = 1
        identity = torch.eye(n, dtype=x_RxNxnxD.dtype, device=x_RxNxnxD.device)
        mixing = Mixing(pre + chosen, post + 1, residual.unflatten(-1, (n, n)) + identity)
    else:
        pre, post, residual = _looked_at(tools, f"{name}_{MIXER}", x_RxNxnxD, [n, n, n * n])
        doubly = doubly_stochastic(residual.unflatten(-1, (n, n)))
        mixing = Mixing(sigmoid(pre) + TINY, 2 * sigmoid(post), doubly)
    tap = f"blocks.{block}.mixing.{place}"
    if tap in tools.taps:
        mixing = Mixing(mixing.pre, mixing.post, tools.taps(tap, mixing.residual.flatten(2)).view_as(mixing.residual))
    return mixing


def collapsed_at_the_end(tools: Tools, x_RxNxnxD: Tensor) -> Tensor:
    """What the final norm reads, [R, N, D]."""
    if tools.config.stream_mixing == "free":
        return _sum(x_RxNxnxD)
    (pre,) = _looked_at(tools, HEAD_MIXER, x_RxNxnxD, [x_RxNxnxD.shape[2]])
    return collapsed(x_RxNxnxD, sigmoid(pre) + TINY)


def _looked_at(tools: Tools, name: str, x_RxNxnxD: Tensor, sizes: list[int]) -> list[Tensor]:
    """What a mixer that sees all streams together says."""
    normed = _unit(x_RxNxnxD.flatten(2), tools.config.norm_epsilon)
    return _said(tools, name, linear(normed, tools.leaf(name), Precision(tools.dtype)), sizes)


def _said(tools: Tools, name: str, given_RxNxK: Tensor, sizes: list[int]) -> list[Tensor]:
    gate, offset = tools.leaf(f"{name}_gate"), tools.leaf(f"{name}_offset")
    return list(_gated(given_RxNxK, gate, offset, sizes).split(sizes, -1))


@differentiable
def _gated(x_RxNxK: Tensor, gate: Leaf, offset: Leaf, sizes: list[int]) -> WithBackward[Tensor]:
    """x times a learned factor [R, G], each for a part of K, plus a learned summand [R, K]."""

    def backward(dy: Tensor, x: Tensor, factor: Tensor) -> Tensor:
        sums.total_into(offset.gradient, dy, 1)
        of_parts = sums.total(dy * x, 1).split(sizes, -1)
        gate.gradient.copy_(torch.stack([sums.total(part) for part in of_parts], -1))
        return dy * factor

    columns = torch.cat([gate.weight[:, i : i + 1].expand(-1, size) for i, size in enumerate(sizes)], -1)
    factor = columns[:, None]
    return x_RxNxK * factor + offset.weight[:, None], backward, (x_RxNxK, factor)


@differentiable
def _unit(x_RxxxD: Tensor, epsilon: float) -> WithBackward[Tensor]:
    """x over its root mean square along the last dim, without a gain."""

    def backward(dy: Tensor, normed: Tensor, rate: Tensor) -> Tensor:
        return (dy - normed * sums.mean(dy * normed)[..., None]).mul_(rate)

    rate = sums.mean(x_RxxxD * x_RxxxD)[..., None].add_(epsilon).rsqrt_()
    normed = x_RxxxD * rate
    return normed, backward, (normed, rate)


def _weighted(x_RxNxnxD: Tensor, weights_RxNxn: Tensor) -> Tensor:
    """The sum of streams times their weights, [R, N, D]."""
    return sums.total(x_RxNxnxD * weights_RxNxn[..., None], 2)


@differentiable
def _sum(x_RxNxnxD: Tensor) -> WithBackward[Tensor]:
    shape = x_RxNxnxD.shape
    return sums.total(x_RxNxnxD, 2), lambda dy: dy[:, :, None].expand(shape), ()


@differentiable
def collapsed(x_RxNxnxD: Tensor, pre_RxNxn: Tensor) -> WithBackward[Tensor]:
    """The sum of streams times `pre`, [R, N, D]."""

    def backward(dy: Tensor, x: Tensor, pre: Tensor) -> tuple[Tensor, Tensor]:
        each = dy[:, :, None]
        return each * pre[..., None], sums.total(each * x)

    return _weighted(x_RxNxnxD, pre_RxNxn), backward, (x_RxNxnxD, pre_RxNxn)


@differentiable
def mixed(x_RxNxnxD: Tensor, branch_RxNxD: Tensor, post_RxNxn: Tensor, residual: Tensor) -> WithBackward[Tensor]:
    """residual x + post branch, [R, N, n, D]. Streams are added one by one: so no bit depends on the pack's size."""
    streams = range(x_RxNxnxD.shape[2])

    def backward(dy: Tensor, x: Tensor, branch: Tensor, post: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
        dx = _streams_times(residual.mT, dy)
        of_pairs = [sums.total(dy * x[:, :, j, None]) for j in streams]
        return dx, _weighted(dy, post), sums.total(dy * branch[:, :, None]), torch.stack(of_pairs, -1)

    mixed = _streams_times(residual, x_RxNxnxD).add_(branch_RxNxD[:, :, None] * post_RxNxn[..., None])
    return mixed, backward, (x_RxNxnxD, branch_RxNxD, post_RxNxn, residual)


def _streams_times(matrix_RxNxnxn: Tensor, x_RxNxnxD: Tensor) -> Tensor:
    """Each token's matrix times its streams."""
    given = matrix_RxNxnxn[..., 0, None] * x_RxNxnxD[:, :, 0, None]
    for j in range(1, x_RxNxnxD.shape[2]):
        given.add_(matrix_RxNxnxn[..., j, None] * x_RxNxnxD[:, :, j, None])
    return given


@differentiable
def doubly_stochastic(z_RxNxnxn: Tensor) -> WithBackward[Tensor]:
    """exp(z), its columns and then its rows scaled to add up to 1, 20 times (Sinkhorn & Knopp 1967).

    The first time it is a softmax of each column, which no large z overflows.
    """

    def backward(dm: Tensor, first: Tensor, *scaled: Tensor) -> Tensor:
        for at in range(len(scaled) - 2, -1, -2):
            matrix, size = scaled[at], scaled[at + 1]
            dm = (dm - sums.total(dm * matrix, _dim(at)).unsqueeze(_dim(at))).div_(size)
        weighted = dm * first
        return weighted - first * sums.total(weighted, -2).unsqueeze(-2)

    below = z_RxNxnxn - z_RxNxnxn.amax(-2, keepdim=True)
    powers = for_each_trial(torch.exp, below)
    first = powers / sums.total(powers, -2).unsqueeze(-2)
    matrix, scaled = first + TINY, list[Tensor]()
    for half in range(2 * ROUNDS - 1):
        dim = -1 if half % 2 == 0 else -2
        size = sums.total(matrix, dim).unsqueeze(dim).add_(TINY)
        matrix = matrix / size
        scaled += [matrix, size]
    return matrix, backward, (first, *scaled)


def _dim(at: int) -> int:
    """Along which the matrix that stands there was scaled: rows first, then columns and rows in turn."""
    return -1 if at // 2 % 2 == 0 else -2
