"""Functions with a backward pass that is written out."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

P = ParamSpec("P")
T = TypeVar("T")
WithBackward = tuple[T, Callable[..., Any], tuple[Tensor, ...]]


class _Written(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Callable[..., WithBackward[Any]], *arguments: Any) -> Any:
        value, ctx.written, kept = function(*arguments)
        ctx.save_for_backward(*kept)
        ctx.count = len(arguments)
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dy: Tensor) -> Any:
        gradients = ctx.written(*dy, *ctx.saved_tensors)
        gradients = gradients if isinstance(gradients, tuple) else (gradients,)
        return None, *gradients, *[None] * (ctx.count - len(gradients))


def differentiable(function: Callable[P, WithBackward[T]]) -> Callable[P, T]:
    """Of what `function` returns, (value, backward, kept), the value, through which gradients pass.

    `backward(dy, *kept)` gives the gradient of the first argument, or a tuple of those of the first few; the others
    have none. Tensors of the forward pass that it needs are `kept`, and not captured: so they are freed once they are
    used, and a checkpointed block can leave them out. What gradients pass through is given by position.
    """

    @wraps(function)
    def call(*arguments: P.args, **named: P.kwargs) -> T:
        result: T = _Written.apply(partial(function, **named), *arguments)  # type: ignore[no-untyped-call]
        return result

    return call
