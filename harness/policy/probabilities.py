"""Log-probabilities of tokens and entropies, and the gradients of both with respect to logits."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from harness.basics.devices import on_cpu
from harness.model import sums
from harness.model.gradients import WithBackward, differentiable
from harness.model.layers import for_each_trial


class TokenScores(NamedTuple):
    """Of each token, [r, n]: its log-probability, and entropy and log Z of what it was drawn from; nat."""

    log_probability: Tensor
    entropy: Tensor
    log_z: Tensor


class _Scores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logp = torch.log_softmax(logits, -1)
        p = for_each_trial(torch.exp, logp.clone())
        entropy = -sums.total(p * logp)
        of_token = logp.gather(-1, tokens[..., None])
        log_z = (logits.gather(-1, tokens[..., None]) - of_token).squeeze(-1)
        ctx.save_for_backward(logp, p, tokens, entropy)
        return of_token.squeeze(-1), entropy, log_z

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dlogp: Tensor, dentropy: Tensor, dlog_z: Tensor) -> Any:
        logp, p, tokens, entropy = ctx.saved_tensors
        # d log p(token) = 1(token) - p;  dH = -p (log p + H);  d log Z = p.
        slope = (dlog_z - dlogp)[..., None] - dentropy[..., None] * (logp + entropy[..., None])
        dlogits = p * slope
        is_token = torch.arange(p.shape[-1], device=p.device) == tokens[..., None]
        if on_cpu(p):
            of_token = dlogits.gather(-1, tokens[..., None]) + dlogp[..., None]
            dlogits.scatter_(-1, tokens[..., None], of_token)
        else:  # where scattering, made deterministic, would sort
            dlogits = torch.where(is_token, dlogits + dlogp[..., None], dlogits)
        return dlogits, None


def token_scores(logits_rxnxV: Tensor, tokens_rxn: Tensor) -> TokenScores:
    """Log-probability of each token under its logits, entropy and log Z; differentiable with respect to the logits."""
    scores: tuple[Tensor, Tensor, Tensor] = _Scores.apply(logits_rxnxV, tokens_rxn)  # type: ignore[no-untyped-call]
    return TokenScores(*scores)


@differentiable
def exponential(x_Rxxx: Tensor) -> WithBackward[Tensor]:
    """e^x, trial by trial on a CPU, so that no bit depends on the number of trials."""

    def backward(dy: Tensor, y: Tensor) -> Tensor:
        return dy * y

    y = for_each_trial(torch.exp, x_Rxxx.clone())
    return y, backward, (y,)


@differentiable
def summed(x_Rxxx: Tensor) -> WithBackward[Tensor]:
    """The sum along the last dim, in an order that does not depend on the number of rows; gradients pass."""
    shape = x_Rxxx.shape

    def backward(dy: Tensor) -> Tensor:
        return dy[..., None].expand(shape)

    return sums.total(x_Rxxx.contiguous()), backward, ()
