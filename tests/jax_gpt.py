"""The GPT of tests/plain_gpt.py in JAX, one at a time; `jax.vmap` makes it several."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import absl.logging
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from tests.plain_gpt import PlainGPT

EPSILON = 1e-6  # of layer norms
# optax's log closes what it writes to when another library sets up logging: not this process' standard error.
absl.logging.get_absl_handler().python_handler.setStream(io.StringIO())
Weights = dict[str, Array]


def stacked_weights(models: Sequence[PlainGPT]) -> Weights:
    """The weights of several models by name, with an axis of models first."""
    states = [model.state_dict() for model in models]
    return {name: jnp.asarray(np.stack([state[name].numpy() for state in states])) for name in states[0]}


def norm(x: Array, gain: Array) -> Array:
    """Layer norm without a bias."""
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + EPSILON) * gain


def turned(x: Array) -> Array:
    """Rotary positions of [batch, heads, context, head_dim], as `tests.plain_gpt.Rotary` has them."""
    context, size = x.shape[-2:]
    angles = np.arange(context)[:, None] * 10000.0 ** (-np.arange(0, size, 2) / size)
    cos, sin = (part.astype(np.float32) for part in (np.cos(angles), np.sin(angles)))
    even, odd = x[..., 0::2], x[..., 1::2]
    return jnp.stack((even * cos - odd * sin, even * sin + odd * cos), -1).reshape(x.shape)


def logits_of(weights: Weights, tokens: Array, head_dim: int) -> Array:
    """Logits [batch, context, vocabulary] of tokens [batch, context]."""
    batch, context = tokens.shape
    x = weights["embedding.weight"][tokens]
    hidden = np.tril(np.ones((context, context), bool))
    depth = 1 + max(int(name.split(".")[1]) for name in weights if name.startswith("blocks."))
    for number in range(depth):
        own = {name.split(".", 2)[2]: value for name, value in weights.items() if name.startswith(f"blocks.{number}.")}
        qkv = norm(x, own["attention_norm.weight"]) @ own["qkv.weight"].T
        q, k, v = jnp.moveaxis(qkv.reshape(batch, context, 3, -1, head_dim), (2, 3), (0, 2))
        scores = turned(q) @ jnp.swapaxes(turned(k), -1, -2) * head_dim**-0.5
        mixed = jax.nn.softmax(jnp.where(hidden, scores, -jnp.inf), -1) @ v
        x = x + jnp.swapaxes(mixed, 1, 2).reshape(x.shape) @ own["projection.weight"].T
        up = norm(x, own["feedforward_norm.weight"]) @ own["up.weight"].T
        x = x + jax.nn.gelu(up, approximate=False) @ own["down.weight"].T
    return norm(x, weights["final_norm.weight"]) @ weights["head.weight"].T


def training(head_dim: int, lr: float, clip: float) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """What begins a model's optimizer (weights -> state), and what takes a step of it.

    A step is (weights, state, tokens [batch, context + 1]) -> (weights, state, loss); AdamW and clipping are those of
    `torch.optim.AdamW` and `clip_grad_norm_` with their own defaults, decay of every weight included.
    """
    optimizer = optax.chain(optax.clip_by_global_norm(clip), optax.adamw(lr, weight_decay=1e-2))

    def loss_of(weights: Weights, tokens: Array) -> Array:
        logits = logits_of(weights, tokens[:, :-1], head_dim)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    def update(weights: Weights, state: Any, tokens: Array) -> tuple[Weights, Any, Array]:
        loss, gradients = jax.value_and_grad(loss_of)(weights, tokens)
        changes, state = optimizer.update(gradients, state, weights)
        return optax.apply_updates(weights, changes), state, loss

    return optimizer.init, update
